"""Forward mode in one pass: a loop's outputs and their tangents come from the same run of its chunks.

An autograd.Function is run forward first, and its jvp after that must run the forward once more. So where the innermost
transform is a jvp, the loop is not given to one: its tensors are parted into primals and tangents here, and a loop of
both is run. Where a gradient stands inside a jvp (forward over reverse), that gradient is left to a function of a
single level, whose forward is called with the jvp innermost. Torch makes its own support for autograd.Function out of
such functions; it has no public way to make one. tests/test_private_torch.py says so if that moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import _unwrap_for_grad, _wrap_for_grad
from torch._functorch.pyfunctorch import GradInterpreter, retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch.autograd import forward_ad

from pure_loopgrad._levels import make_dual, unpack_dual
from pure_loopgrad._linearise import Mask
from pure_loopgrad._tree import is_differentiable
from pure_loopgrad._user import Tensors

SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction


def part(tensors: Tensors) -> tuple[list[Tensor], Mask, list[Tensor]]:
    """The primals, which of them have a tangent in the innermost jvp, and those tangents."""
    duals = [unpack_dual(t) for t in unwrap_dead_wrappers(tuple(tensors))]
    tangents = [d.tangent for d in duals]
    return [d.primal for d in duals], tuple(t is not None for t in tangents), [t for t in tangents if t is not None]


def join(primals: Tensors, tangents: Tensors) -> tuple[Tensor, ...]:
    """Gives each differentiable tensor its tangent, in the innermost jvp."""
    pairs = zip(primals, tangents, strict=True)
    return tuple(make_dual(p, t) if is_differentiable(p) else p for p, t in pairs)


def apply_at_one_level(function: Any, static: object, tensors: Tensors) -> tuple[Tensor, ...]:
    """Applies a SingleLevelFunction to tensors of the innermost transform, which is a gradient."""
    interpreter = cast(GradInterpreter, retrieve_current_functorch_interpreter())
    lifted, _ = interpreter.lift(unwrap_dead_wrappers(tuple(tensors)), {})
    with enable_single_level_autograd_function():
        return cast("tuple[Tensor, ...]", function.apply(static, *lifted))


def below_one_level(fn: Callable[[Tensors], tuple[Tensor, ...]], tensors: Tensors) -> tuple[Tensor, ...]:
    """`fn` below the innermost transform, which is a gradient or a jvp; its outputs belong to that again."""
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    inner = [_unwrap_for_grad(t, level) for t in tensors]
    # a SingleLevelFunction runs with both modes of differentiation off, which the transforms below may need
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), interpreter.lower():
        outputs = fn(inner)
    return tuple(_wrap_for_grad(t, level) for t in outputs)
