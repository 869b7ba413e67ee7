"""The vmap of a body is a body again: the same one for a whole batch.

The batch axis of consts and sums comes first; that of xs and stacks second, behind that of the iterations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pure_loopgrad._body import ChunkBody, Labels, Randomness
from pure_loopgrad._derived import DualBody, JvpBody, VjpBody
from pure_loopgrad._linearise import Mask
from pure_loopgrad._shapes import Outline
from pure_loopgrad._user import Tensors


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
        inputs = base.inputs(consts, xs)
        pullback = base.linearised(inputs)
        filled = lambda *c: tuple(base.filled(pullback(c), inputs))  # noqa: E731  # for vmap alone
        over_batch = torch.func.vmap(filled, tuple(dims), randomness=self.randomness)
        sums, stacks = base.parted(over_batch(*base.cotangents(consts, xs)))
        return sums, [g.movedim(0, 1) for g in stacks]


def user_inputs_batched(body: ChunkBody, consts: Mask, xs: Mask) -> bool:
    """Whether a batch reaches the user's body, or only the cotangents and tangents of derived ones."""
    while isinstance(body, (VjpBody, JvpBody, DualBody, VmapBody)):
        if not isinstance(body, VmapBody):
            consts, xs = consts[: body.n_consts], xs[: body.n_xs]
        body = body.base
    return any(consts) or any(xs)
