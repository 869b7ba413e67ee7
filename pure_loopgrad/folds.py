"""Folds over the gradients of single iterations: what `plg.fold_grads` computes in one pass, without storing them.

A fold may change its own state in place: nobody else sees it. The gradients it must leave alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._clip import clip_leaf_norms as clip_leaf_norms
from pure_loopgrad._clip import clip_norm as clip_norm
from pure_loopgrad._folding import Fold as Fold
from pure_loopgrad._folding import add_sums, length, norms_of, numbers, refuse_unlike, rows, some, zeros
from pure_loopgrad._moments import Moments as Moments
from pure_loopgrad._moments import NoiseScale as NoiseScale
from pure_loopgrad._moments import moments as moments
from pure_loopgrad._moments import noise_scale as noise_scale
from pure_loopgrad._moments import variance as variance
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import LoopValueError


class Top(NamedTuple):
    """The largest norms, falling, and the iterations that have them."""

    norms: Tensor
    iterations: Tensor


def sum() -> Fold:
    """The sum, in float32 for half precision.

    Returns:
        A fold; its result has the structure of the gradient. Memory: one gradient.
    """
    return Fold(zeros, add_sums, lambda state: state)


def mean() -> Fold:
    """The mean.

    Returns:
        A fold; its result has the structure of the gradient. Memory: one gradient.
    """
    return Fold(
        lambda grad, n: (n, zeros(grad, n)),
        lambda state, grads, its: (state[0], add_sums(state[1], grads, its)),
        lambda state: _tree.tree_map(lambda t: t / state[0], state[1]),
    )


def noisy_sum(std: float, generator: torch.Generator | None = None) -> Fold:
    """The sum with Gaussian noise on it, once; behind a clipping `transform`, the gradient of DP-SGD before division.

    Args:
        std: of the noise in each entry: the noise multiplier times the clipping norm.
        generator: where the noise comes from.

    Returns:
        A fold; its result has the structure of the gradient. Memory: one gradient.

    Source: Abadi et al., arXiv 1607.00133, algorithm 1.
    """

    def noisy(t: Tensor) -> Tensor:
        return t + std * torch.empty_like(t).normal_(generator=generator)

    return Fold(zeros, add_sums, lambda state: _tree.tree_map(noisy, state))


def norms() -> Fold:
    """The Euclidean norm of each gradient over all leaves.

    Returns:
        A fold; its result has shape (n,). Memory: n numbers.
    """
    return numbers(norms_of)


def leaf_norms() -> Fold:
    """The Euclidean norm of each leaf of each gradient.

    Returns:
        A fold; its result has the structure of the gradient, with leaves of shape (n,). Memory: n numbers a leaf.
    """
    return Fold(
        lambda grad, n: [],
        lambda state, grads, its: [*state, _tree.tree_map(lambda g: length([g], 1), grads)],
        lambda state: _tree.tree_map(lambda *parts: torch.cat(parts), *state),
    )


def inner(direction: PyTree) -> Fold:
    """The inner product of each gradient with a direction (the real part, where complex).

    Args:
        direction: of the structure of the gradient, None where that is.

    Returns:
        A fold; its result has shape (n,). Memory: n numbers.

    Raises:
        LoopValueError: a direction of another structure, or a leaf of it of another shape than the gradient's.
    """
    flat = [d.reshape(-1).conj() for d in _tree.split(direction)[0]]

    def products(grads: PyTree) -> Tensor:
        pairs = zip(some(_tree.leaves_of(grads)), flat, strict=True)
        return torch.stack([(rows(g) @ d.to(accumulation_dtype(g.dtype))).real for g, d in pairs]).sum(0)

    found = numbers(products)

    def init(grad: PyTree, n: int) -> Any:
        refuse_unlike(direction, grad)
        return found.init(grad, n)

    return Fold(init, found.update, found.finish)


def gram() -> Fold:
    """The inner products of all pairs of gradients.

    All pairs of one pass need all gradients: this fold keeps them, the only one that does.

    Returns:
        A fold; its result has shape (n, n). Memory: n gradients.
    """

    def finish(state: list[list[Tensor]]) -> Tensor:
        leaves = [torch.cat(parts) for parts in zip(*state, strict=True)]
        return torch.stack([(g @ g.mH).real for g in leaves]).sum(0)

    return Fold(
        lambda grad, n: [], lambda state, grads, its: [*state, [rows(g) for g in some(_tree.leaves_of(grads))]], finish
    )


def cosine_to_mean() -> Fold:
    """The cosine of the angle between each gradient and their mean; 0 for a gradient that is zero.

    The mean is known after one pass, so that this takes two.

    Returns:
        A fold; its result has shape (n,). Memory: one gradient, n numbers.
    """
    parts = (mean(), norms())

    def then(found: tuple[PyTree, Tensor]) -> Fold:
        centre, lengths = found
        whole = length(_tree.leaves_of(centre), 0)
        along = inner(_tree.tree_map(lambda c: c / torch.where(whole > 0, whole, 1), centre))

        def finish(state: Any) -> Tensor:
            return torch.where(lengths > 0, along.finish(state) / torch.where(lengths > 0, lengths, 1), 0.0)

        return Fold(along.init, along.update, finish)

    return Fold(
        lambda grad, n: tuple(f.init(grad, n) for f in parts),
        lambda states, grads, its: tuple(f.update(s, grads, its) for f, s in zip(parts, states, strict=True)),
        lambda states: tuple(f.finish(s) for f, s in zip(parts, states, strict=True)),
        then,
    )


def histogram(edges: Sequence[float]) -> Fold:
    """How many gradients have a norm in each bin.

    Args:
        edges: rising; a bin holds its lower edge, the last one its upper edge too. Norms outside count nowhere.

    Returns:
        A fold; its result has shape (len(edges) - 1,), int64. Memory: n numbers.

    Raises:
        LoopValueError: edges that do not rise, or fewer than two.
    """
    if len(edges) < 2 or not all(a < b for a, b in pairwise(edges)):
        raise LoopValueError(f"edges={list(edges)}: expected at least two numbers, each larger than the one before")
    found = norms()

    def finish(state: Any) -> Tensor:
        values = found.finish(state)
        bounds = torch.tensor(edges, dtype=values.dtype, device=values.device)
        counts = torch.bucketize(values, bounds, right=True)
        counts = torch.where(values == bounds[-1], len(edges) - 1, counts)
        return torch.bincount(counts, minlength=len(edges) + 1)[1 : len(edges)]

    return Fold(found.init, found.update, finish)


def top_k(k: int) -> Fold:
    """The iterations with the k largest norms.

    Args:
        k: how many; all, where there are fewer.

    Returns:
        A fold; its result is `Top`. Memory: n numbers.
    """
    found = norms()

    def finish(state: Any) -> Top:
        values = found.finish(state)
        return Top(*values.topk(min(k, len(values))))

    return Fold(found.init, found.update, finish)


def extrema() -> Fold:
    """The least and the greatest value of each entry.

    Returns:
        A fold; its result is a pair (min, max), each in the structure of the gradient. Memory: two gradients.
    """

    def update(state: Any, grads: PyTree, its: range) -> Any:
        least, most = _tree.tree_map(lambda g: g.amin(0), grads), _tree.tree_map(lambda g: g.amax(0), grads)
        if state is None:
            return least, most
        return _tree.tree_map(torch.minimum, state[0], least), _tree.tree_map(torch.maximum, state[1], most)

    return Fold(lambda grad, n: None, update, lambda state: state)
