"""Runs every workload and writes a table: `python -m benchmarks [--quick] [workload ...]`."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from rich.progress import track

WORKLOADS = ["feature_stack", "mil", "contrastive", "carry", "tiny", "hvp", "per_iteration"]
RESULTS = Path(__file__).parent / "results"
# For memory, malloc gives freed blocks of this size back at once, so that the peak is that of the program and repeats.
# For time, it keeps them: else page faults come and go with the order of allocations, and are a third of the noise.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
Row = tuple[str, int]
mpl.use("Agg")  # no window


def jax_child(script: Path, method: str, n: int) -> dict[str, float] | None:
    """The same by an interpreter that has JAX; None where there is none."""
    python = os.environ.get("BENCH_JAX_PYTHON")
    if python is None:
        return None
    done = subprocess.run([python, str(script), method, str(n)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def child(workload: str, method: str, n: int) -> dict[str, float]:
    """Memory and time by two processes, each with the malloc that makes its figure repeat."""
    command = [sys.executable, "-m", "benchmarks.measure", workload, method, str(n)]
    found: dict[str, float] = {}
    for more, env in ((["--repeats", "0"], GIVE_BACK), ([], KEEP)):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True, env={**os.environ, **env})
        found |= json.loads(done.stdout)
    return found


def measure(workload: str, sizes: list[int], rounds: int) -> dict[Row, dict[str, float]]:
    """Medians over rounds; the methods take turns, so that a slow minute hits all of them."""
    module = importlib.import_module(f"benchmarks.{workload}")
    in_jax: dict[str, str] = getattr(module, "JAX_METHODS", {})
    script = Path(__file__).with_name(f"{workload}_jax.py")
    rows = [(method, n) for n in sizes for method in [*module.METHODS, *in_jax]]
    runs: dict[Row, list[dict[str, float]]] = {row: [] for row in rows}
    for method, n in track(rows * rounds, description=workload):
        found = jax_child(script, in_jax[method], n) if method in in_jax else child(workload, method, n)
        runs[method, n] += [] if found is None else [found]
    return {
        row: {k: statistics.median(r[k] for r in found) for k in found[0]} if found else {}
        for row, found in runs.items()
    }


def table(workload: str, medians: dict[Row, dict[str, float]], rounds: int) -> str:
    doc = importlib.import_module(f"benchmarks.{workload}").__doc__ or workload
    lines = [f"# {doc.splitlines()[0]}", "", *doc.splitlines()[2:], ""]
    lines += [
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, 2 threads, "
        f"{platform.machine()}; median of {rounds} processes each. Memory is the peak above inputs and model.",
        "",
        "| n | method | seconds | ms an iteration | of 2F + B | MiB |",
        "| --: | --- | --: | --: | --: | --: |",
    ]
    for (method, n), found in medians.items():
        floor = medians["F", n]["seconds"] + medians["F + B", n]["seconds"]
        if not found:
            lines.append(f"| {n} | {method} | missing | | | |")
            continue
        seconds = found["seconds"]
        cells = (
            n,
            method,
            f"{seconds:.2f}",
            f"{1000 * seconds / n:.2f}",
            f"{seconds / floor:.2f}",
            f"{found['mib']:.0f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def plot(workload: str, medians: dict[Row, dict[str, float]], path: Path) -> None:
    """Time and memory against n, on log axes; methods that are missing leave no line."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for method in dict.fromkeys(method for method, _ in medians):
        points = [(n, found) for (name, n), found in medians.items() if name == method and found]
        for axis, key in zip(axes, ("seconds", "mib"), strict=True):
            if points and not (key == "mib" and method in ("F", "F + B")):
                axis.plot([n for n, _ in points], [max(f[key], 0.1) for _, f in points], marker="o", label=method)
    for axis, label in zip(axes, ("seconds", "MiB above inputs"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="iterations n", ylabel=label)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=7)
    figure.suptitle(workload)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, nothing written")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = 1 if args.quick else args.rounds
    for workload in args.workloads:
        module = importlib.import_module(f"benchmarks.{workload}")
        medians = measure(workload, module.QUICK_SIZES if args.quick else module.SIZES, rounds)
        text = table(workload, medians, rounds)
        print(text)
        if not args.quick:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{workload}.md").write_text(text)
            plot(workload, medians, RESULTS / f"{workload}.png")


if __name__ == "__main__":
    main()
