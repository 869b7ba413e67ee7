"""The oracle: plain Python loops under ordinary autograd. Nothing here uses the library."""

from __future__ import annotations

import optree
import torch
from torch import Tensor

NAMESPACE = "pure_loopgrad"  # where the library registers dataclasses; plain containers need none


def tree_map(fn, *trees):
    return optree.tree_map(fn, *trees, namespace=NAMESPACE)


def leaves(tree):
    return [leaf for leaf in optree.tree_leaves(tree, namespace=NAMESPACE) if isinstance(leaf, Tensor)]


def take(xs, i):
    return tree_map(lambda t: t[i] if isinstance(t, Tensor) else t, xs)


def length(xs):
    return leaves(xs)[0].shape[0]


def each(body, params, xs):
    return [body(params, take(xs, i)) for i in range(length(xs))]


def shaped_like(body, params, xs):
    """One output of the body, for its shapes only; from zeros where there is no iteration."""
    zero = tree_map(lambda t: t.new_zeros(t.shape[1:]) if isinstance(t, Tensor) else t, xs)
    return tree_map(torch.as_tensor, body(params, zero))


def plain_map(body, params, xs):
    ys = each(body, params, xs)
    if not ys:
        return tree_map(lambda y: y.new_zeros((0, *y.shape)), shaped_like(body, params, xs))
    return tree_map(lambda *y: torch.stack([torch.as_tensor(t) for t in y]), *ys)


def plain_sum(body, params, xs, weights=None):
    ys = each(body, params, xs)
    if not ys:
        return tree_map(torch.zeros_like, shaped_like(body, params, xs))
    weights = [1] * len(ys) if weights is None else weights
    total = tree_map(lambda y: weights[0] * y, ys[0])
    for w, y in zip(weights[1:], ys[1:], strict=True):
        total = tree_map(lambda t, v, w=w: t + w * v, total, y)
    return tree_map(torch.as_tensor, total)


def plain_mean(body, params, xs, weights=None):
    n = length(xs) if weights is None else sum(weights)
    return tree_map(lambda t: t / n, plain_sum(body, params, xs, weights))


def assert_close(ours, ref, rtol=1e-10, what=""):
    """Relative to the largest entry of the reference; structure, shape and dtype exactly."""
    a, b = leaves(ours), leaves(ref)
    assert len(a) == len(b), f"{what}: {len(a)} tensors against {len(b)}"
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert x.shape == y.shape, f"{what} leaf {i}: {x.shape} against {y.shape}"
        assert x.dtype == y.dtype, f"{what} leaf {i}: {x.dtype} against {y.dtype}"
        if not x.numel():
            continue
        if not (x.is_floating_point() or x.is_complex()):
            assert torch.equal(x, y), f"{what} leaf {i}"
            continue
        assert torch.isfinite(torch.view_as_real(y) if y.is_complex() else y).all(), f"{what}: reference not finite"
        error = (x - y).abs().max().item() / (1 + y.abs().max().item())
        assert error <= rtol, f"{what} leaf {i}: relative error {error:.2e}"
