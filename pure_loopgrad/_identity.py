"""What stays the same where a function is made anew: the key by which something is kept for it."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def identity_of(fn: Callable[..., Any]) -> Any:
    """The code of a function below wrappers, partials and methods, the module of a body from `from_module`, or itself.

    What it returns can be hashed and referred to weakly; for an object that cannot, it is its type.
    """
    found: Any = inspect.unwrap(fn)
    while isinstance(found, functools.partial):
        found = inspect.unwrap(found.func)
    found = getattr(found, "identity", getattr(found, "__func__", found))
    found = getattr(found, "__code__", found)
    try:
        hash(weakref.ref(found))
    except TypeError:
        return type(found)
    return found


DEPTH = 6  # of closures in closures; one that holds itself ends here
MANY = 64  # parts beyond which a container counts by being the same one
PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to itself alone, for an object that is not to be kept alive."""

    number: int
    living: Callable[[], Any]

    @classmethod
    def of(cls, found: Any) -> _Same:
        try:
            return cls(id(found), weakref.ref(found))
        except TypeError:
            return cls(id(found), lambda: found)

    def __eq__(self, other: object) -> bool:
        mine = self.living()
        return isinstance(other, _Same) and mine is not None and mine is other.living()

    def __hash__(self) -> int:
        return self.number


def contents_of(found: Any, depth: int = DEPTH) -> Any:
    """What may decide about the shapes that a function returns, beside its arguments, as something to be looked up by.

    Functions of one code with equal contents return equal shapes for equal arguments: of what they hold, tensors count
    by their shapes, numbers with a fraction not at all, and objects by being the same ones.
    """
    if isinstance(found, PLAIN):
        return type(found), found
    if isinstance(found, Tensor):
        return tuple(found.shape), found.dtype
    if isinstance(found, (float, complex)) or depth == 0:
        return type(found)
    if isinstance(found, _Whole):
        return _Same.of(found.found)
    parts = _parts(found)
    if parts is None or len(parts) > MANY:
        return _Same.of(getattr(found, "identity", found))
    return type(found), *(contents_of(part, depth - 1) for part in parts)


def _parts(found: Any) -> list[Any] | None:
    """What a function or a container holds; None for another object."""
    if isinstance(found, (tuple, list)):
        return list(found)
    if isinstance(found, dict):
        return [*found.keys(), *found.values()]
    if isinstance(found, functools.partial):
        return [found.func, found.args, found.keywords]
    if isinstance(found, types.MethodType):
        return [found.__func__, _Whole(found.__self__)]
    if not isinstance(found, types.FunctionType):
        return None
    cells = [_content(cell) for cell in found.__closure__ or ()]
    return [_Whole(found.__code__), *cells, found.__defaults__, found.__kwdefaults__]


@dataclass(frozen=True)
class _Whole:
    """An object that is not to be taken apart."""

    found: Any


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None
