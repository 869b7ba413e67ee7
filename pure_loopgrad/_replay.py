"""What the first pass of a loop saw, kept for the later ones: random state, autocast, default dtype and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

RngState: TypeAlias = dict[torch.device, Tensor]
CPU = torch.device("cpu")


def rng_devices(tensors: Sequence[Tensor]) -> tuple[torch.device, ...]:
    """The CPU and every other device that the tensors live on and that has a default generator."""
    others = {t.device for t in tensors if t.device.type not in ("cpu", "meta")}
    return (CPU, *sorted(others, key=str))


def rng_state(devices: Sequence[torch.device]) -> RngState:
    """A copy of the default generators' states."""
    return {d: torch.get_rng_state() if d == CPU else _module(d).get_rng_state(d) for d in devices}


def set_rng_state(state: RngState) -> None:
    """Puts the default generators where `rng_state` found them."""
    for device, value in state.items():
        if device == CPU:
            torch.set_rng_state(value)
        else:
            _module(device).set_rng_state(value, device)


def _module(device: torch.device):  # type: ignore[no-untyped-def]  # a module, which has no useful type
    return torch.get_device_module(device)


@dataclass
class RngTape:
    """The random states before those chunks that drew; empty for a body that draws nothing."""

    states: dict[int, RngState] = field(default_factory=dict)

    @contextmanager
    def recording(self, devices: Sequence[torch.device]) -> Iterator[RngRecorder]:
        """The first pass: states are noted, the global stream moves on as in a plain loop."""
        yield RngRecorder(self, devices, rng_state(devices))

    @contextmanager
    def replaying(self, devices: Sequence[torch.device]) -> Iterator[RngPlayer]:
        """A later pass: each chunk draws what it drew first, and the global stream stays where it was."""
        if not self.states:
            yield RngPlayer({})
            return
        outside = rng_state(devices)
        try:
            yield RngPlayer(self.states)
        finally:
            set_rng_state(outside)


@dataclass
class RngRecorder:
    tape: RngTape
    devices: Sequence[torch.device]
    before: RngState

    def start(self, chunk: int) -> None:
        """Nothing to do: `finish` of the chunk before has left the right state."""

    def finish(self, chunk: int) -> None:
        after = rng_state(self.devices)
        if any(not torch.equal(after[d], self.before[d]) for d in self.devices):
            self.tape.states[chunk] = self.before
            self.before = after


@dataclass
class RngPlayer:
    states: dict[int, RngState]

    def start(self, chunk: int) -> None:
        if chunk in self.states:
            set_rng_state(self.states[chunk])

    def finish(self, chunk: int) -> None:
        """Nothing to do: the state is put back once, after the last chunk."""


@dataclass(frozen=True)
class Ambient:
    """The settings around a call that change what a body computes."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> Ambient:
        """Reads the settings in force now."""
        kinds = sorted({d.type for d in devices})
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return cls(autocast, torch.get_default_dtype(), torch.get_default_device())

    def in_force(self) -> bool:
        """Whether `restored` would change nothing."""
        return (
            not any(enabled or torch.is_autocast_enabled(kind) for kind, enabled, _ in self.autocast)
            and torch.get_default_dtype() == self.dtype
            and torch.get_default_device() == self.device
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Runs a block under these settings, whatever is in force now."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    # the cache would keep every iteration's cast weights alive until the user's block ends
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            if torch.get_default_dtype() != self.dtype:
                stack.enter_context(_default_dtype(self.dtype))
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
