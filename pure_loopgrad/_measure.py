"""What a loop costs, found without running it: bytes and operations on fake tensors.

Peaks are affine in the number of iterations, from two chunks on, so that small loops tell about large ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._counting import Flops, LiveBytes
from pure_loopgrad._loop import pull_back_loop
from pure_loopgrad._modes import compiled_run_eagerly
from pure_loopgrad._reduce import Body, Options, prepare
from pure_loopgrad._rng import Sources, left_alone, with_globals
from pure_loopgrad._run import Run, current
from pure_loopgrad._shapes import fake, without_data
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import ShapeInferenceError

QUIET = Run(check="off")
BUSY = {"cpu": 2**26}  # bytes of a chunk beyond which more iterations at once gain nothing: the caches of a CPU
BUSY_ELSEWHERE = 2**30


def gradient_once(body: Body, params: PyTree, xs: PyTree, options: Options) -> None:
    """Runs a loop and its pullback to params, from cotangents of ones."""
    prepared = prepare(body, params, xs, options)
    raw = prepared.run()
    wrt = tuple(map(_tree.is_differentiable, prepared.consts)) + (False,) * len(prepared.xs)
    cotangents = [torch.ones_like(r) if _tree.is_differentiable(r) else None for r in raw]
    pull_back_loop(prepared.loop, prepared.inputs, wrt, cotangents)


@dataclass(frozen=True, eq=False)
class Subject:
    """A loop to be measured; its xs are one iteration's, to be repeated."""

    body: Body
    params: PyTree
    xs: PyTree
    options: Options

    @property
    def generators(self) -> tuple[Any, ...]:
        """Those that the body may draw from even without data."""
        return with_globals(current(self.options.run).generators)

    def on_fakes(self, run: Callable[[PyTree, Callable[[int], PyTree]], Any]) -> Any:
        """Calls `run(params, xs_of)` with fake tensors; `xs_of(n)` makes n iterations.

        Raises:
            ShapeInferenceError: the body needs data.
        """
        tensors, skeleton = _tree.split(self.params)
        x_tensors, x_skeleton = _tree.split(self.xs)
        try:
            with left_alone(Sources.of([], (), self.generators)), compiled_run_eagerly(), without_data() as mode:
                params = skeleton.fill([fake(mode, t).detach() for t in tensors])
                one = [fake(mode, x) for x in x_tensors]
                return run(params, lambda n: x_skeleton.fill([x.new_empty((n, *x.shape[1:])) for x in one]))
        except RuntimeError as error:
            raise ShapeInferenceError(
                f"the loop cannot be measured without data: the body raised {type(error).__name__}: {error}. Choose "
                f"chunk_size yourself"
            ) from error

    def streaming(self, n: int, chunk_size: int) -> int:
        """Peak bytes of the loop and its pullback to params."""

        def run(params: PyTree, xs_of: Callable[[int], PyTree]) -> int:
            xs = xs_of(n)
            with LiveBytes() as live:
                quiet = replace(QUIET, generators=self.generators)  # draws that a vmapped chunk would share are refused
                options = replace(self.options, chunk_size=chunk_size, run=quiet, weights=None, grad_weights=None)
                gradient_once(self.body, params, xs, options)
            return int(live.peak)

        return int(self.on_fakes(run))

    @functools.cached_property
    def per_iteration(self) -> int:
        """Bytes that each further iteration adds to the streaming peak: of stacks, nothing else grows."""
        return self.streaming(3, 1) - self.streaming(2, 1)

    def peak(self, n: int, chunk_size: int = 1) -> int:
        """Peak bytes beyond inputs of the streaming gradient, from two chunks and what further ones add.

        Raises:
            ShapeInferenceError: the body needs data, or cannot be vmapped.
        """
        few = min(n, 2 * chunk_size)
        return self.streaming(few, chunk_size) + (n - few) * self.per_iteration

    def full_graph(self, n: int) -> int:
        """Peak bytes of the plain loop under ordinary autograd, from that of two and three iterations."""
        two, three = self.recorded
        return two + (n - 2) * (three - two)

    def residuals(self) -> int:
        """Bytes that the full graph keeps of one iteration beside its outputs (twice, as a stack and its cotangent)."""
        two, three = self.recorded
        outputs = 2 * sum(y.nbytes for y in self.outputs) if self.options.reduce == "stack" else 0
        return three - two - outputs

    @functools.cached_property
    def recorded(self) -> tuple[int, int]:
        """Peak bytes of the plain loop over two and over three iterations."""
        return self.recording(2), self.recording(3)

    def recording(self, n: int) -> int:
        """Peak bytes of the plain loop and its backward."""
        return int(self.on_fakes(lambda params, xs_of: self._plain(params, xs_of(n), n)))

    def _plain(self, params: PyTree, xs: PyTree, n: int) -> int:
        tensors, skeleton = _tree.split(params)
        live_leaves = [t.requires_grad_() if _tree.is_differentiable(t) else t for t in tensors]
        p = skeleton.fill(live_leaves)
        with LiveBytes() as live:
            outs = [self._outputs(p, xs, i) for i in range(n)]
            leaves = [self._reduced(list(ys)) for ys in zip(*outs, strict=True)]
            del outs
            recorded = [y for y in leaves if y.requires_grad]
            wrt = [t for t in live_leaves if t.requires_grad]
            if recorded:
                torch.autograd.grad(recorded, wrt, [torch.ones_like(y) for y in recorded], allow_unused=True)
        return int(live.peak)

    @functools.cached_property
    def outputs(self) -> list[Tensor]:
        """One iteration's outputs, without data."""
        found: list[Tensor] = self.on_fakes(lambda params, xs_of: self._outputs(params, xs_of(1), 0))
        return found

    def _outputs(self, params: PyTree, xs: PyTree, i: int) -> list[Tensor]:
        x_tensors, x_skeleton = _tree.split(xs)
        one = [x[i : i + 1] if self.options.batched else x[i] for x in x_tensors]
        ys, _ = _tree.numbers_to_tensors(self.body(params, x_skeleton.fill(one)), x_tensors, "output")
        return [y.squeeze(0) for y in ys] if self.options.batched else ys

    def _reduced(self, ys: Sequence[Tensor]) -> Tensor:
        if self.options.reduce == "stack":
            return torch.stack(list(ys))
        total = ys[0]
        for y in ys[1:]:
            total = total + y
        return total

    def flops(self) -> tuple[int, int]:
        """Operations of one iteration forward, and forward and backward; matrix products and convolutions count."""

        def run(params: PyTree, xs_of: Callable[[int], PyTree]) -> tuple[int, int]:
            with Flops() as forward:
                self._outputs(params, xs_of(1), 0)
            with Flops() as both:
                self._plain(params, xs_of(1), 1)
            return forward.total, both.total

        f, fb = self.on_fakes(run)
        return int(f), int(fb)


def chunk_size_for(subject: Subject, n: int, budget: int, device: torch.device) -> int:
    """The largest power of two that stays within a budget, and within what keeps a device busy; n if that is less.

    A peak is the greatest of several phases, each with a slope of its own, so that each size is looked at.
    """
    busy = BUSY.get(device.type, BUSY_ELSEWHERE)
    best, size = 1, 2
    try:
        alone = subject.peak(n)
        while best < n:
            size = min(size, n)
            peak = subject.peak(n, size)
            if peak > budget or peak - alone > busy:
                break
            best, size = size, 2 * size
    except (ShapeInferenceError, ValueError):
        return best  # the body cannot be vmapped
    return best


def default_budget(device: torch.device) -> int:
    """Half of the memory that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
