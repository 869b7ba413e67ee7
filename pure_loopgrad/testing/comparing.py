"""Comparing pytrees of tensors: what a tolerance means, and which leaf differs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._tree import PyTree
from pure_loopgrad.testing.plain import leaves
from pure_loopgrad.testing.transforms import as_real, is_continuous

ROUNDING = 256  # units in the last place of the largest leaf, by which small ones may differ: cancelled sums


def tolerance_of(tree: PyTree) -> float:
    """1e-9 in float64; in less, the square root of the lowest precision's unit, a quarter of it."""
    eps = [torch.finfo(t.dtype).eps for t in _tree.leaves_of(tree) if is_continuous(t)]
    return max([1e-9, *(math.sqrt(e) / 4 for e in eps if e > 1e-15)])


def differences(ours: PyTree, plain: PyTree, rtol: float, root: str, atol: float = 0.0) -> list[str]:
    """Each leaf that differs, by its path; structures, shapes and dtypes must be the same."""
    found, spec = _tree.flatten(ours)
    expected, expected_spec = _tree.flatten(plain)
    if spec != expected_spec:
        return [f"{root} has the structure {spec}, the plain loop's {expected_spec}"]
    paths = [a.codify(root) for a in spec.accessors()]
    scale = max([_largest(y) for y in expected if is_continuous(y)], default=0.0)
    few = [ROUNDING * torch.finfo(y.dtype).eps * scale + atol if is_continuous(y) else 0.0 for y in expected]
    rows = zip(paths, found, expected, few, strict=True)
    return [f"{path}: {what}" for path, x, y, e in rows if (what := _difference(x, y, rtol, e))]


def _difference(x: Any, y: Any, rtol: float, atol: float) -> str:
    """How one leaf differs from the plain loop's; nothing if it does not."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return "" if type(x) is type(y) and bool(x == y) else f"{x!r} instead of {y!r}"
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{_tree.describe(x)} instead of {_tree.describe(y)}"
    if not is_continuous(y):
        return "" if torch.equal(x, y) else "other values"
    if not y.numel() or torch.equal(x, y):
        return ""
    return _numeric_difference(as_real(x.detach()), as_real(y.detach()), rtol, atol)


def _numeric_difference(x: Tensor, y: Tensor, rtol: float, atol: float) -> str:
    """What is not finite has no distance: it must be the same, and finite entries are compared without it."""
    odd = ~(torch.isfinite(x) & torch.isfinite(y))
    same = (x == y) | (x.isnan() & y.isnan())
    if not same[odd].all():
        return f"has {_odd(x)} where the plain loop has {_odd(y)}, or in other places"
    error, largest = _largest((x - y)[~odd]), _largest(y)
    if error <= rtol * largest + atol:
        return ""
    return f"differs by {error:.2e}, where the plain loop has up to {largest:.2e} (allowed: {rtol:.0e} of it)"


def _odd(t: Tensor) -> str:
    return f"{int(t.isnan().sum())} NaN and {int(t.isinf().sum())} infinities"


def _largest(t: Tensor) -> float:
    """Of the finite entries: one infinity must not allow any difference elsewhere."""
    real = as_real(t.detach())
    finite = real[torch.isfinite(real)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def assert_close(ours: PyTree, plain: PyTree, rtol: float = 1e-10, what: str = "ours", atol: float = 1e-10) -> None:
    """Fails if the tensors of two pytrees differ, whatever containers they are in; the reference must be finite.

    Args:
        ours: a pytree of tensors.
        plain: the reference.
        rtol: relative to the largest entry of a leaf of the reference; shapes and dtypes must be the same.
        what: for the message.
        atol: what a difference may be where everything cancels.

    Raises:
        AssertionError: which leaf differs, and by how much.

    Memory: one leaf. Time: that of a few reads.

    Example:
        >>> assert_close([torch.ones(2)], (torch.ones(2),))
    """
    reference = leaves(plain)
    if not all(bool(torch.isfinite(t).all()) for t in reference if is_continuous(t)):
        raise AssertionError(f"{what}: the reference is not finite")
    if found := differences(leaves(ours), reference, rtol, what, atol):
        raise AssertionError("; ".join(found))
