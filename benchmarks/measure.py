"""One method of one workload at one size, measured in this process, which does nothing else."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.resources import median_seconds, peak_starts, resident_mib

REFERENCE_FOLDER = "BENCH_REFERENCES"
# For memory, malloc gives freed blocks of this size back at once, so that the peak is that of the program and repeats.
# For time, it keeps them: else page faults come and go with the order of allocations, and are a third of the noise.
GIVE_BACK, KEEP = 2**16, 2**30


def peak_mib(run: Callable[[], object]) -> float:
    """Of one run above what is held before it, the pages that earlier runs have freed given back."""
    base = peak_starts()
    run()
    return resident_mib("VmHWM") - base


def relative_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Of a whole gradient, in the 2-norm."""
    pairs = list(zip(found, exact, strict=True))
    wrong = sum((a.double() - b).square().sum() for a, b in pairs)
    return float((wrong / sum(b.square().sum() for _, b in pairs)) ** 0.5)


def reference(workload: Any, method: str, n: int) -> list[Tensor] | None:
    """The gradient of the full graph in float64, where the workload has one for the method.

    It is computed once for all methods that share it, in the folder that the runner names.
    """
    known = getattr(workload, "REFERENCES", {})
    prefix = next((prefix for prefix in known if method.startswith(prefix)), None)
    if prefix is None:
        return None
    path = Path(os.environ.get(REFERENCE_FOLDER, "/nowhere"), f"{workload.__name__}-{prefix}-{n}.pt")
    if path.exists():
        found: list[Tensor] = torch.load(path)
        return found
    exact = tree_leaves(known[prefix](n)())
    if path.parent.exists():
        own = path.with_suffix(f".{os.getpid()}")
        torch.save(exact, own)
        own.replace(path)  # at once, as another process may look for it
    return exact


def prepare_references(workload_name: str, n: int) -> None:
    """Computes them before the processes that need them, which would each do so, and without giving back."""
    settle(KEEP)
    workload = importlib.import_module(f"benchmarks.{workload_name}")
    for prefix in getattr(workload, "REFERENCES", {}):
        reference(workload, prefix, n)


def measure(workload_name: str, method: str, n: int, what: str) -> dict[str, float]:
    """Time, memory or both; nothing where a package is missing."""
    settle(GIVE_BACK if what == "memory" else KEEP)
    workload = importlib.import_module(f"benchmarks.{workload_name}")
    try:
        run = workload.METHODS[method](n)
        result = run()  # kernels and modules of torch load at their first use, and what is compiled is compiled
    except ModuleNotFoundError:
        return {}
    found: dict[str, float] = {}
    if what != "memory":
        found["seconds"] = median_seconds(run, 3)
    if what != "time":
        exact = None if result is None else reference(workload, method, n)
        if exact is not None:
            found["error"] = relative_error(tree_leaves(result), exact)
        del result, exact
        found["mib"] = peak_mib(run)
    return found


def settle(threshold: int) -> None:
    """The settings of a process that measures; malloc gives freed blocks back at once from a number of bytes on."""
    libc = ctypes.CDLL("libc.so.6")
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    if not (libc.mallopt(M_TRIM_THRESHOLD, threshold) and libc.mallopt(M_MMAP_THRESHOLD, threshold)):
        raise RuntimeError(f"malloc does not take a threshold of {threshold} bytes")
    torch.set_flush_denormal(True)  # before there are threads; see carry.py
    torch.set_num_threads(2)
    torch.manual_seed(0)
