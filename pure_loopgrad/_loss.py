"""The loss on a loop's reduced outputs: its value, once, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._accumulate import same_memory
from pure_loopgrad._capture import Watch, refuse_captured
from pure_loopgrad._compile import compiled
from pure_loopgrad._constants import Constants
from pure_loopgrad._levels import active_levels, in_forward_mode, is_recorded
from pure_loopgrad._linearise import Mask, linearise, put
from pure_loopgrad._reduce import Prepared
from pure_loopgrad._shapes import is_fake
from pure_loopgrad.errors import LoopTypeError

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Gradients: TypeAlias = "list[Tensor | None]"


@dataclass(frozen=True)
class PulledBack:
    """A loss's value, its gradient with respect to params as it uses them itself, and to each output of the loop."""

    value: Tensor
    direct: Gradients  # one for each input of the loop
    cotangents: Gradients  # one for each raw output


def pull_back_loss(loss: Loss | None, prepared: Prepared, wrt: Mask, raw: Sequence[Tensor]) -> PulledBack:
    """Evaluates the loss exactly once, on tensors without a graph. Without a loss, the output is the value."""
    reduced = prepared.finish(raw)
    leaves, skeleton = _tree.split(reduced)
    nothing: Gradients = [None] * len(prepared.inputs)
    if loss is None:
        value = scalar(leaves[0] if len(leaves) == 1 else reduced, "without a loss, the reduced output of the body")
        return PulledBack(value, nothing, prepared.raw_cotangents(raw, [torch.ones_like(value)]))

    n_consts = prepared.loop.n_consts
    floats = tuple(_tree.is_differentiable(t) for t in leaves)
    mask = (*wrt[:n_consts], *floats)
    kept = prepared.loop.residuals is not None  # graphs that may need the outputs as they are

    def value_of(*primals: Tensor) -> tuple[Tensor]:
        both = put([*prepared.consts, *leaves], mask, primals)
        outputs = both[n_consts:] if kept or active_levels() > 0 else list(map(_changeable, both[n_consts:]))
        args = prepared.params.fill(both[:n_consts]), skeleton.fill(outputs)
        return (_watched(loss, args, both, prepared),)

    value, grads = _value_and_grads(value_of, list(compress([*prepared.consts, *leaves], mask)))
    every: Gradients = put([None] * len(mask), mask, grads)
    direct = [*every[:n_consts], *nothing[n_consts:]]
    return PulledBack(value, direct, prepared.raw_cotangents(raw, every[n_consts:]))


class _Changeable(torch.autograd.Function):
    """The identity, to something that a loss may change in place, which autograd allows nobody to do to a leaf."""

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return same_memory(t) if t.layout is torch.strided and not is_fake(t) else t.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


_changeable = cast("Callable[[Tensor], Tensor]", _Changeable.apply)


def _value_and_grads(fn: Callable[..., tuple[Tensor]], primals: list[Tensor]) -> tuple[Tensor, Sequence[Tensor | None]]:
    if not primals:
        return fn()[0], ()
    # but inside a transform or another loop, nobody differentiates this again, so the loss's backward is not recorded;
    # forward mode goes on where grad mode is off
    again = in_forward_mode() or (torch.is_grad_enabled() and (active_levels() > 0 or is_recorded(primals)))
    with torch.set_grad_enabled(again):
        (value,), pullback, _ = linearise(lambda *p: (fn(*p), ()), primals)
        return value if again else value.detach(), pullback([torch.ones_like(value)], True)


def _watched(loss: Loss, args: tuple[Any, Any], given: Sequence[Tensor], prepared: Prepared) -> Tensor:
    """The loss's value; a loss that reads a parameter of its own is refused like a body that does."""
    trace = prepared.loop.trace
    call: Loss = loss
    if trace.compile is not False and active_levels() == 0:
        call = partial(compiled, loss, "loss", trace.compile, loss)
    if trace.check == "off":
        return scalar(call(*args), "the loss")
    constants = Constants()
    constants.find(loss)
    with Watch(loss, [*given, *constants.wrapped], what="loss") as watch:
        value = scalar(call(*args), "the loss")
        refuse_captured(watch, given, [value])
    return value


def scalar(value: Any, what: str) -> Tensor:
    """What a gradient is taken of.

    Raises:
        LoopTypeError: it is no real scalar tensor.
    """
    if not isinstance(value, Tensor):
        raise LoopTypeError(f"{what} is a {type(value).__name__}; a gradient needs one real scalar tensor")
    if value.dim() != 0 or not value.is_floating_point():
        raise LoopTypeError(f"{what} has {_tree.describe(value)}; a gradient needs one real scalar: shape ()")
    return value
