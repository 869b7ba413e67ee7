"""The graphs of a loop's last chunks, kept from the first pass up to a number of bytes: they are not run again.

For k of n iterations, the time of a gradient is n (F + B) + (n - k) F.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from pure_loopgrad._body import ChunkBody
from pure_loopgrad._counting import LiveBytes
from pure_loopgrad._derived import Mask, VjpBody, put, zeros_for_none
from pure_loopgrad._onepass import OnePassBody
from pure_loopgrad._user import Tensors


@dataclass(frozen=True)
class Graph:
    """One chunk as ordinary autograd recorded it: its inputs in `wrt` as leaves, and all of its outputs."""

    leaves: list[Tensor]
    outputs: list[Tensor]

    @classmethod
    def record(cls, body: ChunkBody, wrt: Mask, consts: Tensors, xs: Tensors) -> tuple[Graph, int]:
        """Runs a chunk. Returns its graph, and how many of the outputs are sums."""
        inputs = [*consts, *xs]
        leaves = [t.detach().requires_grad_() for t in compress(inputs, wrt)]
        full = put(inputs, wrt, leaves)
        with torch.enable_grad():
            sums, stacks = body(full[: len(consts)], full[len(consts) :])
        return cls(leaves, [*sums, *stacks]), len(sums)

    def pull_back(self, wanted: Mask, given: Mask, cotangents: Tensors) -> list[Tensor]:
        """The gradients of the wanted leaves; frees the graph."""
        leaves = list(compress(self.leaves, wanted))
        pairs = zip(compress(self.outputs, given), cotangents, strict=True)
        recorded = [(y, c) for y, c in pairs if y.requires_grad]  # an output may not depend on any leaf
        grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if recorded:
            outputs, seeds = zip(*recorded, strict=True)
            grads = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
        return zeros_for_none(grads, leaves)


@dataclass
class Residuals:
    """What a call keeps between its first pass and its vjp, beside the inputs. Each graph is used once."""

    base: ChunkBody
    wrt: Mask
    budget: float
    n_chunks: int
    size: int | None = None  # bytes of one chunk's residuals; known once one has run
    graphs: dict[int, Graph] = field(default_factory=dict)

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
        if self.size is None:
            with LiveBytes() as live:
                graph, n_sums = Graph.record(self.base, self.wrt, consts, xs)
                self.size = live.now
        else:
            graph, n_sums = Graph.record(self.base, self.wrt, consts, xs)
        if self._fits(chunk):
            self.graphs[chunk] = graph
        outs = [y.detach() for y in graph.outputs]
        return outs[:n_sums], outs[n_sums:]

    def holds(self, chunk: int, body: ChunkBody) -> bool:
        """Whether `body` is the pullback of the chunk that is kept."""
        if chunk not in self.graphs or not isinstance(body, VjpBody) or body.base is not self.base:
            return False
        return all(kept or not wanted for kept, wanted in zip(self.wrt, body.wrt, strict=True))

    def pull_back(self, chunk: int, body: VjpBody, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        """`body(consts, xs)` from what is kept."""
        wanted = tuple(compress(body.wrt, self.wrt))
        cotangents = [*consts[body.n_consts :], *xs[body.n_xs :]]
        grads = self.graphs.pop(chunk).pull_back(wanted, (*body.sums, *body.stacks), cotangents)
        return grads[: body.n_sums], grads[body.n_sums :]
