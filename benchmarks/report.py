"""What was measured, as a Markdown table and as a plot."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

Row = tuple[str, int]  # method and n
Medians = dict[Row, dict[str, float]]
FLOORS = ("F", "F + B")
mpl.use("Agg")  # no window


def machine() -> str:
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{datetime.date.today()}, {versions}, 2 threads, {platform.machine()}"


def table(text: str, medians: Medians, rounds: int) -> str:
    first, *rest = text.splitlines()
    lines = [f"# {first}", *rest, ""]
    lines += [
        f"{machine()}. Each method ran in a process of its own; time at the largest n is the median of "
        f"{rounds} of them, each the median of up to three runs. Memory is the peak above what is held before. The "
        "error is that of the gradient, relative to the full graph in float64.",
        "",
        "| n | method | seconds | ms an iteration | of 2F + B | MiB | error |",
        "| --: | --- | --: | --: | --: | --: | --: |",
    ]
    lines += [f"| {' | '.join(cells(method, n, found, medians))} |" for (method, n), found in medians.items()]
    compiled = [f"{m}, n = {n}: {f['compile']:.1f} s" for (m, n), f in medians.items() if "compile" in f]
    lines += ["", "Compiled beforehand: " + "; ".join(compiled) + "."] if compiled else []
    return "\n".join(lines) + "\n"


def cells(method: str, n: int, found: dict[str, float], medians: Medians) -> list[str]:
    if not found:
        return [str(n), method, "missing", "", "", "", ""]
    seconds = found["seconds"]
    floor = sum(medians[name, n]["seconds"] for name in FLOORS) if (FLOORS[0], n) in medians else None
    return [
        str(n),
        method,
        f"{seconds:.3g}" if seconds < 0.1 else f"{seconds:.2f}",
        f"{1000 * seconds / n:.3g}",
        "" if floor is None else f"{seconds / floor:.2f}",
        f"{found['mib']:.0f}" if "mib" in found else "",
        f"{found['error']:.1e}" if "error" in found else "",
    ]


def plot(workload: str, medians: Medians, path: Path) -> None:
    """Time and memory against n, on log axes; methods that are missing leave no line."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for i, method in enumerate(dict.fromkeys(method for method, _ in medians)):
        points = [(n, found) for (name, n), found in medians.items() if name == method and found]
        style = {"marker": "os^v"[i // 10 % 4], "linestyle": "-" if "plg" in method else "--", "label": method}
        for axis, key in zip(axes, ("seconds", "mib"), strict=True):
            if points and not (key == "mib" and method in FLOORS):
                axis.plot(
                    [n for n, _ in points], [max(f.get(key, 0), 0.1 if key == "mib" else 0) for _, f in points], **style
                )
    for axis, label in zip(axes, ("seconds", "MiB above what is held before"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="iterations n", ylabel=label)
        axis.grid(alpha=0.3, which="both")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=7, loc="outside right")
    figure.suptitle(workload)
    figure.savefig(path, dpi=100)
    plt.close(figure)
