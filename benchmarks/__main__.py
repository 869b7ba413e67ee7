"""Runs every workload and writes a table and a plot: `python -m benchmarks [--quick] [workload ...]`."""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import track

from benchmarks.measure import REFERENCE_FOLDER, measure, prepare_references
from benchmarks.pairs import table_of_pairs
from benchmarks.processes import Found, in_jax, in_process
from benchmarks.report import Medians, Row, plot, table
from benchmarks.resources import LONG

WORKLOADS = ["feature_stack", "mil", "contrastive", "carry", "tiny", "hvp", "per_iteration", "half", "pairs"]
QUICK_WORKLOADS = ["feature_stack", "mil", "contrastive", "carry", "tiny"]
SLOW_TO_START = ("compiled", "sentence-transformers")
RESULTS = Path(__file__).parent / "results"


def starts_quickly(method: str) -> bool:
    return not any(word in method for word in SLOW_TO_START)


def measure_all(workload: str, quick: bool, rounds: int) -> Medians:
    """Of the rounds at the largest size the lower median; the methods take turns, so that a slow minute hits all."""
    module = importlib.import_module(f"benchmarks.{workload}")
    sizes = module.QUICK_SIZES if quick else module.SIZES
    jax_methods: dict[str, str] = {} if quick else getattr(module, "JAX_METHODS", {})
    methods = [m for m in module.METHODS if not quick or starts_quickly(m)]
    rows: list[Row] = [
        (method, n) for n in sizes for method in [*methods, *jax_methods] if n == sizes[-1] or starts_quickly(method)
    ]
    again = [(method, n) for method, n in rows if n == sizes[-1] and starts_quickly(method)] * (rounds - 1)
    apart = [(method, n) for method, n in rows if not quick and n == sizes[-1] and method not in jax_methods]
    runs: dict[Row, list[Found]] = {row: [] for row in rows}
    for method, n in track(rows + again, description=f"{workload}: time"):
        known = runs[method, n]
        if known and (not known[0] or known[0]["seconds"] > LONG):
            continue
        what = "time" if (method, n) in apart else "both"
        known.append(
            in_jax(module, method, n) if method in jax_methods else in_process(measure, workload, method, n, what)
        )
    add_memory(workload, runs, [row for row in apart if runs[row][0]])
    return {row: medians(found) for row, found in runs.items()}


def add_memory(workload: str, runs: dict[Row, list[Found]], rows: list[Row]) -> None:
    """Memory and error repeat, whatever runs beside them: two at a time."""
    for n in {n for _, n in rows}:
        in_process(prepare_references, workload, n)
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda row: in_process(measure, workload, *row, "memory"), rows)
        for row, more in zip(rows, track(found, description=f"{workload}: memory", total=len(rows)), strict=True):
            runs[row].append(more)


def medians(runs: list[Found]) -> Found:
    keys = ("seconds", "mib", "error", "compile")
    return {k: statistics.median_low(values) for k in keys if (values := [r[k] for r in runs if k in r])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, without what is slow to start")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    with tempfile.TemporaryDirectory() as folder:
        os.environ[REFERENCE_FOLDER] = folder
        run_all(args.workloads or (QUICK_WORKLOADS if args.quick else WORKLOADS), args.quick, rounds)


def run_all(workloads: list[str], quick: bool, rounds: int) -> None:
    RESULTS.mkdir(exist_ok=True)
    for workload in workloads:
        text = table_of_pairs() if workload == "pairs" else tabulated(workload, quick, rounds)
        print(text)
        if not quick:
            (RESULTS / f"{workload}.md").write_text(text)


def tabulated(workload: str, quick: bool, rounds: int) -> str:
    """A workload's table; its plot goes to a file."""
    found = measure_all(workload, quick, rounds)
    if not quick:
        plot(workload, found, RESULTS / f"{workload}.png")
    return table(importlib.import_module(f"benchmarks.{workload}").__doc__ or workload, found, rounds)


if __name__ == "__main__":
    main()
