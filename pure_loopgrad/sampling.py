"""Random subsets of a loop's iterations, for gradients that are unbiased and cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pure_loopgrad.errors import LoopTypeError, LoopValueError

Scheme = Literal["uniform", "stratified", "importance"]


def subsample(
    n: int,
    k: int,
    *,
    generator: torch.Generator | None = None,
    scheme: Scheme = "uniform",
    scores: Tensor | Sequence[float] | None = None,
) -> Tensor:
    """Draws the weights of k out of n iterations for `grad_weights=`; each has expectation 1.

    So the gradient is unbiased, for the outputs of all n iterations that the loss sees: the mean over all draws is the
    full gradient. To freeze the same n - k iterations in every step, as people do, is not.

    It pays where the forward is cheap beside the backward, or the loss needs all outputs anyway: a step costs
    n F + k (F + B) instead of n (2F + B). The price is variance: with terms g_i and S^2 = sum |g_i - mean|^2 / (n - 1),
    the uniform estimate of sum g_i has n^2 (1 - k / n) S^2 / k.

    Args:
        n: how many iterations there are.
        k: how many get a weight that is not zero; with `"importance"`, at most that many.
        generator: where the numbers come from; torch's default generator if None.
        scheme: `"uniform"`, k different iterations, n / k each. `"stratified"`, one of each of k stretches of n / k
            iterations, weighted by its length; better where neighbours are alike. `"importance"`, k draws with
            replacement in proportion to `scores`; better where scores are near to the norms of the gradients.
        scores: n positive numbers, for `"importance"`.

    Returns:
        A float64 tensor of shape (n,), on the CPU.

    Raises:
        LoopValueError: k is not in 1..n, or scores that are not n positive numbers.

    Memory and time: O(n).

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> weights = plg.subsample(6, 2, generator=torch.Generator().manual_seed(0))
        >>> weights.sum(), (weights > 0).sum()
        (tensor(6., dtype=torch.float64), tensor(2))

    Source: Horvitz and Thompson, JASA 47 (1952), for the weights; Cochran, Sampling Techniques (1977), chapter 2, for
    the variance.
    """
    if isinstance(n, bool) or isinstance(k, bool) or not isinstance(n, int) or not isinstance(k, int):
        raise LoopTypeError(f"n={n!r}, k={k!r}: expected two ints")
    if not 1 <= k <= n:
        raise LoopValueError(f"k={k} of n={n} iterations: expected 1 <= k <= n")
    if (scores is not None) != (scheme == "importance"):
        raise LoopValueError("scores= goes with scheme='importance', and the other way round")
    if scheme == "uniform":
        return _uniform(n, k, generator)
    if scheme == "stratified":
        return _stratified(n, k, generator)
    if scheme == "importance":
        return _importance(n, k, generator, scores)
    raise LoopValueError(f"scheme={scheme!r}: expected 'uniform', 'stratified' or 'importance'")


def _uniform(n: int, k: int, generator: torch.Generator | None) -> Tensor:
    weights = torch.zeros(n, dtype=torch.float64)
    weights[torch.randperm(n, generator=generator)[:k]] = n / k
    return weights


def _stratified(n: int, k: int, generator: torch.Generator | None) -> Tensor:
    edges = torch.arange(k + 1) * n // k
    sizes = edges[1:] - edges[:-1]
    chosen = edges[:-1] + (torch.rand(k, generator=generator, dtype=torch.float64) * sizes).long()
    weights = torch.zeros(n, dtype=torch.float64)
    weights[chosen] = sizes.double()
    return weights


def _importance(n: int, k: int, generator: torch.Generator | None, scores: Tensor | Sequence[float] | None) -> Tensor:
    p = torch.as_tensor(scores, dtype=torch.float64, device="cpu")
    if p.shape != (n,) or not (torch.isfinite(p) & (p > 0)).all():
        raise LoopValueError(f"scores has shape {tuple(p.shape)}; expected {n} positive numbers, one an iteration")
    p = p / p.sum()
    drawn = torch.multinomial(p, k, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=n) / (k * p)
