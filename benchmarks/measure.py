"""One method of one workload at one size, in this process: prints its seconds, or its peak memory, as JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


def resident_mib(field: str = "VmRSS") -> float:
    """Of this process, from proc(5); not by getrusage, whose peak starts from that of the parent process."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 2**10


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("method")
    parser.add_argument("n", type=int)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; 0 measures memory instead")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    workload = importlib.import_module(f"benchmarks.{args.workload}")
    run = workload.METHODS[args.method](args.n)
    workload.METHODS[args.method](4)()  # kernels and modules of torch load at their first use
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    base = resident_mib()
    run()
    found = (
        {"mib": resident_mib("VmHWM") - base} if args.repeats == 0 else {"seconds": median_seconds(run, args.repeats)}
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
