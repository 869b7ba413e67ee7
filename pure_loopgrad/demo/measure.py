"""What each method costs, in child processes: peak memory above the baseline, seconds, and the gradient itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad.demo.config import Config, InputError
from pure_loopgrad.demo.methods import METHODS, flat
from pure_loopgrad.demo.model import init_params
from pure_loopgrad.demo.problem import make_problem

# malloc hands freed blocks of this size back at once, so that a peak is the program's own and repeats; the page faults
# that this costs more than double the time of a step, which is why seconds are measured without it
FIXED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
THREADS = 2


@dataclass(frozen=True)
class Measured:
    """What a child process found.

    Attributes:
        memory: (n, MiB) pairs, n rising; the last is the whole loop.
        gradient: of the whole loop, as one vector.
    """

    memory: list[tuple[int, float]]
    gradient: Tensor


def memory_of_each(config: Config) -> Iterator[tuple[str, Measured]]:
    """Measures every method in a process of its own, two at a time: a peak does not depend on the company."""
    with ThreadPoolExecutor(2) as pool:
        yield from zip(METHODS, pool.map(lambda method: _memory_of(config, method), METHODS), strict=True)


def _memory_of(config: Config, method: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient.pt"
        found = _child([config.to_json(), method, str(path)], FIXED_MALLOC)
        return Measured([(n, mib) for n, mib in found], torch.load(path))


def seconds_of_each(config: Config) -> dict[str, float]:
    """Seconds of one step by every method, the better of two, with malloc as users have it."""
    found: dict[str, float] = _child([config.to_json()], {})
    return found


def _child(args: list[str], environment: dict[str, str]) -> Any:
    command = [sys.executable, "-m", __name__, *args]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode < 0:  # by a signal; the kernel does so for want of memory
        raise InputError(f"a measurement was killed (signal {-done.returncode}); choose sizes that fit into memory")
    if done.returncode:
        raise RuntimeError(f"measuring failed:\n{done.stderr}")
    return json.loads(done.stdout)


def resident_mib(field: str = "VmRSS") -> float:
    """Memory that this process holds now, from proc(5); with `VmHWM` the most since `forget_peak`.

    Not getrusage: its peak starts from that of the process which started this one.
    """
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 2**10


def forget_peak() -> None:
    """Lets the kernel count this process's peak from now on (Linux: proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def measure_memory(config: Config, method: str, path: str) -> list[tuple[int, float]]:
    """A child's work: memory at a quarter, a half and the whole of the loop; the gradient goes to `path`."""
    whole = make_problem(config)
    one = whole.first(1)
    METHODS[method](config, one)(init_params(config, one))  # kernels and modules of torch load at their first use
    memory = []
    for n in sorted({max(1, whole.n // 4), max(1, whole.n // 2), whole.n}):
        problem = whole.first(n)
        params, gradient = init_params(config, problem), METHODS[method](config, problem)
        forget_peak()
        base = resident_mib()
        _, grads = gradient(params)
        memory.append((n, resident_mib("VmHWM") - base))
    torch.save(flat(grads), path)
    return memory


def measure_seconds(config: Config) -> dict[str, float]:
    """A child's work: every method's better time of two; the first of them also warms up."""
    problem = make_problem(config)
    params, seconds = init_params(config, problem), {}
    for method, make in METHODS.items():
        gradient, times = make(config, problem), []
        for _ in range(2):
            start = time.perf_counter()
            gradient(params)
            times.append(time.perf_counter() - start)
        seconds[method] = min(times)
    return seconds


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    sizes = Config.from_json(sys.argv[1])
    print(json.dumps(measure_memory(sizes, *sys.argv[2:]) if sys.argv[2:] else measure_seconds(sizes)))
