"""Random number generators that a loop replays, and the tape of their states."""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad.errors import LoopTypeError, LoopValueError

State: TypeAlias = "tuple[Any, ...]"  # one entry a source
CPU = torch.device("cpu")
GLOBALS = ("random", "numpy.random")  # modules that draw from a generator of their own


@dataclass(frozen=True)
class Source:
    """One generator: how its state is read and put back."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


@dataclass(frozen=True)
class Sources:
    """All generators that a loop replays, the default ones first."""

    devices: tuple[torch.device, ...]
    given: tuple[Any, ...]
    each: tuple[Source, ...]
    vmapped: bool = False  # whether iterations run under one vmap, and are to draw each for itself

    @classmethod
    def of(cls, tensors: Sequence[Tensor], leaves: Iterable[Any], given: Sequence[Any]) -> Sources:
        """The default generators of the CPU, the default device and the tensors' devices, then those that are given or
        stand among the leaves of params and xs.
        """
        used = {t.device for t in tensors} | {torch.get_default_device()}
        others = sorted((d for d in used if d.type not in ("cpu", "meta")), key=str)
        devices = (CPU, *others)
        torchs = (leaf for leaf in leaves if isinstance(leaf, torch.Generator))
        unique = tuple({id(g): g for g in (*torchs, *given)}.values())
        return cls(devices, unique, (*map(_default, devices), *map(source_of, unique)))

    def refuse_shared(self, before: list[bytes], after: list[bytes], chunk: int) -> None:
        """Raises LoopValueError if a vmapped chunk drew from a generator of which torch does not know.

        Torch's own draw for each iteration under vmap, or raise.
        """
        first = len(self.devices)
        for i, generator in enumerate(self.given if self.vmapped else ()):
            if not isinstance(generator, torch.Generator) and before[first + i] != after[first + i]:
                name = getattr(generator, "__name__", type(generator).__name__)
                raise LoopValueError(
                    f"the body draws from {name} in chunk {chunk}, whose iterations run under one torch.vmap, so that "
                    f"one draw would serve them all. Use chunk_size=1, draw from torch with randomness='different', "
                    f"pass the numbers in xs, or ask for one draw a chunk by randomness='same'"
                )

    def state(self) -> State:
        """Where every generator stands."""
        return tuple(source.get() for source in self.each)

    def restore(self, state: State) -> None:
        """Puts every generator where `state` found it."""
        for source, value in zip(self.each, state, strict=True):
            source.put(value)


def source_of(generator: Any) -> Source:
    """A torch.Generator, a numpy Generator or RandomState, a random.Random, or the modules numpy.random and random.

    Raises:
        LoopTypeError: something else.
    """
    bits: Any = getattr(generator, "bit_generator", None)
    if hasattr(bits, "state"):
        return Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
    for get, put in (("get_state", "set_state"), ("getstate", "setstate")):
        if hasattr(generator, get) and hasattr(generator, put):
            return Source(getattr(generator, get), getattr(generator, put))
    raise LoopTypeError(
        f"a {type(generator).__name__} is no random generator that can be replayed: give a torch.Generator, a numpy "
        f"Generator or RandomState, a random.Random, or the modules numpy.random and random"
    )


def with_globals(given: Sequence[Any]) -> tuple[Any, ...]:
    """The given generators and the global ones of Python and numpy, as far as these are loaded."""
    loaded = (sys.modules[name] for name in GLOBALS if name in sys.modules)
    return (*given, *(module for module in loaded if module not in given))


@contextmanager
def left_alone(sources: Sources) -> Iterator[None]:
    """A block at whose end all generators stand where they stood."""
    state = sources.state()
    try:
        yield
    finally:
        sources.restore(state)


def _default(device: torch.device) -> Source:
    if device == CPU:
        return Source(torch.default_generator.get_state, torch.set_rng_state)
    module = torch.get_device_module(device)
    return Source(lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device))


def _bytes(value: Any) -> bytes:
    """A state as bytes; torch.equal would take five times as long."""
    if isinstance(value, Tensor):
        return ctypes.string_at(value.data_ptr(), value.numel())
    return pickle.dumps(value)


def moved(before: State, after: State) -> bool:
    """Whether some generator was drawn from between two states."""
    return _readable(before) != _readable(after)


def _readable(state: State) -> list[bytes]:
    return [_bytes(value) for value in state]


@dataclass
class RngTape:
    """The random states before those chunks that drew; empty for a body that draws nothing."""

    states: dict[int, State] = field(default_factory=dict)

    @contextmanager
    def recording(self, sources: Sources) -> Iterator[_Recorder]:
        """The first pass: states are noted, the global stream moves on as in a plain loop."""
        state = sources.state()
        yield _Recorder(self, sources, state, _readable(state))

    @contextmanager
    def replaying(self, sources: Sources) -> Iterator[_Player]:
        """A later pass: each chunk draws what it drew first, and every generator stays where it was."""
        if not self.states:
            yield _Player({}, sources)
            return
        with left_alone(sources):
            yield _Player(self.states, sources)


@dataclass
class _Recorder:
    tape: RngTape
    sources: Sources
    before: State
    read: list[bytes]  # what `before` holds, to be read once

    def start(self, chunk: int) -> None:
        """Nothing to do: `finish` of the chunk before has left the right state."""

    def finish(self, chunk: int) -> None:
        after = self.sources.state()
        read = _readable(after)
        if read != self.read:
            self.sources.refuse_shared(self.read, read, chunk)
            self.tape.states[chunk] = self.before
            self.before, self.read = after, read


@dataclass
class _Player:
    states: dict[int, State]
    sources: Sources

    def start(self, chunk: int) -> None:
        if chunk in self.states:
            self.sources.restore(self.states[chunk])

    def finish(self, chunk: int) -> None:
        """Nothing to do: the states are put back once, after the last chunk."""
