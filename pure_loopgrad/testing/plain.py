"""The oracle: plain Python loops under ordinary autograd. No loop of the library is used here."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._tree import PyTree, tree_map


def leaves(tree: PyTree) -> list[Tensor]:
    """The tensors of a pytree."""
    return [leaf for leaf in _tree.leaves_of(tree) if isinstance(leaf, Tensor)]


def take(xs: PyTree, i: int) -> PyTree:
    """One iteration's x."""
    return tree_map(lambda t: t[i] if isinstance(t, Tensor) else t, xs)


def n_of(xs: PyTree) -> int:
    """The number of iterations."""
    return leaves(xs)[0].shape[0]


def each(body: Callable[[Any, Any], Any], params: PyTree, xs: PyTree) -> list[Any]:
    """The outputs of all iterations."""
    return [body(params, take(xs, i)) for i in range(n_of(xs))]


def shaped_like(body: Callable[[Any, Any], Any], params: PyTree, xs: PyTree) -> PyTree:
    """One output of a body for its shapes only, from zeros, where there is no iteration."""
    zero = tree_map(lambda t: t.new_zeros(t.shape[1:]) if isinstance(t, Tensor) else t, xs)
    return tree_map(torch.as_tensor, body(params, zero))


def plain_map(body: Callable[[Any, Any], Any], params: PyTree, xs: PyTree) -> PyTree:
    """What `plg.map` is to equal: the outputs of a Python loop, stacked.

    Args:
        body: `body(params, x) -> y`.
        params: any pytree.
        xs: a pytree whose tensors have a leading axis of length n.

    Returns:
        The structure of y, each leaf with a leading axis of length n.

    Memory: that of the full graph, if anything requires grad. Time: n F.

    Example:
        >>> plain_map(lambda p, x: p * x, 2.0, torch.arange(3.0))
        tensor([0., 2., 4.])
    """
    ys = each(body, params, xs)
    if not ys:
        return tree_map(lambda y: y.new_zeros((0, *y.shape)), shaped_like(body, params, xs))
    return tree_map(lambda *y: torch.stack([torch.as_tensor(t) for t in y]), *ys)


def plain_sum(
    body: Callable[[Any, Any], Any], params: PyTree, xs: PyTree, weights: Sequence[float] | Tensor | None = None
) -> PyTree:
    """What `plg.sum` is to equal: the outputs of a Python loop, added up one after the other.

    Args:
        body: see `plain_map`.
        params: see `plain_map`.
        xs: see `plain_map`.
        weights: n factors.

    Returns:
        The structure of y.

    Memory: that of the full graph, if anything requires grad. Time: n F.

    Example:
        >>> plain_sum(lambda p, x: p * x, 2.0, torch.arange(3.0))
        tensor(6.)
    """
    ys = each(body, params, xs)
    if not ys:
        return tree_map(torch.zeros_like, shaped_like(body, params, xs))
    factors = [1] * len(ys) if weights is None else list(weights)
    total = tree_map(lambda y: factors[0] * y, ys[0])
    for w, y in zip(factors[1:], ys[1:], strict=True):
        total = tree_map(lambda t, v, w=w: t + w * v, total, y)
    return tree_map(torch.as_tensor, total)


def plain_mean(
    body: Callable[[Any, Any], Any], params: PyTree, xs: PyTree, weights: Sequence[float] | Tensor | None = None
) -> PyTree:
    """What `plg.mean` is to equal: `plain_sum` divided by n, or by the sum of the weights.

    Args:
        body: see `plain_map`.
        params: see `plain_map`.
        xs: see `plain_map`, of at least one iteration.
        weights: n factors.

    Returns:
        The structure of y.

    Memory: that of the full graph, if anything requires grad. Time: n F.

    Example:
        >>> plain_mean(lambda p, x: p * x, 2.0, torch.arange(3.0))
        tensor(2.)
    """
    n = n_of(xs) if weights is None else builtins.sum(weights)
    return tree_map(lambda t: t / n, plain_sum(body, params, xs, weights))


def plain_scan(
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: PyTree,
    init: PyTree,
    xs: PyTree = None,
    *,
    length: int | None = None,
    reverse: bool = False,
) -> tuple[PyTree, PyTree]:
    """What `plg.scan` is to equal: a Python loop with a carry.

    Args:
        body: `body(params, carry, x) -> (carry, y)`; y may be None.
        params: any pytree.
        init: the first carry.
        xs: a pytree whose tensors have a leading axis of length n, at least 1; None together with `length`.
        length: the number of steps, where xs has no tensors.
        reverse: run from the last x to the first.

    Returns:
        The last carry, and the ys stacked.

    Memory: that of the full graph, if anything requires grad. Time: n F.

    Example:
        >>> plain_scan(lambda p, c, x: (c + p * x, c), 2.0, torch.tensor(0.0), torch.arange(3.0))
        (tensor(6.), tensor([0., 0., 2.]))
    """
    n = n_of(xs) if leaves(xs) else length or 0
    carry, ys = tree_map(torch.as_tensor, init), [None] * n
    for i in reversed(range(n)) if reverse else range(n):
        carry, ys[i] = body(params, carry, take(xs, i))
    return carry, tree_map(lambda *y: torch.stack([torch.as_tensor(t) for t in y]), *ys)
