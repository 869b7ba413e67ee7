"""Side effects that are allowed, because they are done once: a module's buffers, updated by the first pass alone.

Every run of a loop is a pass, the first one or a recomputation, and passes nest where loops do. A call that changes
buffers asks here what they held when the first pass came by, and whether its changes count.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from pure_loopgrad._constants import Constants
from pure_loopgrad._parametrize import uncached
from pure_loopgrad._training import Layers, Modes
from pure_loopgrad.errors import ImpureBodyError

Snapshot: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """What one stateful call found in the first pass."""

    key: Hashable  # who calls
    asking: bool  # whether in the condition of a loop, which a later pass may leave out
    snapshot: Snapshot


@dataclass
class Effects:
    """What stateful calls found in the first pass, for each iteration in the order of the calls."""

    found: dict[int, list[Call]] = field(default_factory=dict)
    cursor: int = 0  # how many calls of this iteration were already replayed
    modes: Modes = field(default_factory=Modes)  # of the modules that were called
    notes: dict[Hashable, Any] = field(default_factory=dict)  # what calls found out about modules, for later ones


class HasEffects(Protocol):
    """The trace of a call, as far as this module needs it."""

    iterations: range
    effects: Effects
    constants: Constants


@dataclass(frozen=True)
class Pass:
    """One run of one loop."""

    trace: HasEffects
    recomputing: bool

    def record(self, call: Call) -> None:
        """Notes what a call of the iteration that runs now found."""
        self.trace.effects.found.setdefault(self.trace.iterations.start, []).append(call)

    def next(self) -> Snapshot:
        """What the call found in the first pass."""
        effects = self.trace.effects
        found, asking = self._found, _asking.get()
        while not asking and effects.cursor < len(found) and found[effects.cursor].asking:
            effects.cursor += 1
        if effects.cursor >= len(found):
            raise ImpureBodyError(
                f"iteration {self.trace.iterations.start} calls a module more often than in the first pass "
                f"({len(found)}); look for a side effect that decides about the call"
            )
        effects.cursor += 1
        return found[effects.cursor - 1].snapshot

    def peek(self, key: Hashable) -> Snapshot | None:
        """What the next call by the same caller found; the call does not count as replayed."""
        return next((call.snapshot for call in self._found[self.trace.effects.cursor :] if call.key == key), None)

    @property
    def _found(self) -> list[Call]:
        return self.trace.effects.found.get(self.trace.iterations.start, [])


_passes: ContextVar[tuple[Pass, ...]] = ContextVar("pure_loopgrad_passes", default=())
_rehearsal: ContextVar[dict[Hashable, Snapshot] | None] = ContextVar("pure_loopgrad_rehearsal", default=None)
_asking: ContextVar[bool] = ContextVar("pure_loopgrad_asking", default=False)
_refusing: ContextVar[Callable[[str], Exception] | None] = ContextVar("pure_loopgrad_refusing", default=None)


def enclosing() -> list[HasEffects]:
    """The traces of the loops whose bodies run now, the outermost first."""
    return [p.trace for p in _passes.get()]


def recomputing() -> bool:
    """Whether the body that runs now repeats what a first pass has done."""
    return any(p.recomputing for p in _passes.get())


def repeating() -> bool:
    """Whether the loop whose body runs now is past its first pass; that one may be inside another's recomputation."""
    passes = _passes.get()
    return bool(passes) and passes[-1].recomputing


@contextmanager
def running(trace: HasEffects, *, recomputation: bool) -> Iterator[None]:
    """Runs a block as a pass of a loop."""
    token = _passes.set((*_passes.get(), Pass(trace, recomputation)))
    try:
        with uncached(), trace.effects.modes.in_force() if recomputation else nullcontext():
            yield
    finally:
        _passes.reset(token)


def where(trace: HasEffects) -> str:
    """The iterations that run now, in words."""
    it = trace.iterations
    return f"iteration {it.start}" if len(it) == 1 else f"iterations {it.start} to {it.stop - 1}"


def when() -> str:
    """The same of the innermost loop, as a part of a sentence; nothing where there is none."""
    passes = _passes.get()
    return f" in {where(passes[-1].trace)}" if passes and passes[-1].trace.iterations else ""


def notes() -> dict[Hashable, Any]:
    """What calls of modules note for the later ones in all passes of one loop, the outermost that runs.

    Nothing is kept outside of loops, and of runs whose effects nobody sees.
    """
    passes = _passes.get()
    return passes[0].trace.effects.notes if passes and _rehearsal.get() is None else {}


def note_mode(module: nn.Module, layers: Layers) -> None:
    """Notes the training flags of a module that is called, where this is a first pass."""
    for p in _passes.get():
        if not p.recomputing:
            p.trace.effects.modes.note(module, layers)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Runs a block whose effects are seen inside it and nowhere else: a run that only counts steps or finds shapes."""
    token = _rehearsal.set({})
    try:
        with uncached():
            yield
    finally:
        _rehearsal.reset(token)


@contextmanager
def asking(refused: Callable[[str], Exception] | None = None) -> Iterator[None]:
    """Around the condition of a loop.

    Args:
        refused: in a rehearsal after which nobody asks again, the error for a change of a buffer with that name.
    """
    tokens = _asking.set(True), _refusing.set(refused or _refusing.get())
    try:
        yield
    finally:
        _asking.reset(tokens[0])
        _refusing.reset(tokens[1])


def begin(key: Hashable, current: Callable[[], Snapshot]) -> tuple[Snapshot, bool]:
    """What a stateful call starts from, and whether its changes count.

    Args:
        key: who calls.
        current: reads the present state.
    """
    passes, rehearsed = _passes.get(), _rehearsal.get()
    replayed = next((i for i, p in reversed(list(enumerate(passes))) if p.recomputing), None)
    if rehearsed is not None:
        upcoming = None if replayed is None else passes[replayed].peek(key)
        return rehearsed.get(key) or upcoming or current(), False
    snapshot = current() if replayed is None else passes[replayed].next()
    started = 0 if replayed is None else replayed + 1
    known = {id(p.trace) for p in passes[:started]}
    for p in passes[started:]:  # loops that started inside: this is their first pass
        if id(p.trace) not in known:  # the parts of a scan are loops of one trace
            p.record(Call(key, _asking.get(), snapshot))
            known.add(id(p.trace))
    return snapshot, replayed is None


def rehearse(key: Hashable, snapshot: Snapshot, changed: Iterable[str]) -> None:
    """Leaves a state for the next call by the same caller, where nothing counts.

    Args:
        key: who calls.
        snapshot: the state.
        changed: the names of what the call has changed.
    """
    rehearsed, error = _rehearsal.get(), _refusing.get()
    if rehearsed is not None:
        if error is not None and (names := sorted(changed)):
            raise error(names[0])
        rehearsed[key] = snapshot
