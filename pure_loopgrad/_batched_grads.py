"""Batches of cotangents and tangents that torch makes by its first vmap, which autograd still uses.

`torch.autograd.grad(..., is_grads_batched=True)`, `torch.autograd.functional.jacobian(..., vectorize=True)` and
gradcheck wrap their batch in tensors of their own kind, which know nothing of torch.func and its rule for an
autograd.Function. A loop that meets them is put under `torch.vmap` instead.

Private names of torch: there is no public way to ask. tests/test_private_torch.py says so if they move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pure_loopgrad._dual_level import in_dual_level


def level_of_autograd() -> int:
    """How many of these vmaps are active here."""
    torch._C._vmapmode_increment_nesting()
    return torch._C._vmapmode_decrement_nesting()


def any_batched(tensors: Sequence[Tensor]) -> bool:
    """Whether some of these stand for a batch of that kind."""
    return level_of_autograd() > 0 and any(map(is_batched_by_autograd, tensors))


def is_batched_by_autograd(t: Tensor) -> bool:
    """Whether the tensor stands for a batch of that kind."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(t))


@contextmanager
def _left(level: int) -> Iterator[None]:
    """A block outside of these vmaps, which forbid all random numbers."""
    for _ in range(level):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(level):
            torch._C._vmapmode_increment_nesting()


def vmapped(fn: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`fn` of these tensors for the whole batch; its outputs are of the kind that autograd gave.

    By `torch.vmap`, but one after the other in a dual level, of whose tensors that takes none.
    """
    batched = [is_batched_by_autograd(t) for t in tensors]
    here = level_of_autograd()
    inner = [torch._remove_batch_dim(t, here, 0, 0) if b else t for t, b in zip(tensors, batched, strict=True)]
    with _left(here):
        if in_dual_level():
            size = next(t.shape[0] for t, b in zip(inner, batched, strict=True) if b)
            each = [fn(*(t[i] if b else t for t, b in zip(inner, batched, strict=True))) for i in range(size)]
            outs = tuple(map(torch.stack, zip(*each, strict=True)))
        else:
            outs = torch.vmap(fn, in_dims=tuple(0 if b else None for b in batched))(*inner)
    return tuple(torch._add_batch_dim(t, 0, here) for t in outs)
