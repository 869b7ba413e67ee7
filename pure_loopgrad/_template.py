"""The structure of a pytree as plain Python containers: torch.compile can follow those, and not optree's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes."""

    index: int


@dataclass(frozen=True)
class Template:
    """A pytree with slots for its tensors.

    Attributes:
        tree: containers of containers, slots and constants.
        slots: how many slots the pytree has; those that `tree` does not show stand in a container that is unknown here.
    """

    tree: Any
    slots: int

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether there are no containers but tuples, named tuples, lists and dicts."""
        return _count(self.tree) == self.slots

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The pytree with these tensors."""
        return _fill(self.tree, tensors)

    def take(self, value: Any) -> list[Any]:
        """The leaves of a pytree of this structure.

        Raises:
            TypeError: it has another one.
        """
        found: list[Any] = [None] * self.slots
        _take(self.tree, value, found)
        return found


def _children(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree) if isinstance(tree, (tuple, list)) else []


def _count(tree: Any) -> int:
    if isinstance(tree, Slot):
        return 1
    if type(tree) not in (tuple, list, dict) and not hasattr(tree, "_fields"):
        return 0
    return sum(map(_count, _children(tree)))


def _fill(tree: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(tree, Slot):
        return tensors[tree.index]
    if type(tree) is tuple:
        return tuple([_fill(child, tensors) for child in tree])
    if type(tree) is list:
        return [_fill(child, tensors) for child in tree]
    if type(tree) is dict:
        return {key: _fill(child, tensors) for key, child in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_fill(child, tensors) for child in tree])
    return tree


def _take(tree: Any, value: Any, found: list[Any]) -> None:
    if isinstance(tree, Slot):
        if not isinstance(value, (Tensor, int, float, complex)):
            raise TypeError(f"expected a tensor or a number, not a {type(value).__name__}")
        found[tree.index] = value
        return
    if type(value) is not type(tree):
        raise TypeError(f"expected a {type(tree).__name__}, not a {type(value).__name__}")
    if isinstance(tree, dict):
        if value.keys() != tree.keys():
            raise TypeError(f"expected the keys {list(tree)}, not {list(value)}")
        for key, child in tree.items():
            _take(child, value[key], found)
    elif isinstance(tree, (tuple, list)):
        if len(value) != len(tree):
            raise TypeError(f"expected {len(tree)} entries, not {len(value)}")
        for child, part in zip(tree, value, strict=True):
            _take(child, part, found)
