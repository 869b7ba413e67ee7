"""One rank's part of a loop, and what it sends to the others: what the functions of `distributed` have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pure_loopgrad import _tree
from pure_loopgrad._channel import Channel, Communication, Outputs
from pure_loopgrad._effects import recomputing
from pure_loopgrad._identity import contents_of
from pure_loopgrad._levels import active_levels, below_all_levels
from pure_loopgrad._reduce import Body, Options, Prepared, checked_total
from pure_loopgrad._replicated import Rows, replicate
from pure_loopgrad._shapes import Meta
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import LoopTypeError, LoopValueError, ShapeInferenceError

R = TypeVar("R")
MAX_KINDS = 64


@dataclass(eq=False)
class Channels:
    """The channels of one function: one for each kind of arguments, since the first call with them compares notes."""

    communication: Communication
    deterministic: bool
    by_kind: dict[Any, Channel] = field(default_factory=dict)
    last: Channel | None = None

    def find(
        self, group: Any, body: Body, prepared: Prepared | None, options: Options, marked: Sequence[bool]
    ) -> Channel:
        """The channel for these arguments; the one used before, where this rank could not prepare them.

        Args:
            group: a process group.
            body: the user's; closures of one code may return other shapes.
            prepared: the loop over this rank's iterations.
            options: its keywords.
            marked: which tensors of params are differentiated.
        """
        if prepared is not None or self.last is None:
            lines = () if prepared is None else tuple(signature(prepared, options, marked))
            new = Channel(group, self.communication, self.deterministic, signature=lines)
            if len(self.by_kind) > MAX_KINDS:  # of closures over objects made anew; all ranks forget alike
                self.by_kind.clear()
            self.last = self.by_kind.setdefault((group, lines, contents_of(body)), new)
        return self.last


@dataclass(frozen=True)
class Part:
    """What this rank has run: the loop over its own iterations."""

    prepared: Prepared
    sent: list[Tensor] | None  # for the others; None: there are no iterations, and the shapes are not known yet
    kept: Any = None  # for itself

    @property
    def outputs(self) -> Outputs | None:
        """The structure and the shapes of one iteration's outputs, if they are known."""
        trace = self.prepared.loop.trace
        return None if self.sent is None or trace.outputs is None else (trace.outputs.spec, list(trace.shapes))


@dataclass(eq=False)
class Guarded:
    """A body that tells the other ranks of an error in a backward, where they wait for this rank's gradients next."""

    body: Callable[..., Any]
    channel: Channel | None = None
    entered: Sequence[Tensor] = ()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What messages speak of."""
        return self.body

    def __call__(self, params: Any, x: Any) -> Any:
        try:
            return self.body(params, x)
        except Exception as error:
            if self.channel is not None and recomputing() and active_levels() == 0:
                self.channel.fail("add_up", self.entered, error)
            raise


Runner = Callable[[Prepared], "tuple[list[Tensor], Any]"]  # to what is sent, and what is kept


def refuse_foreign(body: Any, params: PyTree) -> None:
    """Raises LoopTypeError for what other kinds of distribution have taken hold of."""
    if isinstance(body, DistributedDataParallel):
        raise LoopTypeError(
            "the body is wrapped in DistributedDataParallel, which would reduce the gradients again: pass its .module"
        )
    tensors, skeleton = _tree.split(params)
    for path, t in zip(skeleton.tensor_paths("params"), tensors, strict=True):
        if isinstance(t, DTensor):
            raise LoopTypeError(
                f"{path} is a DTensor (FSDP2, tensor parallelism), of which each rank holds a part; here every rank "
                f"holds all params. Pass {path}.full_tensor()"
            )


def group_of(group: Any) -> Any:
    """The group itself, or that of all processes.

    Raises:
        LoopValueError: there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise LoopValueError(
            "there is no process group: start with torchrun and call torch.distributed.init_process_group('gloo')"
        )
    return dist.group.WORLD if group is None else group


@contextmanager
def own_stream(channel: Channel) -> Iterator[None]:
    """Random numbers of this rank's own, from a seed that all draw alike, so that what follows stays in step."""
    if channel.world == 1:
        yield
        return
    with below_all_levels():
        seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed + channel.rank)
        yield


def attempt(run: Callable[[], R]) -> tuple[R | None, Exception | None]:
    """What a function returns, or what it raises, so that this rank can still take part in the next collective."""
    try:
        return run(), None
    except Exception as error:
        return None, error


def own_part(prepared: Prepared, channel: Channel, run: Runner) -> Part:
    """Runs this rank's iterations."""
    loop = prepared.loop
    if loop.n == 0 and channel.outputs is not None:
        spec, shapes = channel.outputs
        loop.trace.outputs, loop.trace.shapes = _tree.Skeleton.of_tensors(spec), list(shapes)
    try:
        return Part(prepared, *run(prepared))
    except ShapeInferenceError:
        if loop.n > 0:
            raise
        return Part(prepared, None)


def signature(prepared: Prepared, options: Options, marked: Sequence[bool]) -> list[str]:
    """What must be the same on all ranks, a line for each thing."""
    lines = [f"reduce={options.reduce!r}"]
    params, xs = prepared.params.tensor_paths("params"), prepared.xs_skeleton.tensor_paths("xs")
    for path, t, mark in zip(params, prepared.consts, marked, strict=True):
        lines.append(f"{path}: {_tree.describe(t)}, {'differentiated' if mark else 'constant'}")
    for path, t in zip(xs, prepared.xs, strict=False):  # weights may stand behind them
        lines.append(f"{path}: {_tree.describe(Meta(tuple(t.shape[1:]), t.dtype, t.device))}")
    return lines


def exchange(
    channel: Channel, options: Options, prepared: Prepared | None, run: Runner, error: Exception | None, rows: Rows
) -> tuple[Prepared, list[Tensor], Any]:
    """Runs this rank's part and puts all parts together: the loop with its global divisor, what all have sent, and what
    this rank has kept.

    Raises:
        DistributedError: another rank raised, or cannot be reached.
        LoopValueError: ranks disagree about params, xs or outputs; the weights of all add up to zero.
    """
    part: Part | None = None
    if prepared is not None:
        made = prepared
        with own_stream(channel):
            part, error = attempt(lambda: own_part(made, channel, run))
    if channel.outputs is None:
        channel.agree([] if prepared is None else channel.signature, None if part is None else part.outputs, error)
        if part is not None and part.sent is None:
            part = own_part(part.prepared, channel, run)
    stacked = options.reduce == "stack"
    kind: Literal["gather", "add_up"] = "gather" if stacked else "add_up"
    if part is None or part.sent is None:
        channel.fail(kind, channel.sent, error)
    total = part.prepared.total
    own = part.sent if stacked else [*part.sent, _number(1.0 if total is None else float(total), part.sent)]
    channel.sent = [Meta.of(t) for t in own]
    every = replicate(kind, channel, own, rows)
    if stacked:
        return part.prepared, every, part.kept
    *sums, divisor = every
    if options.reduce == "sum":
        return part.prepared, sums, part.kept
    return replace(part.prepared, total=checked_total(torch.func.debug_unwrap(divisor).item())), sums, part.kept


def _number(value: float, beside: Sequence[Tensor]) -> Tensor:
    """A number in float32, unless what it is sent with is wider anyway."""
    wide = any(t.dtype in (torch.float64, torch.complex128) or not _tree.is_differentiable(t) for t in beside)
    return torch.tensor(
        [value], dtype=torch.float64 if wide else torch.float32, device=beside[0].device if beside else None
    )
