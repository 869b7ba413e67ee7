"""Bodies that take a gradient of their own by `x.requires_grad_()` and `torch.autograd.grad`: forces, scores.

A derivative beyond the first one runs the body under torch.func, where torch refuses `requires_grad_` for fear that it
is not meant, though it does there what it does elsewhere. Private names of torch; tests/test_private_torch.py says so
if they move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch.overrides import TorchFunctionMode

REMEDY = (
    "a second derivative, forward mode and chunk_size > 1 run the body under torch.func. Take the gradient inside the "
    "body by torch.func.grad, of a function of what you differentiate for, or leave plg.run(check=...) on"
)


def asks_for_grad(error: Exception) -> bool:
    """Whether torch has refused to make a leaf, or to differentiate for what is none under torch.func."""
    return any(words in str(error) for words in ("requires_grad_()", "does not require grad"))


def makes_leaf(func: Callable[..., Any]) -> bool:
    """Whether a torch function is the one that is refused."""
    return func is torch.Tensor.requires_grad_


def make_leaf(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls it. A block of its own, as the next gradient that torch.autograd.grad takes ends the permission."""
    with enable_inplace_requires_grad(True):
        return func(*args, **kwargs)


class OwnLeaves(TorchFunctionMode):
    """A block under torch.func in which `requires_grad_` may be called."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return make_leaf(func, args, kwargs or {}) if makes_leaf(func) else func(*args, **(kwargs or {}))
