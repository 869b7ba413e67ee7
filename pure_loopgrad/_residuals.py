"""The graphs of a loop's last chunks, kept from the first pass up to a number of bytes: they are not run again.

For k of n iterations, the time of a gradient is n (F + B) + (n - k) F.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import compress
from typing import cast

from torch import Tensor

from pure_loopgrad._body import ChunkBody
from pure_loopgrad._counting import LiveBytes
from pure_loopgrad._derived import VjpBody
from pure_loopgrad._linearise import Mask, PlainPullback, linearise, put
from pure_loopgrad._onepass import OnePassBody
from pure_loopgrad._user import Tensors


@dataclass
class Residuals:
    """What a call keeps between its first pass and its vjp, beside the inputs. Each graph is used once."""

    base: ChunkBody
    wrt: Mask
    budget: float
    n_chunks: int
    size: int | None = None  # bytes of one chunk's residuals; known once one has run
    graphs: dict[int, PlainPullback] = field(default_factory=dict)

    def wants(self, chunk: int, body: ChunkBody) -> bool:
        """Whether to record a chunk: one, to see what it takes, and then the last ones that fit."""
        if isinstance(body, OnePassBody) and body.known and not body.pays:
            body = body.base
        return body is self.base and (self.size is None or self._fits(chunk))

    def _fits(self, chunk: int) -> bool:
        """Whether this chunk and all after it fit into the budget."""
        assert self.size is not None
        return (self.n_chunks - chunk) * self.size <= self.budget

    def record(self, chunk: int, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        """Runs a chunk of the first pass, and keeps its graph if there is room."""
        inputs = [*consts, *xs]

        def outputs(*primals: Tensor) -> tuple[tuple[Tensor, ...], tuple[()]]:
            full = put(inputs, self.wrt, primals)
            sums, stacks = self.base(full[: len(consts)], full[len(consts) :])
            return (*sums, *stacks), ()

        with LiveBytes() if self.size is None else nullcontext() as live:
            found, pullback, _ = linearise(outputs, list(compress(inputs, self.wrt)))
            if live is not None:
                self.size = live.now
        if self._fits(chunk):
            self.graphs[chunk] = cast(PlainPullback, pullback)  # as grad mode is off, and there are no transforms
        outs, n = [y.detach() for y in found], self.base.n_sums
        return outs[:n], outs[n:]

    def holds(self, chunk: int, body: ChunkBody) -> bool:
        """Whether `body` is the pullback of the chunk that is kept."""
        if chunk not in self.graphs or not isinstance(body, VjpBody) or body.base is not self.base:
            return False
        return all(kept or not wanted for kept, wanted in zip(self.wrt, body.wrt, strict=True))

    def pull_back(self, chunk: int, body: VjpBody, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        """`body(consts, xs)` from what is kept."""
        wanted = tuple(compress(body.wrt, self.wrt))
        graph = self.graphs.pop(chunk).part(wanted, (*body.sums, *body.stacks))
        grads = graph(body.cotangents(consts, xs), True)
        return body.parted(body.filled(grads, body.inputs(consts, xs)))
