"""One method of one workload at one size, in this process: prints what was measured as JSON."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.resources import median_seconds, resident_mib

REFERENCE_FOLDER = "BENCH_REFERENCES"


def peak_mib(run: Callable[[], object]) -> float:
    """Of one run above what is held before it, the pages that earlier runs have freed given back."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    base = resident_mib()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("method")
    parser.add_argument("n", type=int)
    parser.add_argument("what", choices=["time", "memory", "both"])
    args = parser.parse_args()
    torch.set_flush_denormal(True)  # before there are threads; see carry.py
    torch.set_num_threads(2)
    torch.manual_seed(0)
    try:
        workload = importlib.import_module(f"benchmarks.{args.workload}")
        run = workload.METHODS[args.method](args.n)
        result = run()  # kernels and modules of torch load at their first use, and what is compiled is compiled
    except ModuleNotFoundError as error:
        print(json.dumps({"missing": str(error)}))
        return
    found: dict[str, float] = {}
    if args.what != "memory":
        found["seconds"] = median_seconds(run, 3)
    if args.what != "time":
        exact = None if result is None else reference(workload, args.method, args.n)
        if exact is not None:
            found["error"] = relative_error(tree_leaves(result), exact)
        del result, exact
        found["mib"] = peak_mib(run)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
