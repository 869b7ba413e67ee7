"""What a fold over gradients is, and the pieces that folds are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._accumulate import may_grow_in_place
from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._levels import active_levels, in_forward_mode
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import LoopValueError

BLOCK = 2**16  # entries of a gradient that are copied together


@dataclass(frozen=True, eq=False)
class Fold:
    """A statistic of gradients that come a chunk at a time.

    Attributes:
        init: `init(grad, n) -> state`, given the gradient of the first iteration, for its shapes, and the number of
            iterations.
        update: `update(state, grads, iterations) -> state`; every leaf of grads has a leading axis, one entry for each
            of `iterations`, a range.
        finish: `finish(state) -> result`.
        then: for a statistic that needs a second pass, `then(result) -> Fold`, whose result counts.
    """

    init: Callable[[PyTree, int], Any]
    update: Callable[[Any, PyTree, range], Any]
    finish: Callable[[Any], Any]
    then: Callable[[Any], Fold] | None = None


def in_place() -> bool:
    """Whether a fold's state may be changed in place: no transform and no graph owns it."""
    return may_grow_in_place() and not torch.is_grad_enabled() and not in_forward_mode()


def added(total: Tensor, term: Tensor, factor: float = 1.0) -> Tensor:
    """In place, where nobody else may own the total."""
    if in_place():
        return total.add_(term, alpha=factor)
    return total + term * factor


def zeros(grad: PyTree, n: int) -> PyTree:
    return _tree.tree_map(lambda g: torch.zeros_like(g, dtype=accumulation_dtype(g.dtype)), grad)


def add_sums(total: PyTree, grads: PyTree, iterations: range) -> PyTree:
    return _tree.tree_map(
        lambda t, g: added(t, g[0] if len(iterations) == 1 else g.sum(0, dtype=t.dtype)), total, grads
    )


def numbers(of: Callable[[PyTree], Tensor]) -> Fold:
    """A fold that keeps one number of each gradient."""
    return Fold(lambda grad, n: [], lambda state, grads, its: [*state, of(grads)], torch.cat)


def norms_of(grads: PyTree) -> Tensor:
    """The Euclidean norm of each gradient of a chunk, over all leaves."""
    return length(_tree.leaves_of(grads), 1)


def length(leaves: Sequence[Tensor], kept: int) -> Tensor:
    """The Euclidean norm over all leaves, for each entry of their first `kept` axes, at least in float32.

    The entries are scaled by a power of two first, so that no square overflows or vanishes, and nothing else changes.
    """
    flat = [g.reshape(*g.shape[:kept], -1) for g in some(leaves)]
    most = torch.stack([_largest(g) for g in flat]).amax(0)
    scale = torch.where((most > 0) & torch.isfinite(most), torch.exp2(most.log2().floor()), 1).unsqueeze(-1)
    parts = [torch.linalg.vector_norm(_wide(b) / scale, dim=-1) for g in flat for b in _blocks(g)]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return norms * scale.squeeze(-1)


def some(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    """The leaves of a gradient.

    Raises:
        LoopValueError: there are none.
    """
    if not leaves:
        raise LoopValueError(
            "the gradient has no leaf, so it has no norm and no direction: params holds no float or complex tensor, or "
            "wrt= or requires_grad=False leaves all of them out"
        )
    return leaves


def _wide(g: Tensor) -> Tensor:
    return g.to(accumulation_dtype(g.dtype))


def _largest(g: Tensor) -> Tensor:
    """The largest magnitude along the last axis, a constant; zero for no entries."""
    g = g.detach()
    return _wide(torch.linalg.vector_norm(g, inf, dim=-1) if g.shape[-1] else g.abs().sum(-1))


def _blocks(g: Tensor) -> tuple[Tensor, ...]:
    """A leaf in parts, so that what is made of one is small; whole under a transform, which may keep each."""
    return torch.split(g, BLOCK, -1) if active_levels() == 0 and g.shape[-1] else (g,)


def rows(g: Tensor) -> Tensor:
    """A chunk's gradients of one leaf as a matrix, at least in float32."""
    return _wide(g.reshape(g.shape[0], -1))


def refuse_unlike(direction: PyTree, grad: PyTree) -> None:
    """Raises LoopValueError for a direction that is not of the structure and the shapes of a gradient."""
    (found, spec), (leaves, expected) = _tree.flatten(direction), _tree.flatten(grad)
    if spec != expected:
        raise LoopValueError(f"direction has the structure {spec}, but the gradient {expected}: give it that one")
    for accessor, d, g in zip(spec.accessors(), found, leaves, strict=True):
        path = accessor.codify("direction")
        if not isinstance(d, Tensor):
            raise LoopValueError(f"{path} is a {type(d).__name__}; expected a tensor of shape {tuple(g.shape)}")
        if d.shape != g.shape:
            raise LoopValueError(
                f"{path} has {_tree.describe(d)}, but the gradient there {_tree.describe(g)}: give it that shape"
            )
