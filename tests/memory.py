"""Counting memory: bytes that autograd saves, and bytes that live tensors hold at their peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows every storage that an operation returns until it is freed; `peak` is the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self._follow(t.untyped_storage(), 0)  # whatever is unknown here was there before
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._follow(t.untyped_storage(), t.untyped_storage().nbytes())
        return out

    def _follow(self, storage, size: int) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._seen.pop(key)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that lived at once in tensors made while `run` ran; what existed before does not count."""
    with LiveBytes() as mode:
        run()
    return mode.peak


def saved_bytes(run: Callable[[], object]) -> int:
    """The bytes that ordinary autograd keeps for the backward of what `run` returns."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    assert result is not None  # the graph lives until here
    return sum(storages.values())
