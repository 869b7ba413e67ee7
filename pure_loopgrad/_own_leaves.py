"""Bodies that take a gradient of their own by `x.requires_grad_()` and `torch.autograd.grad`: forces, scores.

A derivative beyond the first one runs the body under torch.func, where torch refuses `requires_grad_` for fear that it
is not meant, though it does there what it does elsewhere. Private names of torch; tests/test_private_torch.py says so
if they move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.overrides import TorchFunctionMode

from pure_loopgrad import _tree
from pure_loopgrad._levels import has_derivative, innermost_is_vmap, is_batched_here
from pure_loopgrad.errors import LoopValueError

INSTEAD = (
    "a second derivative, forward mode and chunk_size > 1 run the body under torch.func. Take the gradient inside the "
    "body by torch.func.grad, of a function of what you differentiate for"
)
REMEDY = f"{INSTEAD}, or leave plg.run(check=...) on"  # where nobody has seen that the body makes leaves


def asks_for_grad(error: Exception) -> bool:
    """Whether torch has refused to make a leaf, or to differentiate for what is none under torch.func."""
    return any(words in str(error) for words in ("requires_grad_()", "does not require grad"))


def makes_leaf(func: Callable[..., Any]) -> bool:
    """Whether a torch function is the one that is refused."""
    return func is torch.Tensor.requires_grad_


class OwnLeaves(TorchFunctionMode):
    """A block under torch.func in which `requires_grad_` may be called, where it does what it does elsewhere.

    Not in a vmap of what was `given`, whose tensors autograd does not follow. And not on what was detached because it
    does not require grad, as torch.autograd.functional does: here that is so of what has a tangent, too.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.cut: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and kwargs.get("is_grads_batched"):
            raise LoopValueError(f"the body asks for a batch of gradients (is_grads_batched, vectorize), but {INSTEAD}")
        if makes_leaf(func):
            return self._make_leaf(func, args, kwargs)
        out = func(*args, **kwargs)
        if func is torch.Tensor.detach and not args[0].requires_grad and has_derivative(args[0]):
            self.cut.append(weakref.ref(out))
        return out

    def _make_leaf(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if any(ref() is args[0] for ref in self.cut):
            raise LoopValueError(
                f"the body makes a leaf of a detached tensor ({_tree.describe(args[0])}) with a derivative, "
                f"as torch.autograd.functional does where nothing requires grad, but {INSTEAD}"
            )
        batched = innermost_is_vmap() and any(map(is_batched_here, self.given))
        with enable_inplace_requires_grad(not batched):  # here, as each gradient that is taken inside ends it
            return func(*args, **kwargs)
