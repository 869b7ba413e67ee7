"""Tensors that a body reads and that were made inside a transform around the loop: a range, a mask, a detached value.

torch.func wraps whatever is made inside a transform. A loop runs below all of them, where such a tensor is foreign; so
wherever the body passes one to torch, what it wraps stands in. That is right for those of which no transform asks
anything, and only for these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loopgrad._levels import active_levels, is_constant, is_wrapped
from pure_loopgrad._names import reachable

NEAR = 100  # how far a search goes that every call makes


@dataclass(frozen=True)
class Constants:
    """The wrapped constants of a call, by id, each with what it wraps."""

    wrapped: list[Tensor] = field(default_factory=list)  # so that no id is used again
    plain: dict[int, Tensor] = field(default_factory=dict)

    def find(self, body: Callable[..., Any]) -> None:
        """Notes those that a body leads to. Called above all levels, as only there a transform can be asked."""
        if active_levels() == 0:
            return
        for t in near(body):
            if isinstance(t, Tensor) and is_wrapped(t) and id(t) not in self.plain and is_constant(t):
                self.wrapped.append(t)
                self.plain[id(t)] = torch.func.debug_unwrap(t)

    def inherit(self, outer: Constants) -> None:
        """Takes over those of a loop around, below whose levels nobody can be asked."""
        self.wrapped.extend(outer.wrapped)
        self.plain.update(outer.plain)

    def unwrapped(self, value: Any) -> Any:
        """A value with the constants in it as plain tensors; it is nested in plain containers only."""
        if isinstance(value, Tensor):
            return self.plain.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self.unwrapped, value))
        return {k: self.unwrapped(v) for k, v in value.items()} if type(value) is dict else value


class Unwrapping(TorchFunctionMode):
    """Inside it, torch's functions get plain tensors for the constants."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self.constants = constants

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self.constants.unwrapped(args), **self.constants.unwrapped(kwargs or {}))


def needs_watch(body: Callable[..., Any], harmless: set[int]) -> bool:
    """Whether a body can reach what shows in no output, once it uses it: a tensor of a transform around the loop, whose
    derivative is lost below that transform, or a generator; unless its id is among the `harmless`.
    """
    suspects = (v for v in near(body) if isinstance(v, torch.Generator) or (isinstance(v, Tensor) and is_wrapped(v)))
    return any(id(v) not in harmless for v in suspects)


def near(body: Callable[..., Any]) -> Iterator[Any]:
    """What a body can reach, but for a module's tensors, which are plain ones, and many."""
    return (value for _, value in islice(reachable(inspect.unwrap(body), (torch.nn.Module, Tensor)), NEAR))
