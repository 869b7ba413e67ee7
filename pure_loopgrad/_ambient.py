"""The settings around a call that change what a body computes, kept for the later passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# settings of one value each: how to read it, how to set it. The default device and autocast are contexts of their own.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (lambda: torch.backends.cudnn.deterministic, lambda v: setattr(torch.backends.cudnn, "deterministic", v)),
    (lambda: torch.backends.cudnn.benchmark, lambda v: setattr(torch.backends.cudnn, "benchmark", v)),
)


@contextmanager
def as_trained(trains: bool) -> Iterator[None]:
    """A block in which attention computes what it does while its inputs require grad.

    torch.nn's encoder layers have another way for inputs that do not, which sets padded places to zero. A first pass is
    given such inputs, and a recomputation is not. Where nothing is trained, that way is the one of the plain loop.
    """
    fast = trains and torch.backends.mha.get_fastpath_enabled()
    if fast:
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        if fast:
            torch.backends.mha.set_fastpath_enabled(True)


@dataclass(frozen=True)
class Ambient:
    """Autocast, the default device, and the values of `SETTINGS`."""

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device
    values: tuple[Any, ...]

    @classmethod
    def capture(cls, devices: Sequence[torch.device]) -> Ambient:
        """Reads the settings in force now."""
        kinds = sorted({d.type for d in devices})
        autocast = tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds)
        return cls(autocast, torch.get_default_device(), tuple(get() for get, _ in SETTINGS))

    def in_force(self) -> bool:
        """Whether `restored` would change nothing."""
        return (
            not any(enabled or torch.is_autocast_enabled(kind) for kind, enabled, _ in self.autocast)
            and all(get() == value for (get, _), value in zip(SETTINGS, self.values, strict=True))
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
            for (get, put), value in zip(SETTINGS, self.values, strict=True):
                if (now := get()) != value:
                    stack.callback(put, now)
                    put(value)
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            yield
