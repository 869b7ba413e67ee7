"""Folds for mean and variance, stable where the variance is small beside the mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._folding import Fold, added, in_place, length
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import LoopValueError

BLOCK = 2**13  # entries that are looked at together, so that what is made on the way is small


class Moments(NamedTuple):
    """The mean and the variance of each entry of the gradient, in its structure."""

    mean: PyTree
    variance: PyTree


class NoiseScale(NamedTuple):
    """How many iterations a batch needs until its gradient is more signal than noise: `simple` = trace / squared_norm.

    `trace` is that of the covariance of single gradients, `squared_norm` that of the true gradient, both unbiased.
    """

    simple: Tensor
    trace: Tensor
    squared_norm: Tensor


def moments(ddof: int = 1) -> Fold:
    """The mean and the variance of each entry, stable in float32.

    Args:
        ddof: the variance divides by n - ddof.

    Returns:
        A fold; its result is `Moments`. Memory: three gradients.

    Source: Chan, Golub and LeVeque, The American Statistician 37 (1983), for the update.
    """

    def finish(state: _Spread) -> Moments:
        _at_least(state.count, ddof + 1, "a variance")
        return Moments(state.tree(state.true_means()), state.tree([t / (state.count - ddof) for t in state.squares]))

    return _spread(finish, lambda squares: squares)


def variance(ddof: int = 1) -> Fold:
    """The variance of each entry; see `moments`.

    Args:
        ddof: the variance divides by n - ddof.

    Returns:
        A fold; its result has the structure of the gradient. Memory: three gradients.
    """
    both = moments(ddof)
    return Fold(both.init, both.update, lambda state: both.finish(state).variance)


def noise_scale() -> Fold:
    """The gradient noise scale of single iterations.

    Returns:
        A fold; its result is `NoiseScale`. Memory: two gradients.

    Source: McCandlish et al., arXiv 1812.06162, appendix A.
    """

    def finish(state: _Spread) -> NoiseScale:
        _at_least(state.count, 2, "a noise scale")
        trace = torch.stack([t.double() for t in state.squares]).sum() / (state.count - 1)
        return noise_scale_of(state.true_means(), trace, state.count)

    return _spread(finish, lambda squares: squares.sum().double())


def noise_scale_of(centre: list[Tensor], trace: Tensor, n: int) -> NoiseScale:
    """From the mean of n gradients and the trace of their covariance; a mean's square holds a share of the noise."""
    squared = length(centre, 0).double().square() - trace / n
    return NoiseScale(trace / squared, trace, squared)


@dataclass
class _Spread:
    """The mean of what came so far and the sum of squared distances from it, leaf by leaf, flat.

    Both are of gradients less the first one, so that a large mean does not swallow a small variance.
    """

    count: int
    first: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    shapes: list[torch.Size]
    spec: _tree.TreeSpec

    def tree(self, leaves: list[Tensor]) -> PyTree:
        """Flat leaves in the structure of the gradient."""
        return self.spec.unflatten([t.reshape(s) for t, s in zip(leaves, self.shapes, strict=True)])

    def true_means(self) -> list[Tensor]:
        """The means of the gradients themselves."""
        return [added(mean, first) for mean, first in zip(self.means, self.first, strict=True)]


def _spread(finish: Callable[[_Spread], Any], keep: Callable[[Tensor], Tensor]) -> Fold:
    """A fold with a `_Spread` as state; `keep` says what is kept of the squares of a leaf's entries."""

    def init(grad: PyTree, n: int) -> _Spread:
        leaves, spec = _tree.flatten(grad)
        first = [g.reshape(-1).to(accumulation_dtype(g.dtype), copy=True) for g in leaves]
        zeros = [torch.zeros_like(f) for f in first]
        squares = [torch.zeros_like(keep(f.real)) for f in first]
        return _Spread(0, first, zeros, squares, [g.shape for g in leaves], spec)

    def update(state: _Spread, grads: PyTree, iterations: range) -> _Spread:
        state.count += len(iterations)
        for i, g in enumerate(_tree.leaves_of(grads)):
            g = g.reshape(g.shape[0], -1)
            leaf = state.first[i], state.means[i], state.squares[i]
            state.means[i], state.squares[i] = _merged(*leaf, g, state.count, keep)
        return state

    return Fold(init, update, finish)


def _merged(
    first: Tensor, mean: Tensor, squares: Tensor, g: Tensor, total: int, keep: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """One leaf, block by block."""
    if not in_place():
        return _merged_block(first, mean, squares, g, total, keep)
    size = BLOCK if g.shape[0] == 1 else max(BLOCK, mean.numel() // 4)
    for at in range(0, mean.numel(), size):
        block = slice(at, at + size)
        _merged_block(first[block], mean[block], squares[block] if squares.dim() else squares, g[:, block], total, keep)
    return mean, squares


def _merged_block(
    first: Tensor, mean: Tensor, squares: Tensor, g: Tensor, total: int, keep: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Adds a chunk of gradients, the last of `total`.

    With d the distances from the mean so far and S the sum of d: the mean moves by S / total, and the sum of squared
    distances from it grows by sum d^2 - S^2 / total. Taken are the distances from the mean as rounded, at `centre`, so
    that one subtraction does; what rounding has left out is put right afterwards.
    """
    size = g.shape[0]
    centre = first + mean
    left_out = (first - centre) + mean
    d = g.to(mean.dtype) - centre
    s = d.sum(0)
    d = d.square_() if in_place() and not d.is_complex() else _square(d)
    moved = s - size * left_out
    grown = d.sum(0) - _product(left_out, s + moved) - _square(moved) / total
    return added(mean, moved, 1 / total), added(squares, keep(grown))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).real if a.is_complex() else a * b


def _square(t: Tensor) -> Tensor:
    return t.abs().square() if t.is_complex() else t.square()


def _at_least(count: int, needed: int, what: str) -> None:
    if count < needed:
        raise LoopValueError(f"{what} needs at least {needed} iterations, not {count}")
