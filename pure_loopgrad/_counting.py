"""Memory by counting: the bytes of live tensors, on real or on fake ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # the public way to see every operation, in spite of its name
)
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Follows the storage of every tensor that an operation makes, until it is freed.

    Attributes:
        now: bytes that live.
        peak: the most that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the same
        self.now: int = 0
        self.peak: int = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for t in tree_leaves((args, kwargs)):
            self._follow(t, made_here=False)
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            self._follow(t, made_here=True)
        return out

    def _follow(self, t: Any, *, made_here: bool) -> None:
        if not isinstance(t, Tensor):
            return
        storage = t.untyped_storage()
        key = id_of(storage)
        if key in self._known:
            return
        self._known[key] = size = storage.nbytes() if made_here else 0
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


def id_of(storage: torch.UntypedStorage) -> int:
    """What two Python objects for one storage have in common. Private: a fake storage has no address to compare."""
    return int(storage._cdata)
