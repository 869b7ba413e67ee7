"""Costs by counting: the bytes of live tensors and the operations on them, on real or on fake ones."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pure_loopgrad._modes import OperationMode, compiled_run_eagerly


class LiveBytes(OperationMode):
    """Follows the storage of every tensor that an operation makes, until it is freed. Compiled functions, whose
    operations nobody sees, run as they were written. Sparse tensors have no storage and do not count.

    Attributes:
        now: bytes that live.
        peak: the most that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: int = 0
        self.peak: int = 0
        self._known: dict[int, int] = {}
        self._eager: AbstractContextManager[None] = compiled_run_eagerly()

    def __enter__(self) -> LiveBytes:
        self._eager.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._eager.__exit__(*error)

    def handle(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for t in tree_leaves((args, kwargs)):
            self._follow(t, made_here=False)
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            self._follow(t, made_here=True)
        return out

    def _follow(self, t: Any, *, made_here: bool) -> None:
        if not isinstance(t, Tensor) or t.layout is not torch.strided:
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


class Flops(OperationMode):
    """Adds up floating-point operations, by torch's own formulas.

    Torch's own counter also follows modules, by hooks on their inputs; those fail where a module is called on a bare
    parameter, as attention is with learned queries.

    Attributes:
        total: of matrix products, convolutions and attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total: int = 0

    def handle(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def id_of(storage: torch.UntypedStorage) -> int:
    """What two Python objects for one storage have in common. Private: a fake storage has no address to compare."""
    return int(storage._cdata)
