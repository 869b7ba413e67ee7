"""The primitive: a loop that sums and stacks, closed under differentiation and batching.

    loop(body; consts, xs) -> (S, Y)      (s_i, y_i) = body(consts, x_i)      S = sum_i s_i      Y = stack_i y_i

Its vjp, jvp and vmap are loops again, whose bodies are those of `_derived`, so that a derivative of any order runs in
the memory of one chunk. Only the inputs are kept between a pass and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from pure_loopgrad import _batched_grads, _tree
from pure_loopgrad._accumulate import Outputs, recordable, with_storage
from pure_loopgrad._batched import VmapBody, user_inputs_batched
from pure_loopgrad._body import ChunkBody
from pure_loopgrad._derived import DualBody, JvpBody, VjpBody
from pure_loopgrad._eager import eager
from pure_loopgrad._forward_mode import SingleLevelFunction, apply_at_one_level, below_one_level, join, part
from pure_loopgrad._levels import innermost_in_forward_mode, is_transformed
from pure_loopgrad._linearise import Mask, put, records
from pure_loopgrad._missing import Missing
from pure_loopgrad._stream import Stream, stream
from pure_loopgrad._user import Tensors


@dataclass(frozen=True)
class Loop(Stream):
    """A loop, all but its tensors."""

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Runs the loop under whatever transforms are active. Returns (sums, stacks)."""
        outs = _apply(self, (*consts, *xs))
        n = self.body.n_sums
        return outs[:n], outs[n:]


def _apply(loop: Loop, tensors: Tensors) -> tuple[Tensor, ...]:
    if _batched_grads.any_batched(tensors):
        return _batched_grads.vmapped(lambda *inner: _apply(loop, inner), tensors)
    within = innermost_in_forward_mode()
    if within == "grad":
        return apply_at_one_level(_GradFunction, loop, tensors)
    if within == "jvp":
        return _apply_dual(loop, *part(tensors))
    if not is_transformed(tensors):
        with torch.no_grad():  # what `apply` does, without the fifth of a call that it takes where nothing is recorded
            return _LoopFunction.forward(loop, *tensors)
    return cast("tuple[Tensor, ...]", _LoopFunction.apply(loop, *tensors))  # type: ignore[no-untyped-call]  # so in torch


def _apply_dual(loop: Loop, primals: Tensors, wrt: Mask, tangents: Tensors) -> tuple[Tensor, ...]:
    """One loop for the outputs and their tangents."""
    if not any(wrt):
        return below_one_level(lambda inner: _apply(loop, inner), primals)
    body = DualBody(loop.body, loop.n_consts, len(primals) - loop.n_consts, wrt)
    sums, stacks = _with_more(loop, body, primals, tangents, sum(wrt[: loop.n_consts]))
    ns, ny = len(sums) // 2, len(stacks) // 2
    return join([*sums[:ns], *stacks[:ny]], [*sums[ns:], *stacks[ny:]])


class _LoopFunction(torch.autograd.Function):
    """A loop as a function whose derivatives are loops."""

    @staticmethod
    def forward(loop: Loop, *inputs: Tensor) -> tuple[Tensor, ...]:
        # below all functorch levels here; without detach, live parameters would record a graph beside ours
        inputs = tuple(recordable(with_storage(t.detach())) for t in inputs)
        sums, stacks = _run(loop, inputs[: loop.n_consts], inputs[loop.n_consts :])
        return (*sums, *stacks)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        loop, *tensors = inputs
        ctx.loop = loop
        ctx.differentiable = tuple(_tree.is_differentiable(t) for t in output)
        ctx.set_materialize_grads(False)  # a missing cotangent is skipped, not made of zeros
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: what unpacks them may copy, or allow no more, as torch's checkpoint
        needs = zip(ctx.needs_input_grad[1:], tensors, strict=True)
        wrt = tuple(need and _tree.is_differentiable(t) for need, t in needs)
        # a compiled chunk does not say what leads nowhere, but a step does
        says = ctx.loop.trace.compile is False or hasattr(ctx.loop.body, "pull_back")
        missing = Missing(None if says else set())
        grads = pull_back_loop(ctx.loop, tensors, wrt, cotangents, missing)
        return (None, *missing.left_out(tensors, wrt, grads))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        wrt = tuple(t is not None for t in tangents)
        nothing: list[Tensor | None] = [None] * len(ctx.differentiable)
        if not any(wrt) or not any(ctx.differentiable):
            return tuple(nothing)
        given, n_shared = [t for t in tangents if t is not None], sum(wrt[: ctx.loop.n_consts])
        outs = _derive(JvpBody, ctx.loop, ctx.saved_tensors, wrt, ctx.differentiable, given, n_shared)
        return tuple(put(nothing, ctx.differentiable, outs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], loop: Loop, *inputs: Tensor) -> tuple[Any, Any]:
        dims, nc = in_dims[1:], loop.n_consts
        moved = [
            t if d is None else t.movedim(d, 0 if i < nc else 1)
            for i, (t, d) in enumerate(zip(inputs, dims, strict=True))
        ]
        batched = tuple(d is not None for d in dims)
        # where only cotangents or tangents are batched, the first pass drew one set of random numbers for all of them
        drew = user_inputs_batched(loop.body, batched[:nc], batched[nc:])
        body = VmapBody(loop.body, nc, batched, info.randomness if drew else "same")
        sums, stacks = replace(loop, body=body)(moved[:nc], moved[nc:])
        return (*sums, *stacks), (*(0 for _ in sums), *(1 for _ in stacks))


class _GradFunction(SingleLevelFunction):  # type: ignore[misc]  # of type Any
    """The same for a gradient inside a jvp."""

    @staticmethod
    def forward(loop: Loop, *inputs: Tensor) -> tuple[Tensor, ...]:
        return below_one_level(lambda tensors: _apply(loop, tensors), inputs)

    setup_context = _LoopFunction.setup_context
    backward = _LoopFunction.backward


def pull_back_loop(
    loop: Loop, inputs: Tensors, wrt: Mask, cotangents: Sequence[Tensor | None], missing: Missing | None = None
) -> list[Tensor | None]:
    """The vjp of a loop, as a loop: one gradient for each input, None for those not in `wrt`. Notes the `missing` ones,
    which are zeros here.
    """
    given = tuple(c is not None for c in cotangents)
    nothing: list[Tensor | None] = [None] * len(inputs)
    if not any(wrt) or not any(given):
        return nothing
    kind = partial(VjpBody, missing=missing or Missing())
    extra, n_shared = [c for c in cotangents if c is not None], sum(given[: loop.body.n_sums])
    return put(nothing, wrt, _derive(kind, loop, inputs, wrt, given, extra, n_shared))


@eager
def _derive(
    kind: Callable[..., VjpBody | JvpBody],
    loop: Loop,
    inputs: Tensors,
    wrt: Mask,
    outs: Mask,
    extra: Tensors,
    n_shared: int,
) -> tuple[Tensor, ...]:
    """Runs the derived loop; `extra` are the cotangents of `outs` for a vjp, the tangents of `wrt` for a jvp."""
    nc, ns = loop.n_consts, loop.body.n_sums
    body = kind(loop.body, nc, len(inputs) - nc, wrt, outs[:ns], outs[ns:])
    sums, stacks = _with_more(replace(loop, first_pass=False), body, inputs, extra, n_shared)
    return (*sums, *stacks)


def _with_more(
    loop: Loop, body: ChunkBody, inputs: Tensors, extra: Tensors, n_shared: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The loop with a derived body, which takes `extra` as well: `n_shared` consts, then xs."""
    nc = loop.n_consts
    derived = replace(loop, body=body, n_consts=nc + n_shared)
    return derived([*inputs[:nc], *extra[:n_shared]], [*inputs[nc:], *extra[n_shared:]])


@eager
def _run(loop: Loop, consts: Tensors, xs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """The loop itself, on plain tensors: one chunk after the other, each freed before the next one starts."""
    loop.trace.settled = loop.trace.ambient.in_force()
    if loop.n == 0 or (not loop.first_pass and loop.idle and all(loop.idle)):
        outlines = loop.body.outline(consts, xs)
        return [m.zeros() for m in outlines[0]], [m.zeros() for m in outlines[1]]
    outputs = Outputs(loop.n)
    with nullcontext() if records() else torch.inference_mode():
        stream(loop, consts, xs, outputs)
        return outputs.finish((*consts, *xs), loop.trace.foreign)
