"""One method's gradient in a process of its own: peak memory above the baseline, seconds, the gradient itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pure_loopgrad.demo.config import Config
from pure_loopgrad.demo.methods import METHODS, flat
from pure_loopgrad.demo.model import init_params
from pure_loopgrad.demo.problem import make_problem

# malloc hands freed blocks of this size back at once, so that a peak is the program's own and repeats
FIXED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
THREADS = 2


@dataclass(frozen=True)
class Measured:
    """What a child process found.

    Attributes:
        memory: (n, MiB) pairs, n rising; the last is the whole loop.
        seconds: of one step through the whole loop.
        gradient: of the whole loop, as one vector.
    """

    memory: list[tuple[int, float]]
    seconds: float
    gradient: Tensor


def in_child(config: Config, method: str) -> Measured:
    """Measures a method in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradient.pt"
        command = [sys.executable, "-m", __name__, config.to_json(), method, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **FIXED_MALLOC}, check=False)
        if done.returncode:
            raise RuntimeError(f"measuring {method!r} failed:\n{done.stderr}")
        found = json.loads(done.stdout)
        return Measured([(n, mib) for n, mib in found["memory"]], found["seconds"], torch.load(path))


def resident_mib(field: str = "VmRSS") -> float:
    """Memory that this process holds now, from proc(5); with `VmHWM` the most since `forget_peak`.

    Not getrusage: its peak starts from that of the process which started this one.
    """
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 2**10


def forget_peak() -> None:
    """Lets the kernel count this process's peak from now on (Linux: proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def child(config: Config, method: str, path: str) -> None:
    """The child's work: memory at a quarter, a half and the whole of the loop, then time."""
    torch.set_num_threads(THREADS)
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
    start = time.perf_counter()
    gradient(params)
    print(json.dumps({"memory": memory, "seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    child(Config.from_json(sys.argv[1]), sys.argv[2], sys.argv[3])
