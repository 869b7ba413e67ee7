"""Two methods at a time, taking turns in one process, so that a slow second hits both.

The tables compare medians of runs that are minutes apart, and on a shared machine differences of a tenth get lost in
that. Here each pair runs alternately at its workload's largest n, and what counts is the ratio of neighbours.
"""

from __future__ import annotations

import importlib
import statistics

from rich.progress import track

from benchmarks.measure import KEEP, settle
from benchmarks.processes import in_process
from benchmarks.report import machine
from benchmarks.resources import seconds_of

ROUNDS = 9
CHUNKS = "torch.utils.checkpoint, chunks"
# workload, peer, ours
PAIRS = [
    ("feature_stack", f"stacked: {CHUNKS} of 16", "stacked: plg.map, chunks of 16"),
    ("feature_stack", f"stacked: {CHUNKS} of 16", "stacked: plg.map, chunks of 16, some saved"),
    ("feature_stack", "stacked: gradient cache, chunks of 16", "stacked: plg.map, chunks of 16"),
    ("mil", CHUNKS, "plg.value_and_grad, batched chunks"),
    ("mil", "gradient cache, chunks", "plg.value_and_grad, batched chunks"),
    ("contrastive", CHUNKS, "plg.value_and_grad, batched chunks"),
    ("contrastive", "gradient cache, chunks", "plg.value_and_grad, batched chunks"),
    ("contrastive", "gradient cache, chunks of 256", "plg.value_and_grad, batched chunks of 256"),
    ("contrastive", "gradient cache, chunks of 256", "plg.value_and_grad, batched chunks of 256, some saved"),
    ("contrastive", "gradient cache, chunks of 256", "plg.value_and_grad, chunk_size auto"),
    ("tiny", "hand-written with torch.func", "plg.value_and_grad"),
    ("hvp", "forward over reverse: plain loop", "forward over reverse: plg.mean"),
    ("hvp", "forward over reverse: plain loop", "forward over reverse: plg.mean, chunks of 4"),
    ("hvp", "reverse over reverse: plain loop", "reverse over reverse: plg.mean"),
    ("hvp", "reverse over reverse: plain loop", "reverse over reverse: plg.mean, chunks of 4"),
]


def alternate(workload_name: str, peer: str, ours: str) -> list[float]:
    """The time of ours over that of the peer, of runs next to each other; which comes first changes."""
    settle(KEEP)
    workload = importlib.import_module(f"benchmarks.{workload_name}")
    runs = [workload.METHODS[method](workload.SIZES[-1]) for method in (peer, ours)]
    for run in runs:
        run()
    ratios = []
    for i in range(ROUNDS):
        taken = {j: seconds_of(runs[j]) for j in ((0, 1) if i % 2 else (1, 0))}
        ratios.append(taken[1] / taken[0])
    return ratios


def table_of_pairs() -> str:
    lines = [
        *("# Pairs, taking turns", ""),
        f"{machine()}. The time of ours over the peer's: median and quartiles of {ROUNDS} runs next to each other.",
        *("", "| workload | peer | ours | median | quartiles |", "| --- | --- | --- | --: | --: |"),
    ]
    for workload, peer, ours in track(PAIRS, description="pairs"):
        low, middle, high = statistics.quantiles(in_process(alternate, workload, peer, ours), n=4)
        lines.append(f"| {workload} | {peer} | {ours} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines) + "\n"
