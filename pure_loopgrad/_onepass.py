"""The one-pass rule: where a loop's summed output is a few numbers z, dz/dparams can be added up with it.

The chain rule does the rest: d loss(z) = sum_k dloss/dz_k dz_k, so no iteration runs forward a second time. For K
numbers, an iteration costs F + K B instead of 2F + B, in K gradients of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import Chunk, Labels, accumulation_dtype
from pure_loopgrad._linearise import Mask, Pullback, linearise, put, zeros_for_none
from pure_loopgrad._shapes import Meta, Outline
from pure_loopgrad._user import Tensors


@dataclass(frozen=True)
class OnePassBody:
    """A summing chunk together with its jacobian, if its differentiable outputs hold at most `limit` numbers.

    The sums are those of the chunk, then for each marked const a jacobian of shape (K, *const.shape). The stacks are,
    for each marked x, the same with the iterations first. Beyond the limit there are only the chunk's own sums.
    """

    base: Chunk
    n_consts: int
    wrt: Mask  # over consts, then xs
    limit: int
    what: ClassVar[str] = "forward pass and vjp"

    @property
    def n_sums(self) -> int:
        return self.base.n_sums + (sum(self.wrt[: self.n_consts]) if self.pays else 0)

    @property
    def n_numbers(self) -> int:
        """How many differentiable numbers one iteration adds to the sums; known once the body has run."""
        return sum(prod(m.shape) for m in self.base.body.trace.shapes if m.dtype.is_floating_point)

    @property
    def known(self) -> bool:
        """Whether the body has run."""
        return bool(self.base.body.trace.shapes)

    @property
    def pays(self) -> bool:
        """Whether the jacobian is worth carrying; known once the body has run. A complex z would need two rows."""
        is_complex = any(m.dtype.is_complex for m in self.base.body.trace.shapes)
        return 0 < self.n_numbers <= self.limit and not is_complex

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        if self.known and not self.pays:
            return self.base(consts, xs)
        inputs = [*consts, *xs]

        def outputs(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            full = put(inputs, self.wrt, primals)
            sums, _ = self.base(full[: self.n_consts], full[self.n_consts :])
            return tuple(s for s in sums if _tree.is_differentiable(s)), tuple(sums)

        primals = list(compress(inputs, self.wrt))
        _, pullback, sums = linearise(outputs, primals)
        if not self.pays:
            return sums, ()
        rows = [zeros_for_none(r, primals) for r in self._rows(pullback, list(filter(_tree.is_differentiable, sums)))]
        n = sum(self.wrt[: self.n_consts])
        jacobians = list(zip(*rows, strict=True))
        return [*sums, *(_stack(j, 0) for j in jacobians[:n])], [_stack(j, 1) for j in jacobians[n:]]

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        sums, _ = self.base.outline(consts, xs)
        if not self.pays:
            return sums, []
        wide = [Meta.of(t)._replace(dtype=accumulation_dtype(t.dtype)) for t in compress([*consts, *xs], self.wrt)]
        n, k = sum(self.wrt[: self.n_consts]), self.n_numbers
        return [*sums, *(m.with_axis(0, k) for m in wide[:n])], [m.with_axis(1, k) for m in wide[n:]]

    def labels(self) -> Labels:
        base = self.base.labels()
        grads = [f"the gradient of {name}" for name in compress([*base.consts, *base.xs], self.wrt)]
        n = sum(self.wrt[: self.n_consts])
        return Labels(base.consts, base.xs, [*base.sums, *grads[:n]], grads[n:])

    def _rows(self, pullback: Pullback, sums: Sequence[Tensor]) -> Iterator[Sequence[Tensor | None]]:
        """One pullback for each number, from a cotangent of one there, zero beside it, and none of other outputs."""
        if self.n_numbers == 1:
            yield pullback([torch.ones_like(s) for s in sums], True)
            return
        left = self.n_numbers
        for i, s in enumerate(sums):
            for row in torch.eye(s.numel(), dtype=s.dtype, device=s.device):
                left -= 1
                yield pullback([row.reshape(s.shape) if k == i else None for k in range(len(sums))], left == 0)


def _stack(rows: Sequence[Tensor], dim: int) -> Tensor:
    """The K rows of a jacobian, wide enough to be added up; one row is not copied."""
    rows = [r.to(accumulation_dtype(r.dtype)) for r in rows]
    return rows[0].unsqueeze(dim) if len(rows) == 1 else torch.stack(rows, dim)


def contract(outputs: Sequence[tuple[Tensor, Tensor | None]], jacobian: Tensor, like: Tensor, dim: int) -> Tensor:
    """sum_k dloss/dz_k dz_k/dlike, for a jacobian with its K rows along `dim`. Each output comes with its cotangent, or
    with None where the loss does not use it: such rows are left out, as zero times what is not finite is no zero.
    """
    used = [c for _, c in outputs if c is not None]
    if not used:
        return torch.zeros_like(like)
    if len(used) < len(outputs):
        uses = [c is not None for z, c in outputs for _ in range(z.numel())]
        rows = torch.tensor([k for k, used in enumerate(uses) if used], device=jacobian.device)
        jacobian = jacobian.index_select(dim, rows)
    row = torch.cat([c.reshape(-1) for c in used]).to(jacobian.dtype)
    if jacobian.is_sparse:  # of an embedding with sparse=True: a tensordot would make it dense, if it could
        terms = [jacobian.select(dim, k) * c for k, c in enumerate(row)]
        total: Tensor = functools.reduce(torch.add, terms)
        return total.to(like.dtype)
    grad: Tensor = torch.tensordot(row, jacobian, dims=([0], [dim]))
    return grad.to(like.dtype)
