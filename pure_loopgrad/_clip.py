"""Transforms of single gradients, before they are folded."""

from __future__ import annotations

from collections.abc import Callable

from pure_loopgrad import _tree
from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._folding import length
from pure_loopgrad._tree import PyTree


def clip_norm(limit: float, eps: float = 1e-6) -> Callable[[PyTree], PyTree]:
    """A transform for `fold_grads`: scales each gradient down to a norm, over all leaves.

    Args:
        limit: the norm that none exceeds.
        eps: added to the norm before dividing, as Opacus does.

    Returns:
        A function from a gradient to a gradient, in float32 for half precision.
    """

    def clip(grad: PyTree) -> PyTree:
        factor = (limit / (length(_tree.leaves_of(grad), 0) + eps)).clamp(max=1.0)
        return _tree.tree_map(lambda g: g.to(accumulation_dtype(g.dtype)) * factor, grad)

    return clip


def clip_leaf_norms(limit: float, eps: float = 1e-6) -> Callable[[PyTree], PyTree]:
    """A transform for `fold_grads`: scales each leaf of each gradient down to a norm of its own.

    Args:
        limit: the norm that no leaf exceeds.
        eps: added to the norm before dividing.

    Returns:
        A function from a gradient to a gradient, in float32 for half precision.
    """
    return lambda grad: _tree.tree_map(lambda g: clip_norm(limit, eps)(g), grad)
