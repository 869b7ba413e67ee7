"""The derivatives of a body are bodies again: its vjp and its jvp, the latter alone or with what it is the tangent of.

For a body (consts, xs) -> (sums, stacks) of one chunk:

    vjp   (consts + dsums, xs + dstacks)   -> (dconsts, dxs)          summed over chunks, stacked along them
    jvp   (consts + dconsts, xs + dxs)     -> (dsums, dstacks)
    dual  the same inputs                  -> (sums + dsums, stacks + dstacks)

Each calls the body beneath it exactly once, so that the random numbers it draws are those of the first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import ChunkBody, Labels
from pure_loopgrad._dual_level import in_dual_level, within_dual_level
from pure_loopgrad._levels import is_recorded
from pure_loopgrad._linearise import Mask, gradients, linearise, put, zeros_for_none
from pure_loopgrad._missing import Missing
from pure_loopgrad._shapes import Meta, Outline
from pure_loopgrad._user import Tensors, Terms

RunBody: TypeAlias = "Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]"
PullBackTerms: TypeAlias = "Callable[[Tensors, Tensors], tuple[Terms, Terms]]"
T = TypeVar("T")


class HasPullback(Protocol):
    """A body that knows a better way backward than to record itself whole; all that it has are consts and sums."""

    def pull_back(self, inputs: Tensors, wrt: Mask, outs: Mask, cotangents: Tensors) -> list[Tensor | None]:
        """The gradients of the marked inputs from cotangents of the marked outputs; None where nothing leads to one."""


@dataclass(frozen=True)
class VjpBody:
    """The pullback of `base`, for the inputs `wrt`, from cotangents of the outputs marked in `sums` and `stacks`."""

    base: ChunkBody
    n_consts: int
    n_xs: int
    wrt: Mask  # over consts, then xs
    sums: Mask
    stacks: Mask
    missing: Missing = field(default_factory=Missing, compare=False)
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

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        inputs = self.inputs(consts, xs)
        if self.base_has_pullback and not is_recorded([*consts, *xs]):
            base, cotangents = cast(HasPullback, self.base), self.cotangents(consts, xs)
            return self.filled(base.pull_back(inputs, self.wrt, self.sums, cotangents), inputs), []
        grads = self.linearised(inputs)(self.cotangents(consts, xs))
        return self.parted(self.filled(grads, inputs))

    def terms(self, base: RunBody) -> PullBackTerms:
        """The same for many chunks, on plain tensors and with grad mode off, with None for zero, where the outputs do
        not depend on an input: a head that only the loss uses.

        Args:
            base: the base, or what does the same in fewer layers.
        """
        nc, nx, n_sums = self.n_consts, self.n_xs, self.n_sums
        missing, marked = self.missing, [i for i, wanted in enumerate(self.wrt) if wanted]
        recording = torch.enable_grad()

        def pull_back(consts: Tensors, xs: Tensors) -> tuple[Terms, Terms]:
            inputs = [*consts[:nc], *xs[:nx]]
            leaves = [inputs[i].detach().requires_grad_() for i in marked]
            for i, leaf in zip(marked, leaves, strict=True):
                inputs[i] = leaf
            with recording:
                sums, stacks = base(inputs[:nc], inputs[nc:])
            outputs = [*compress(sums, self.sums), *compress(stacks, self.stacks)]
            grads = gradients(outputs, leaves, [*consts[nc:], *xs[nx:]])
            missing.note(grads)
            return grads[:n_sums], grads[n_sums:]

        return pull_back

    def inputs(self, consts: Tensors, xs: Tensors) -> list[Tensor]:
        """Those of the base."""
        return [*consts[: self.n_consts], *xs[: self.n_xs]]

    def cotangents(self, consts: Tensors, xs: Tensors) -> list[Tensor]:
        """Those of the marked outputs."""
        return [*consts[self.n_consts :], *xs[self.n_xs :]]

    def filled(self, grads: Terms, inputs: Tensors) -> list[Tensor]:
        """The gradients of a chunk, with zeros for None."""
        if not torch.compiler.is_compiling():
            self.missing.note(grads)
        return zeros_for_none(grads, list(compress(inputs, self.wrt)))

    def parted(self, grads: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
        """The gradients of the base's consts, and those of its xs."""
        n = self.n_sums
        return grads[:n], grads[n:]

    @property
    def base_has_pullback(self) -> bool:
        """Whether the base knows a better way backward."""
        return hasattr(self.base, "pull_back")

    def linearised(self, inputs: Tensors) -> Callable[[Tensors], Terms]:
        """Runs the base, and returns what takes cotangents to the gradients of the marked inputs, to be called
        once; None stands for zero.
        """

        def outputs(*primals: Tensor) -> tuple[Tensor, ...]:
            full = put(inputs, self.wrt, primals)
            sums, stacks = self.base(full[: self.n_consts], full[self.n_consts :])
            return (*compress(sums, self.sums), *compress(stacks, self.stacks))

        _, pullback, _ = linearise(lambda *p: (outputs(*p), ()), list(compress(inputs, self.wrt)))
        return lambda cotangents: pullback(cotangents, True)


@dataclass(frozen=True)
class JvpBody:
    """The tangents of `base`'s differentiable outputs, marked in `sums` and `stacks`, along those of inputs `wrt`."""

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
        _, tangents = push_forward(self, consts, xs)
        return tangents[: self.n_sums], tangents[self.n_sums :]


@dataclass(frozen=True)
class DualBody:
    """The outputs of `base` and a tangent for each, from the inputs of its jvp; an empty one where there is none."""

    base: ChunkBody
    n_consts: int
    n_xs: int
    wrt: Mask
    what: ClassVar[str] = "jvp"

    @property
    def n_sums(self) -> int:
        return 2 * self.base.n_sums

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        sums, stacks = self.base.outline(consts[: self.n_consts], xs[: self.n_xs])
        return [*sums, *sums], [*stacks, *stacks]

    def labels(self) -> Labels:
        base = self.base.labels()
        jvp = JvpBody(
            self.base, self.n_consts, self.n_xs, self.wrt, (True,) * len(base.sums), (True,) * len(base.stacks)
        )
        tangents = jvp.labels()
        return replace(tangents, sums=[*base.sums, *tangents.sums], stacks=[*base.stacks, *tangents.stacks])

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        (sums, stacks), found = push_forward(self, consts, xs)
        tangents = iter(found)
        d_sums = [next(tangents) if _tree.is_differentiable(y) else y.new_zeros(()) for y in sums]
        d_stacks = [next(tangents) if _tree.is_differentiable(y) else y.new_zeros((y.shape[0], 0)) for y in stacks]
        return [*sums, *d_sums], [*stacks, *d_stacks]


def push_forward(body: JvpBody | DualBody, consts: Tensors, xs: Tensors) -> tuple[tuple[Tensors, Tensors], Tensors]:
    """Runs the base. Returns its sums and stacks, and the tangents of those of them that are differentiable."""
    inputs = [*consts[: body.n_consts], *xs[: body.n_xs]]
    tangents = (*consts[body.n_consts :], *xs[body.n_xs :])

    def outputs(*primals: Tensor) -> tuple[Any, Any]:
        full = put(inputs, body.wrt, primals)
        sums, stacks = body.base(full[: body.n_consts], full[body.n_consts :])
        return tuple(filter(_tree.is_differentiable, (*sums, *stacks))), (tuple(sums), tuple(stacks))

    # with grad mode off, some ops choose a backward formula that has no forward derivative (silu)
    with torch.enable_grad():
        jvp = within_dual_level if in_dual_level() else partial(torch.func.jvp, has_aux=True)
        pushed = jvp(outputs, tuple(compress(inputs, body.wrt)), tangents)
    _, found, both = cast("tuple[Any, Tensors, tuple[Tensors, Tensors]]", pushed)
    return both, found
