"""Some consecutive steps of a loop with a carry, as one body of the primitive; and the way backward through them.

Forward, a segment streams: nothing is kept but the carry and the ys. Where it is recorded, it is cut into the parts of
its plan, each a loop of one iteration that keeps the carry it starts from. Backward, where nobody differentiates the
backward again, the parts are not recorded: a stack of kept carries is walked, each part cut into smaller ones until it
is a single step. Where somebody does, the parts are recorded inside each other, and closed under differentiation as all
loops are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._accumulate import Stack, Sum, may_grow_in_place
from pure_loopgrad._body import Labels
from pure_loopgrad._compile import run_compiled
from pure_loopgrad._effects import recomputing
from pure_loopgrad._levels import is_recorded
from pure_loopgrad._linearise import Mask, linearise, put
from pure_loopgrad._loop import Loop
from pure_loopgrad._nonfinite import check_derivative
from pure_loopgrad._offload import Offload, Store, opened
from pure_loopgrad._rng import State
from pure_loopgrad._schedule import Part, Plan, enough_carries, spine
from pure_loopgrad._shapes import Outline
from pure_loopgrad._user import Tensors, Terms, UserBody

DEEPEST = 12  # parts recorded inside each other, at most: each costs some twenty frames of Python's stack


@dataclass(frozen=True)
class Kept:
    """A carry that is kept, the steps that start from it, and the random state there."""

    start: int
    length: int
    plan: Plan
    carry: Any  # as the store holds it
    rng: State | None  # where the body draws


@dataclass(frozen=True, eq=False)
class Segment:
    """Steps `start` to `start + length`: (params, carry, xs of these steps) -> (carry, their ys), all as sums."""

    step: UserBody  # (params, carry, x) -> (carry, y)
    n_params: int
    n_carry: int
    start: int
    length: int
    plan: Plan
    reverse: bool
    offload: Offload = None
    what: ClassVar[str] = "forward pass"

    @property
    def n_sums(self) -> int:
        return len(self.step.trace.shapes)

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        """Never asked: a loop over a segment has one iteration."""
        raise AssertionError("a segment has at least one step")

    def labels(self) -> Labels:
        return Labels(self.step.input_paths(), [], self.step.output_paths(), [])

    def __call__(self, consts: Tensors, xs: Tensors = ()) -> tuple[list[Tensor], list[Tensor]]:
        if is_recorded(consts):
            return self._composed(*self._split(consts)), []
        return self._streamed(*self._split(consts)), []

    def _split(self, consts: Tensors) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first, second = self.n_params, self.n_params + self.n_carry
        return list(consts[:first]), list(consts[first:second]), list(consts[second:])

    def _at(self, i: int) -> int:
        """Where the x and the y of the segment's step i stand."""
        return self.length - 1 - i if self.reverse else i

    def _run_step(self, i: int, params: Tensors, carry: Tensors, xs: Tensors) -> list[Tensor]:
        trace = self.step.trace
        trace.iterations = range(self.start + i, self.start + i + 1)
        inputs = [*params, *carry, *(x.select(0, self._at(i)) for x in xs)]
        if trace.compile is False or is_recorded(inputs):
            outs = self.step(*inputs)
        else:
            outs = run_compiled(self.step, "step", self.step, *inputs)
        if trace.progress is not None and not recomputing():
            trace.progress(self.start + i + 1, trace.n, self.what)
        return outs

    def _streamed(self, params: list[Tensor], carry: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
        ys: list[Stack] = []
        in_place = may_grow_in_place()
        for i in range(self.length):
            outs = self._run_step(i, params, carry, xs)
            carry = outs[: self.n_carry]
            ys = ys or [Stack(self.length, in_place) for _ in outs[self.n_carry :]]
            for stack, y in zip(ys, outs[self.n_carry :], strict=True):
                stack.add(range(self._at(i), self._at(i) + 1), y.unsqueeze(0))
        return [*carry, *(stack.value() for stack in ys)]

    def _composed(self, params: list[Tensor], carry: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
        parts = self._parts()
        sizes = [size for size, _ in parts]
        # one split and one cat a segment: the backward of n slices would be n tensors as large as xs
        pieces = [torch.split(x, sizes[::-1] if self.reverse else sizes) for x in xs]
        stacks = []
        start = 0
        for i, (size, plan) in enumerate(parts):
            place = len(parts) - 1 - i if self.reverse else i
            outs = self._run_part(
                start, size, plan, [*params, *carry, *(p[place] for p in pieces)], i == len(parts) - 1
            )
            carry = outs[: self.n_carry]
            stacks.append(outs[self.n_carry :])
            start += size
        return [*carry, *(_cat(ys, self.reverse) for ys in zip(*stacks, strict=True))]

    def _parts(self) -> list[Part]:
        """By the plan; but with more carries, where their number is so small that parts would nest too deep."""
        plan = self.plan
        return spine(self.length, enough_carries(self.length, plan, DEEPEST) if isinstance(plan, int) else plan)

    def _run_part(self, start: int, size: int, plan: Plan, consts: list[Tensor], last: bool) -> list[Tensor]:
        part = replace(self, start=self.start + start, length=size, plan=plan)
        if last:  # its backward follows at once, so it is recorded as it is
            return part._one_step(consts)
        outs, _ = Loop(part, 1, 1, len(consts), self.step.trace)(consts, ())
        return list(outs)

    def _one_step(self, consts: list[Tensor]) -> list[Tensor]:
        outs = self._run_step(0, *self._split(consts))
        return [*outs[: self.n_carry], *(y.unsqueeze(0) for y in outs[self.n_carry :])]

    def pull_back(self, inputs: Tensors, wrt: Mask, outs: Mask, cotangents: Tensors) -> list[Tensor | None]:
        """Walks the steps backward, the last one first, from the carries that the plan keeps."""
        params, carry, xs = self._split(inputs)
        floats = tuple(map(_tree.is_differentiable, carry))
        backward = _Backward(self, params, xs, wrt, put([None] * len(outs), outs, cotangents), floats)
        with opened(self.offload) as store:
            stack = [Kept(0, self.length, self.plan, store.put(carry), self._rng())]
            while stack:
                kept = stack.pop()
                carry = store.take(kept.carry)
                if kept.rng is not None:
                    self.step.trace.sources.restore(kept.rng)
                if kept.length == 1:
                    backward.step(kept.start, carry)
                else:
                    stack.extend(self._advanced(kept, store, params, carry, xs))
        return backward.gradients()

    def _advanced(self, kept: Kept, store: Store, params: Tensors, carry: list[Tensor], xs: Tensors) -> Iterator[Kept]:
        """Runs a part forward once more, and keeps the carries at which its own parts start."""
        start = kept.start
        for size, plan in spine(kept.length, kept.plan):
            yield Kept(start, size, plan, store.put(carry), self._rng())
            if start + size == kept.start + kept.length:
                return
            for i in range(start, start + size):
                carry = self._run_step(i, params, carry, xs)[: self.n_carry]
            start += size

    def _rng(self) -> State | None:
        trace = self.step.trace
        return trace.sources.state() if trace.draws else None


class _Backward:
    """The running gradients of a segment: of params, of the carry, of xs."""

    def __init__(
        self,
        segment: Segment,
        params: Tensors,
        xs: Tensors,
        wrt: Mask,
        cotangents: list[Tensor | None],
        floats: Mask,
    ) -> None:
        self.segment, self.params, self.xs, self.floats = segment, params, xs, floats
        n, nc = segment.n_params, segment.n_carry
        self.wrt_params, self.wrt_carry, self.wrt_xs = wrt[:n], wrt[n : n + nc], wrt[n + nc :]
        self.dcarry, self.dys = cotangents[:nc], cotangents[nc:]  # None where nothing leads to it, not zeros
        in_place = may_grow_in_place()
        self.dparams = [Sum(in_place=in_place) for w in self.wrt_params if w]
        self.dxs = [Stack(segment.length, in_place=in_place) for w in self.wrt_xs if w]

    def step(self, i: int, carry: list[Tensor]) -> None:
        """One step's vjp: adds to dparams, replaces dcarry, writes dxs."""
        segment, at = self.segment, self.segment._at(i)
        inputs = [*self.params, *carry, *(x.select(0, at) for x in self.xs)]
        mask = (*self.wrt_params, *self.floats, *self.wrt_xs)
        given = [*self.dcarry, *(None if d is None else d.select(0, at) for d in self.dys)]
        wanted = tuple(d is not None for d in given)
        if not any(mask) or not any(wanted):
            for stack in self.dxs:
                stack.add(range(at, at + 1), None)
            return
        segment.step.trace.iterations = range(segment.start + i, segment.start + i + 1)
        cotangents = [d for d in given if d is not None]
        step, kind = segment.step, ("vjp", mask, wanted)
        every = run_compiled(step, kind, _pull_back_step, step, inputs, mask, wanted, cotangents)
        if segment.step.trace.debug_nonfinite:
            self._check_finite(mask, every, inputs, given)
        grads = iter(every)
        for total in self.dparams:
            if (g := next(grads)) is not None:
                total.add(g)
        self.dcarry = [next(grads) if f else None for f in self.floats]
        for stack in self.dxs:
            g = next(grads)
            stack.add(range(at, at + 1), None if g is None else g.unsqueeze(0))
        if segment.step.trace.progress is not None:
            segment.step.trace.progress(segment.step.trace.n - segment.start - i, segment.step.trace.n, "vjp")

    def _check_finite(self, mask: Mask, grads: Terms, inputs: Tensors, given: Terms) -> None:
        step = self.segment.step
        paths, outputs = step.input_paths(), step.output_paths()
        pairs = zip(compress(paths, mask), grads, strict=True)
        found = [(f"the gradient of {p}", g) for p, g in pairs if g is not None]
        cotangents = {f"the cotangent of {p}": d for p, d in zip(outputs, given, strict=True) if d is not None}
        known = {**dict(zip(paths, inputs, strict=True)), **cotangents}
        check_derivative(step.trace.iterations, "backward", found, None, known)

    def gradients(self) -> list[Tensor | None]:
        """One for each marked input; None where nothing leads to it."""
        params = [None if t.total is None else t.value() for t in self.dparams]
        return [*params, *compress(self.dcarry, self.wrt_carry), *(s.value() if s.started else None for s in self.dxs)]


def _pull_back_step(step: UserBody, inputs: Tensors, mask: Mask, wanted: Mask, cotangents: Tensors) -> Terms:
    """The gradients of a step's marked inputs from the cotangents of its wanted outputs."""

    def outputs(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[()]]:
        return tuple(compress(step(*put(inputs, mask, primals)), wanted)), ()

    primals = list(compress(inputs, mask))
    _, pullback, _ = linearise(outputs, primals)
    return pullback(cotangents, True)


def _cat(parts: tuple[Tensor, ...], reverse: bool) -> Tensor:
    return torch.cat(parts[::-1] if reverse else parts)
