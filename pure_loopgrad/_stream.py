"""One pass over a loop: its chunks in order, each freed before the next one starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from pure_loopgrad import _effects
from pure_loopgrad._accumulate import Consumer
from pure_loopgrad._ambient import as_trained
from pure_loopgrad._body import Chunk, ChunkBody
from pure_loopgrad._capture import version_of
from pure_loopgrad._chunks import chunks, slices
from pure_loopgrad._compile import RunChunk, chunk_runner
from pure_loopgrad._derived import VjpBody
from pure_loopgrad._direct import RunChunks
from pure_loopgrad._levels import active_levels
from pure_loopgrad._nonfinite import check_derivative, check_sums
from pure_loopgrad._pullback import PullBackChunks
from pure_loopgrad._purity import refuse_changed_inputs
from pure_loopgrad._residuals import Residuals
from pure_loopgrad._rng import RngTape
from pure_loopgrad._trace import Trace
from pure_loopgrad._tracing import is_traced
from pure_loopgrad._user import Tensors, Terms
from pure_loopgrad.errors import LoopGradError, LoopValueError, add_note

TRACED_DRAWS = (
    "the body draws random numbers, and a graph that records its operations (torch.func.linearize, make_fx) would draw "
    "others in the recomputation. Use torch.func.jvp, or pass the numbers in xs"
)


@dataclass(frozen=True)
class Stream:
    """What a pass goes through: a body, how many iterations of it, and what the passes of a call share."""

    body: ChunkBody
    n: int
    chunk_size: int
    n_consts: int
    trace: Trace
    tape: RngTape = field(default_factory=RngTape)
    first_pass: bool = True  # else a later one, which replays what the first one saw
    idle: tuple[bool, ...] = ()  # the iterations without a derivative, which later passes leave out
    residuals: Residuals | None = None  # what is kept of the first pass


def stream(loop: Stream, consts: Tensors, xs: Tensors, outputs: Consumer) -> None:
    """Runs the chunks in order and hands each over, to be added up, stacked or folded."""
    versions = [version_of(t) for t in (*consts, *xs)]
    trace, run = loop.trace, _runner(loop)
    if loop.tape.states and not loop.first_pass and is_traced():
        raise LoopValueError(TRACED_DRAWS)
    random_numbers = loop.tape.recording if loop.first_pass else loop.tape.replaying
    idle = () if loop.first_pass else loop.idle
    report = trace.progress if loop.n == trace.n else None  # a part of a scan reports its steps itself
    running = _effects.running(trace, recomputation=not loop.first_pass)
    with running, as_trained(trace.trains), random_numbers(trace.sources) as rng:
        pieces = zip(chunks(loop.n, loop.chunk_size), slices(xs, loop.n, loop.chunk_size), strict=True)
        for i, (iterations, chunk) in enumerate(pieces):
            if idle and all(idle[iterations.start : iterations.stop]):
                outputs.leave_out(iterations)
                continue
            trace.iterations = iterations
            rng.start(i)
            _add_chunk(loop, run, outputs, consts, xs, chunk)
            rng.finish(i)
            if report is not None:
                report(iterations.stop, loop.n, loop.body.what)
    trace.draws = trace.draws or bool(loop.tape.states)
    refuse_changed_inputs(versions, (*consts, *xs))


def _runner(loop: Stream) -> RunChunk:
    """How a pass runs its chunks: compiled, as pullbacks of plain tensors, or as they are."""
    trace, body = loop.trace, loop.body
    if torch.is_inference_mode_enabled():  # no graph of ordinary autograd, which all else here is made for
        return body
    if trace.compile is False and not torch.is_grad_enabled() and active_levels() == 0:
        if isinstance(body, Chunk):
            return RunChunks(body)
        if isinstance(body, VjpBody) and isinstance(body.base, Chunk):
            return PullBackChunks(body, trace, -(-loop.n // loop.chunk_size))
    return chunk_runner(body, trace)


def _refuse_nonfinite(
    loop: Stream, consts: Tensors, xs: Tensors, found: tuple[Terms, Terms], outputs: Consumer
) -> None:
    """Of the chunk that has just run. What the user's body returns has been looked at already."""
    labels, iterations = loop.body.labels(), loop.trace.iterations
    names = [*labels.consts, *labels.xs]

    def rerun(i: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        loop.trace.check = "off"  # the values of a smaller chunk are other values; an error follows anyway
        loop.trace.iterations = iterations[i : i + 1]
        one = [x.narrow(0, iterations[i], 1) for x in xs]
        sums, stacks = loop.body(consts, one)
        return [*sums, *stacks], dict(zip(names, [*consts, *(x[0] for x in one)], strict=True))

    if loop.body.what != "forward pass":
        pairs = zip([*labels.sums, *labels.stacks], [*found[0], *found[1]], strict=True)
        named = [(label, t) for label, t in pairs if t is not None]
        inputs = dict(zip(names, [*consts, *(x[iterations.start : iterations.stop] for x in xs)], strict=True))
        phase = "forward mode" if loop.body.what == "jvp" else "backward"
        check_derivative(iterations, phase, named, rerun, inputs)
    check_sums(iterations[-1], list(zip(labels.sums, outputs.totals(), strict=True)))


def _add_chunk(loop: Stream, run: RunChunk, outputs: Consumer, consts: Tensors, xs: Tensors, chunk: Tensors) -> None:
    """A call of its own, so that nothing refers to a chunk when the next one starts."""
    trace = loop.trace
    # a shorter last chunk has shapes of its own, for which it is not worth compiling
    call = run if len(trace.iterations) == loop.chunk_size else loop.body
    try:
        found = _run_or_keep(loop, call, consts, chunk) if loop.residuals else call(consts, chunk)
    except LoopGradError:
        raise
    except Exception as error:
        add_note(error, f"in the {loop.body.what} of {_effects.where(trace)}, chunk_size={loop.chunk_size}")
        raise
    outputs.add(trace.iterations, *found)
    if trace.debug_nonfinite:
        _refuse_nonfinite(loop, consts, xs, found, outputs)


def _run_or_keep(loop: Stream, call: RunChunk, consts: Tensors, xs: Tensors) -> tuple[Terms, Terms]:
    """A chunk whose graph may be recorded in the first pass, for the vjp to find."""
    kept = cast(Residuals, loop.residuals)
    chunk = loop.trace.iterations.start // loop.chunk_size
    if loop.first_pass and kept.wants(chunk, loop.body):
        return kept.record(chunk, consts, xs)
    if not loop.first_pass and kept.holds(chunk, loop.body):
        return kept.pull_back(chunk, cast(VjpBody, loop.body), consts, xs)
    return call(consts, xs)
