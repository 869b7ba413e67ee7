"""Draws the figures of the documentation: `python docs/figures.py`. The bytes are counted, so that it repeats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

import pure_loopgrad as plg
from pure_loopgrad.testing import peak_bytes

mpl.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent / "img"
SIZES = [1, 4, 16, 64, 256]


def body(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """The CNN of the benchmarks, smaller."""
    h = torch.nn.functional.silu(torch.conv2d(x, p["a"], padding=1))
    h = torch.nn.functional.silu(torch.conv2d(h, p["b"], padding=1))
    return torch.conv2d(h, p["c"], padding=1)


def memory() -> None:
    """Peak bytes of a gradient against n: the plain loop, a stack, a mean."""
    shapes = {"a": (8, 1, 3, 3), "b": (8, 8, 3, 3), "c": (1, 8, 3, 3)}
    params = {k: torch.randn(shape).requires_grad_() for k, shape in shapes.items()}
    loops: dict[str, Callable[[Tensor], Tensor]] = {
        "plain loop": lambda xs: torch.stack([body(params, x) for x in xs]),
        "plg.map": lambda xs: plg.map(body, params, xs),
        "plg.mean": lambda xs: plg.mean(body, params, xs),
    }
    figure, axis = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (name, loop), style in zip(loops.items(), ("s--", "o-", "^-"), strict=True):
        peaks = []
        for n in SIZES:
            xs = torch.randn(n, 1, 1, 48, 48)
            peak_bytes(lambda xs=xs, loop=loop: loop(xs).square().mean().backward())  # what is cached at a first use
            peaks.append(peak_bytes(lambda xs=xs, loop=loop: loop(xs).square().mean().backward()) / 2**20)
        axis.plot(SIZES, peaks, style, label=f"{name}: {peaks[-1]:.1f} MiB at n = {SIZES[-1]}")
    axis.set(xscale="log", yscale="log", xlabel="iterations n", ylabel="peak of a gradient (MiB)")
    axis.set_title("a CNN on n images of 48 x 48, bytes counted", fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(FOLDER / "memory.svg", metadata={"Date": None})


def algebra() -> None:
    """A loop in the middle, its three derived loops around it."""
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axis.set(xlim=(0, 10), ylim=(0, 4))
    axis.axis("off")
    middle = "loop(body; consts, xs)\nsums S, stacks Y"
    boxes = {
        (1.7, 2.0, middle): None,
        (7.2, 3.4, "loop(vjp(body); (consts, dS), (xs, dY))\nsums dconsts, stacks dxs"): "vjp",
        (7.2, 2.0, "loop(jvp(body); (consts, tangents), (xs, tangents))\nsums and stacks tangents"): "jvp",
        (7.2, 0.6, "loop(vmap(body); batched consts, batched xs)\nsums and stacks batches"): "vmap",
    }
    style = {"boxstyle": "round,pad=0.5", "fc": "#e8eef7", "ec": "#4464a0"}
    for (x, y, text), name in boxes.items():
        axis.text(x, y, text, ha="center", va="center", fontsize=9, bbox=style)
        if name:
            axis.annotate("", (4.35, y), (3.2, 2.0), arrowprops={"arrowstyle": "->", "color": "#4464a0"})
            axis.text(3.6, 2.15 + (y - 2.0) * (0.62 if y > 2 else 0.2), name, ha="center", fontsize=9, style="italic")
    axis.annotate(
        "", (9.6, 3.75), (9.6, 0.25), arrowprops={"arrowstyle": "<->", "color": "#999999", "connectionstyle": "arc3"}
    )
    axis.text(9.75, 2.0, "... and again", rotation=90, va="center", fontsize=8, color="#666666")
    figure.savefig(FOLDER / "algebra.svg", metadata={"Date": None})


if __name__ == "__main__":
    torch.manual_seed(0)
    plt.rcParams["svg.hashsalt"] = "pure_loopgrad"
    memory()
    algebra()
