"""What torch.func has going on: the level of a wrapped tensor, and how many transforms are active.

Private names of torch, kept in this one place: there is no public way to ask. tests/test_private_torch.py says so if
they move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import (
    GradInterpreter,
    JvpInterpreter,
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch.autograd import forward_ad

unpack_dual: Any = forward_ad.unpack_dual  # torch leaves both untyped
make_dual: Any = forward_ad.make_dual


def is_wrapped(t: Tensor) -> bool:
    """Whether the tensor belongs to a torch.func transform."""
    return torch.func.debug_unwrap(t) is not t


def layers(t: Tensor) -> Iterator[Tensor]:
    """A tensor, what its transform has wrapped, and so on down to the plain one."""
    while True:
        yield t
        inner = torch.func.debug_unwrap(t, recurse=False)
        if inner is t:
            return
        t = inner


def is_batched(t: Tensor) -> bool:
    """Whether the tensor is one of a batch under torch.vmap, at whatever level."""
    return any(map(is_batched_here, layers(t)))


def is_batched_here(t: Tensor) -> bool:
    """Whether the tensor is one of a batch under the transform that wrapped it last."""
    return bool(torch._C._functorch.is_batchedtensor(t))


def batched_like(t: Tensor, inner: Tensor) -> Tensor:
    """Another tensor as one of the batch that `t` is one of."""
    return torch._C._functorch._add_batch_dim(inner, torch._C._functorch.maybe_get_bdim(t), level_of(t))


def level_of(t: Tensor) -> int:
    """The level of the transform that wrapped the tensor; negative for a plain tensor."""
    return int(torch._C._functorch.maybe_get_level(t))


def active_levels() -> int:
    """How many torch.func transforms are active here."""
    top = torch._C._functorch.peek_interpreter_stack()
    return 0 if top is None else int(top.level())


@contextmanager
def below_all_levels() -> Iterator[None]:
    """A block that no torch.func transform sees, for bookkeeping on tensors made in it."""
    with temporarily_clear_interpreter_stack():
        yield


def draws_for_nobody(tensors: Sequence[Tensor]) -> str | None:
    """The randomness of a vmap that asks for other numbers in each entry, but of whose batch nothing arrives here.

    Torch leaves such a level out, so that one draw would serve the whole batch. Right below a jvp (jacfwd) it is the
    tangents that are batched, and one draw is right.
    """
    if active_levels() == 0:
        return None
    stack = retrieve_all_functorch_interpreters()
    for interpreter, inner in zip(stack, [*stack[1:], None], strict=True):
        if not isinstance(interpreter, VmapInterpreter) or isinstance(inner, JvpInterpreter):
            continue
        asked = str(interpreter.randomness())
        if asked != "same" and not any(_is_batched_at(t, interpreter.level()) for t in tensors):
            return asked
    return None


def _is_batched_at(t: Tensor, level: int) -> bool:
    return any(is_batched_here(layer) and level_of(layer) == level for layer in layers(t))


def innermost_in_forward_mode() -> Literal["grad", "jvp"] | None:
    """The innermost transform, if it is one of these and a jvp is under way that one pass can serve.

    Not where a vmap stands around the jvp: its batch often shares the primals and not the tangents (jacfwd), and one
    pass for both would make a copy of the primal outputs for each of the batch.
    """
    if active_levels() == 0:
        return None
    stack = retrieve_all_functorch_interpreters()
    jvps = [i for i, level in enumerate(stack) if isinstance(level, JvpInterpreter)]
    if not jvps or any(isinstance(level, VmapInterpreter) for level in stack[: jvps[-1]]):
        return None
    if isinstance(stack[-1], JvpInterpreter):
        return "jvp"
    return "grad" if isinstance(stack[-1], GradInterpreter) else None


def in_forward_mode() -> bool:
    """Whether a jvp is under way, or a dual level of ordinary autograd is open, so that a tensor may have a tangent."""
    return forward_ad._current_level >= 0


def may_have_tangent(t: Tensor) -> bool:
    """Whether a jvp is under way that may ask for the tensor's tangent, or it has one of ordinary forward mode."""
    if active_levels() > 0:
        return any(isinstance(level, JvpInterpreter) for level in retrieve_all_functorch_interpreters())
    return unpack_dual(t).tangent is not None


def is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether an operation on these tensors is recorded for a backward, at whatever level."""
    return torch.is_grad_enabled() and any(map(needs_gradient, tensors))


def is_transformed(tensors: Sequence[Tensor]) -> bool:
    """Whether somebody here asks for more than values: a torch.func transform, forward mode, or autograd of these."""
    return active_levels() > 0 or in_forward_mode() or is_recorded(tensors)


def needs_gradient(t: Tensor) -> bool:
    """Whether a backward leads to the tensor, at whatever level."""
    return t.requires_grad or any(layer.requires_grad for layer in layers(t))


def is_constant(t: Tensor) -> bool:
    """Whether no transform that is active here asks for anything about the tensor: it is not batched, and has neither a
    gradient nor a tangent. What is made inside a transform belongs to it, be it a range or a mask.
    """
    return not is_batched(t) and not has_derivative(t)


def has_derivative(t: Tensor) -> bool:
    """Whether a transform that is active here, or autograd, asks for the tensor's gradient, or one for its tangent."""
    if not is_wrapped(t):
        return t.requires_grad
    if active_levels() == 0:
        return True  # of a transform that is over, so that nobody can say
    top = retrieve_current_functorch_interpreter()
    if level_of(t) == top.level():
        if not is_batched_here(t) and (t.requires_grad or unpack_dual(t).tangent is not None):
            return True
        t = torch.func.debug_unwrap(t, recurse=False)
    with top.lower():
        return has_derivative(t)


def innermost_is_vmap() -> bool:
    """Whether the innermost transform is a vmap."""
    return active_levels() > 0 and isinstance(retrieve_current_functorch_interpreter(), VmapInterpreter)


def without_graph(t: Tensor) -> Tensor:
    """A live parameter as a constant. A tensor of an outer torch.func transform stays what it is: that one asks. A
    tangent stays as well.
    """
    if not t.requires_grad or is_wrapped(t):
        return t
    tangent = unpack_dual(t).tangent
    return t.detach() if tangent is None else make_dual(t.detach(), tangent.detach())
