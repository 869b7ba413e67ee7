"""Seconds and memory of this process; without torch, since JAX is measured by it too."""

from __future__ import annotations

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


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < ENOUGH:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
