"""The derivatives of a body are bodies again: its vjp, its jvp and its vmap.

For a body (consts, xs) -> (sums, stacks) of one chunk:

    vjp   (consts + dsums, xs + dstacks)   -> (dconsts, dxs)          summed over chunks, stacked along them
    jvp   (consts + dconsts, xs + dxs)     -> (dsums, dstacks)
    vmap  the same body, batched; the batch axis of xs and stacks comes second, behind that of the iterations

Each calls the body beneath it exactly once, so that the random numbers it draws are those of the first pass.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from pure_loopgrad._body import ChunkBody, Labels, Randomness
from pure_loopgrad._levels import is_recorded
from pure_loopgrad._linearise import Mask, linearise, put, zeros_for_none
from pure_loopgrad._shapes import Meta, Outline
from pure_loopgrad._user import Tensors

Within: TypeAlias = AbstractContextManager[object]
WITHIN_NOTHING: Within = nullcontext()


def user_inputs_batched(body: ChunkBody, consts: Mask, xs: Mask) -> bool:
    """Whether a batch reaches the user's body, or only the cotangents and tangents of derived ones."""
    while isinstance(body, (VjpBody, JvpBody, VmapBody)):
        if not isinstance(body, VmapBody):
            consts, xs = consts[: body.n_consts], xs[: body.n_xs]
        body = body.base
    return any(consts) or any(xs)


class HasPullback(Protocol):
    """A body that knows a better way backward than to record itself whole; all that it has are consts and sums."""

    def pull_back(self, inputs: Tensors, wrt: Mask, outs: Mask, cotangents: Tensors) -> list[Tensor]:
        """The gradients of the marked inputs from cotangents of the marked outputs."""


@dataclass(frozen=True)
class VjpBody:
    """The pullback of `base`, for the inputs `wrt`, from cotangents of the outputs marked in `sums` and `stacks`."""

    base: ChunkBody
    n_consts: int
    n_xs: int
    wrt: Mask  # over consts, then xs
    sums: Mask
    stacks: Mask
    what: ClassVar[str] = "vjp"

    @property
    def n_sums(self) -> int:
        return sum(self.wrt[: self.n_consts])

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        inputs = [*consts[: self.n_consts], *xs[: self.n_xs]]
        grads = [Meta.of(t) for t in compress(inputs, self.wrt)]
        return grads[: self.n_sums], grads[self.n_sums :]

    def labels(self) -> Labels:
        base = self.base.labels()
        sums, stacks = (
            [f"the cotangent of {s}" for s in compress(names, mask)]
            for names, mask in ((base.sums, self.sums), (base.stacks, self.stacks))
        )
        grads = [f"the gradient of {name}" for name in compress([*base.consts, *base.xs], self.wrt)]
        return Labels([*base.consts, *sums], [*base.xs, *stacks], grads[: self.n_sums], grads[self.n_sums :])

    def __call__(self, consts: Tensors, xs: Tensors, within: Within = WITHIN_NOTHING) -> tuple[Tensors, Tensors]:
        inputs = self.inputs(consts, xs)
        if self.base_has_pullback and not is_recorded([*consts, *xs]):
            base, cotangents = cast(HasPullback, self.base), self.cotangents(consts, xs)
            return base.pull_back(inputs, self.wrt, self.sums, cotangents), []
        return self.parted(self.linearised(inputs, within)(self.cotangents(consts, xs)))

    def inputs(self, consts: Tensors, xs: Tensors) -> list[Tensor]:
        """Those of the base."""
        return [*consts[: self.n_consts], *xs[: self.n_xs]]

    def cotangents(self, consts: Tensors, xs: Tensors) -> list[Tensor]:
        """Those of the marked outputs."""
        return [*consts[self.n_consts :], *xs[self.n_xs :]]

    def parted(self, grads: Tensors) -> tuple[Tensors, Tensors]:
        """The gradients of the base's consts, and those of its xs."""
        return grads[: self.n_sums], grads[self.n_sums :]

    @property
    def base_has_pullback(self) -> bool:
        """Whether the base knows a better way backward."""
        return hasattr(self.base, "pull_back")

    def linearised(self, inputs: Tensors, within: Within = WITHIN_NOTHING) -> Callable[[Tensors], list[Tensor]]:
        """Runs the base, and returns what takes cotangents to the gradients of the marked inputs; to be called once."""

        def outputs(*primals: Tensor) -> tuple[Tensor, ...]:
            full = put(inputs, self.wrt, primals)
            with within:
                sums, stacks = self.base(full[: self.n_consts], full[self.n_consts :])
            return (*compress(sums, self.sums), *compress(stacks, self.stacks))

        primals = list(compress(inputs, self.wrt))
        _, pullback, _ = linearise(lambda *p: (outputs(*p), ()), primals)
        return lambda cotangents: zeros_for_none(pullback(cotangents, True), primals)


@dataclass(frozen=True)
class JvpBody:
    """The tangents of `base`'s outputs marked in `sums` and `stacks`, along those of the inputs `wrt`."""

    base: ChunkBody
    n_consts: int
    n_xs: int
    wrt: Mask
    sums: Mask
    stacks: Mask
    what: ClassVar[str] = "jvp"

    @property
    def n_sums(self) -> int:
        return sum(self.sums)

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        sums, stacks = self.base.outline(consts[: self.n_consts], xs[: self.n_xs])
        return list(compress(sums, self.sums)), list(compress(stacks, self.stacks))

    def labels(self) -> Labels:
        base = self.base.labels()
        consts, xs, sums, stacks = (
            [f"the tangent of {name}" for name in compress(names, mask)]
            for names, mask in (
                (base.consts, self.wrt[: self.n_consts]),
                (base.xs, self.wrt[self.n_consts :]),
                (base.sums, self.sums),
                (base.stacks, self.stacks),
            )
        )
        return Labels([*base.consts, *consts], [*base.xs, *xs], sums, stacks)

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        inputs = [*consts[: self.n_consts], *xs[: self.n_xs]]
        tangents = (*consts[self.n_consts :], *xs[self.n_xs :])

        def outputs(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            full = put(inputs, self.wrt, primals)
            sums, stacks = self.base(full[: self.n_consts], full[self.n_consts :])
            return tuple(compress(sums, self.sums)), tuple(compress(stacks, self.stacks))

        # with grad mode off, some ops choose a backward formula that has no forward derivative (silu)
        with torch.enable_grad():
            out = torch.func.jvp(outputs, tuple(compress(inputs, self.wrt)), tangents)
        return cast("tuple[Tensors, Tensors]", out[1])


@dataclass(frozen=True)
class VmapBody:
    """`base` for a whole batch; `batched` marks the inputs that have a batch axis."""

    base: ChunkBody
    n_consts: int
    batched: Mask
    randomness: Randomness

    @property
    def what(self) -> str:
        return self.base.what

    @property
    def n_sums(self) -> int:
        return self.base.n_sums

    @property
    def dims(self) -> list[int | None]:
        """The batch axis of each input."""
        return [(0 if i < self.n_consts else 1) if b else None for i, b in enumerate(self.batched)]

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        inputs = list(zip([*consts, *xs], self.dims, strict=True))
        size = next(t.shape[d] for t, d in inputs if d is not None)
        one = [t if d is None else t.new_empty((*t.shape[:d], *t.shape[d + 1 :])) for t, d in inputs]
        sums, stacks = self.base.outline(one[: self.n_consts], one[self.n_consts :])
        return [m.with_axis(0, size) for m in sums], [m.with_axis(1, size) for m in stacks]

    def labels(self) -> Labels:
        return self.base.labels()

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        base, nc = self.base, self.n_consts
        if isinstance(base, VjpBody) and not base.base_has_pullback:
            primals = range(base.n_consts), range(nc, nc + base.n_xs)
            if not any(self.batched[i] for part in primals for i in part):
                return self._over_cotangents(base, consts, xs)

        def outputs(*inputs: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            sums, stacks = base(inputs[:nc], inputs[nc:])
            return tuple(sums), tuple(stacks)

        # out_dims=1 fails in torch for an output that does not depend on the batch: it is expanded without a new axis
        over_batch = torch.func.vmap(outputs, tuple(self.dims), randomness=self.randomness)
        sums, stacks = over_batch(*consts, *xs)
        return sums, [y.movedim(0, 1) for y in stacks]

    def _over_cotangents(self, base: VjpBody, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        """Where only cotangents are batched, the base runs outside of vmap, as in a plain loop under jacrev: it may
        draw, and do what has no batching rule.
        """
        dims = [*self.dims[base.n_consts : self.n_consts], *self.dims[self.n_consts + base.n_xs :]]
        pullback = base.linearised(base.inputs(consts, xs))
        over_batch = torch.func.vmap(lambda *c: tuple(pullback(c)), tuple(dims), randomness=self.randomness)
        sums, stacks = base.parted(over_batch(*base.cotangents(consts, xs)))
        return sums, [g.movedim(0, 1) for g in stacks]
