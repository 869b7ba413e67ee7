"""Seconds and memory of this process; without torch, since JAX is measured by it too."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path

LONG = 2.0  # seconds a run beyond which a row is measured in one process alone
ENOUGH = 1.5  # seconds after which a process times no further run


def resident_mib(field: str = "VmRSS") -> float:
    """Of this process, from proc(5); not by getrusage, whose peak starts from that of the parent process."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 2**10


def peak_starts() -> float:
    """The memory held now, above which `resident_mib("VmHWM")` counts from here; what was freed is given back first."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return resident_mib()


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < ENOUGH:
        seconds.append(seconds_of(run))
    return statistics.median(seconds)
