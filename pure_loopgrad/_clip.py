"""Transforms of single gradients, before they are folded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pure_loopgrad import _tree
from pure_loopgrad._tree import PyTree


def clip_norm(limit: float, eps: float = 1e-6) -> Callable[[PyTree], PyTree]:
    """A transform for `fold_grads`: scales each gradient down to a norm, over all leaves.

    Args:
        limit: the norm that none exceeds.
        eps: added to the norm before dividing, as Opacus does.

    Returns:
        A function from a gradient to a gradient.
    """

    def clip(grad: PyTree) -> PyTree:
        norm = torch.stack([torch.linalg.vector_norm(g) for g in _tree.leaves_of(grad)]).norm()
        return _tree.tree_map(lambda g: g * (limit / (norm + eps)).clamp(max=1.0), grad)

    return clip


def clip_leaf_norms(limit: float, eps: float = 1e-6) -> Callable[[PyTree], PyTree]:
    """A transform for `fold_grads`: scales each leaf of each gradient down to a norm of its own.

    Args:
        limit: the norm that no leaf exceeds.
        eps: added to the norm before dividing.

    Returns:
        A function from a gradient to a gradient.
    """
    return lambda grad: _tree.tree_map(lambda g: clip_norm(limit, eps)(g), grad)
