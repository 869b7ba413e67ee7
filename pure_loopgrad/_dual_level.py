"""A jvp inside torch.autograd.forward_ad, which has one level only, so that torch.func.jvp cannot open another one.

Nobody but gradcheck and torch.func.linearize uses it around a loop as a rule. The level is shared: what is given to a
derived loop has no tangent there, so new dual tensors at that level are those of this jvp alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from pure_loopgrad import _tree
from pure_loopgrad._levels import active_levels, below_all_levels, in_forward_mode, make_dual, unpack_dual


def in_dual_level() -> bool:
    """Whether a level is open, and not by torch.func, whose jvps all work on that one level, told apart by wrappers.

    Private names of torch, which has no public ones for it; tests/test_private_torch.py says so if they move.
    """
    return in_forward_mode() and eager_transforms.JVP_NESTING == 0


def may_be_differentiated() -> bool:
    """Whether somebody here may ask for a derivative: ordinary autograd, a transform, or a dual level."""
    return torch.is_grad_enabled() or active_levels() > 0 or in_dual_level()


def has_tangent(t: Tensor) -> bool:
    """Whether a plain tensor has a tangent in the level that is open, also below a loop, where forward mode is off, and
    inside transforms.
    """
    with below_all_levels(), forward_ad._set_fwd_grad_enabled(True):
        return unpack_dual(t).tangent is not None


def within_dual_level(
    fn: Callable[..., tuple[Any, Any]], primals: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[Any, tuple[Tensor, ...], Any]:
    """`torch.func.jvp` of a function of flat tensors, with aux, in the level that is open."""
    with forward_ad._set_fwd_grad_enabled(True):
        outputs, aux = fn(*(make_dual(p.detach(), t) for p, t in zip(primals, tangents, strict=True)))
        pairs = [unpack_dual(y) for y in outputs]
        found = [torch.zeros_like(p.primal) if p.tangent is None else p.tangent for p in pairs]
        plain = _tree.tree_map(lambda y: unpack_dual(y).primal, aux)
    return [p.primal for p in pairs], tuple(found), plain
