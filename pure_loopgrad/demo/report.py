"""Tables and pictures of what the main job found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from rich.table import Table
from scipy.signal import hilbert  # type: ignore[import-untyped]  # scipy has no types of its own
from torch import Tensor

from pure_loopgrad.demo.job import Comparison, Result

mpl.use("Agg")  # no screen is needed


def table(rows: list[Comparison], n: int) -> Table:
    """The comparison, a method a row.

    Memory is the peak above the baseline, the error that of the whole gradient, and the angle that by which the
    gradient of the feature extractor is off.
    """
    result = Table(title=f"One training step, {n} iterations, every method in a process of its own")
    result.add_column("method", no_wrap=True)
    for name in ("peak memory\n(MiB)", "seconds\na step", "relative\nerror", "features'\nangle"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        result.add_row(row.method, f"{row.mib:,.0f}", f"{row.seconds:.2f}", f"{row.error:.1e}", f"{row.angle:.1f} deg")
    return result


def write_pictures(result: Result, folder: Path) -> list[Path]:
    """Writes all PNGs and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"reconstruction.png": _reconstruction, "memory.png": _memory, "convergence.png": _convergence}
    paths = []
    for name, draw in pictures.items():
        figure = draw(result)
        paths.append(folder / name)
        figure.savefig(paths[-1], dpi=110, bbox_inches="tight")
        plt.close(figure)
    return paths


def _reconstruction(result: Result) -> Figure:
    images = {
        "before training": result.trained.before[0],
        f"after {len(result.trained.losses)} steps": result.trained.after[0],
        "target": result.target[0],
    }
    draw = _in_decibels if result.is_recording else _in_units
    shown, style, unit = draw(list(images.values()))
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.4), layout="constrained", sharey=True)
    for axis, title, image in zip(axes, images, shown, strict=True):
        drawn = axis.imshow(image, extent=result.extent, **style)
        axis.set(title=title, xlabel="x (mm)")
    axes[0].set_ylabel("z (mm)" if result.is_recording else "y (mm)")
    figure.colorbar(drawn, ax=axes, label=unit, shrink=0.85)
    figure.suptitle(result.title)
    return figure


def _in_units(images: list[Tensor]) -> tuple[list[Tensor], dict[str, Any], str]:
    """As they are, on the scale of the target, which comes last."""
    return images, {"cmap": "gray", "vmin": 0, "vmax": images[-1].max()}, "initial pressure (target's maximum 1)"


def _in_decibels(images: list[Tensor]) -> tuple[list[Tensor], dict[str, Any], str]:
    """A recording's image oscillates in depth: its envelope about the median, against the target's maximum."""
    envelopes = [torch.from_numpy(np.abs(hilbert(image - image.median(), axis=0))) for image in images]
    decibels = [20 * (e / envelopes[-1].max()).clamp(min=1e-6).log10() for e in envelopes]
    return decibels, {"cmap": "inferno", "vmin": -40, "vmax": 0}, "envelope (dB of the target's maximum)"


STYLES: dict[str, dict[str, Any]] = {  # the last two may lie on each other: the wide one is seen below the dashes
    "full graph": {"marker": "o"},
    "frozen but one": {"marker": "v"},
    "torch.utils.checkpoint": {"marker": "s", "ms": 9, "lw": 5, "alpha": 0.5},
    "pure_loopgrad": {"marker": "o", "ms": 4, "color": "black", "ls": "--"},
}


def _memory(result: Result) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for method, points in result.memory.items():
        axis.plot([n for n, _ in points], [mib for _, mib in points], label=method, **STYLES[method])
    ticks = [n for n, _ in next(iter(result.memory.values()))]
    axis.plot(ticks, [n * result.target.nbytes / 2**20 for n in ticks], ":", color="gray", label="the stack itself")
    axis.set(xscale="log", yscale="log", xlabel="iterations n", ylabel="peak memory above baseline (MiB)")
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(alpha=0.3, which="both")
    axis.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    axis.set_title("Memory of one training step against the length of the loop")
    return figure


def _convergence(result: Result) -> Figure:
    panels = 1 if result.focus is None else 2
    figure, axes = plt.subplots(1, panels, figsize=(5.5 * panels, 4), layout="constrained", squeeze=False)
    losses = result.trained.losses
    axes[0, 0].plot(range(1, len(losses) + 1), losses, marker="o")
    axes[0, 0].set(xlabel="step", ylabel="loss", title="Training through all elements")
    axes[0, 0].grid(alpha=0.3)
    if result.focus is not None:
        axis = axes[0, 1]
        axis.plot(range(len(result.focus.speeds)), result.focus.speeds, marker="o")
        axis.axhline(result.speed, ls="--", color="gray", label=f"named by the recording: {result.speed:.0f} m/s")
        axis.set(xlabel="step", ylabel="speed of sound (m/s)", title="Sharpest image over the speed of sound")
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


def summary(result: Result) -> str:
    """What the pictures show, in words."""
    losses = result.trained.losses
    lines = [f"{result.title}", f"loss {losses[0]:.4g} before the first step, {losses[-1]:.4g} before the last"]
    if result.focus is not None:
        found = result.focus.found
        off = 100 * abs(found - result.speed) / result.speed
        lines.append(
            f"speed of sound: from {result.focus.speeds[0]:.0f} to {found:.0f} m/s "
            f"({off:.1f} % from the {result.speed:.0f} m/s that the recording names)"
        )
    ours = next(row for row in result.rows if row.method == "pure_loopgrad")
    full = next(row for row in result.rows if row.method == "full graph")
    lines.append(f"memory: {full.mib:,.0f} MiB by the full graph, {ours.mib:,.0f} MiB by pure_loopgrad")
    return "\n".join(lines)
