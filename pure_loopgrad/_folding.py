"""What a fold over gradients is, and the pieces that folds are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._levels import active_levels
from pure_loopgrad._tree import PyTree


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
    return active_levels() == 0 and not torch.is_grad_enabled()


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
    leaves = [torch.linalg.vector_norm(rows(g), dim=1) for g in _tree.leaves_of(grads)]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(leaves), dim=0)
    return norms


def rows(g: Tensor) -> Tensor:
    """A chunk's gradients of one leaf as a matrix, at least in float32."""
    return g.reshape(g.shape[0], -1).to(accumulation_dtype(g.dtype))
