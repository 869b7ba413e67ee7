"""MAML on sine waves: a starting point from which a few gradient steps fit any sine (Finn, Abbeel and Levine, 2017).

    python examples/maml.py [--quick]

Two loops, one in the other. The inner one is a `plg.scan` whose step is a gradient step, `torch.func.grad` in its body;
the outer one is a `plg.mean` over tasks. The meta-gradient goes through both, second derivatives included, in the
memory of one inner step of sixteen tasks and the kept iterates.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

import pure_loopgrad as plg
from pure_loopgrad.testing import compare

mpl.use("Agg")
import matplotlib.pyplot as plt

Params = dict[str, Tensor]
Task = tuple[Tensor, Tensor, Tensor, Tensor]  # x and y to adapt to, x and y to be judged by
RATE = 0.02


def network(p: Params, x: Tensor) -> Tensor:
    h = torch.tanh(x[:, None] * p["A"] + p["a"])
    h = torch.tanh(h @ p["B"] + p["b"])
    return h @ p["C"]


def error(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return (network(p, x) - y).square().mean()


def inner_step(seen: tuple[Tensor, Tensor], p: Params, _: object) -> tuple[Params, None]:
    grads = torch.func.grad(error)(p, *seen)
    return {k: v - RATE * grads[k] for k, v in p.items()}, None


def adapted_error(start: Params, task: Task, steps: int) -> Tensor:
    """The error after some steps on a task."""
    x, y, x_judged, y_judged = task
    adapted, _ = plg.scan(inner_step, (x, y), start, length=steps)
    return error(adapted, x_judged, y_judged)


def plain_error(start: Params, task: Task, steps: int) -> Tensor:
    x, y, x_judged, y_judged = task
    p = start
    for _ in range(steps):
        p, _ = inner_step((x, y), p, None)
    return error(p, x_judged, y_judged)


def tasks(n: int, generator: torch.Generator) -> Task:
    """N sines of random amplitude and phase, ten points to adapt to and twenty to be judged by."""
    amplitude = 1 + 3 * torch.rand(n, 1, generator=generator)
    phase = torch.pi * torch.rand(n, 1, generator=generator)
    x, judged = (10 * torch.rand(n, k, generator=generator) - 5 for k in (10, 20))
    return x, amplitude * torch.sin(x + phase), judged, amplitude * torch.sin(judged + phase)


def main(quick: bool, picture: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    width, inner, n_tasks, steps = (16, 3, 4, 2) if quick else (40, 10, 16, 80)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[0] ** 0.5

    start = {"A": normal(1, width)[0], "a": normal(1, width)[0], "B": normal(width, width), "b": torch.zeros(width)}
    start["C"] = normal(width)
    live = {k: v.clone().requires_grad_() for k, v in start.items()}

    def meta_loss(batch: Task) -> Tensor:
        return plg.mean(lambda p, task: adapted_error(p, task, inner), live, batch, chunk_size=16)

    def plain_loss(batch: Task) -> Tensor:
        return torch.stack([plain_error(live, task, inner) for task in zip(*batch, strict=True)]).mean()

    batch = tasks(n_tasks, generator)
    found = compare(
        lambda: torch.autograd.grad(meta_loss(batch), list(live.values())),
        lambda: torch.autograd.grad(plain_loss(batch), list(live.values())),
    )
    print(f"{n_tasks} tasks of {inner} inner steps: {found}")

    held_out = tasks(50, torch.Generator().manual_seed(1))
    before = meta_loss(held_out).item()
    optimiser = torch.optim.Adam(live.values(), 5e-3)
    losses = []
    for i in range(steps):
        optimiser.zero_grad()
        loss = meta_loss(tasks(n_tasks, generator))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if i % 20 == 19:
            print(f"step {i + 1}: {sum(losses[-25:]) / 25:.3f}")
    print(f"error after {inner} steps on new tasks: {before:.2f} before, {meta_loss(held_out).item():.2f} after")
    draw(picture, losses, live, [t[0] for t in held_out], inner)


def draw(picture: Path, losses: list[float], start: Params, task: list[Tensor], inner: int) -> None:
    start = {k: v.detach() for k, v in start.items()}
    x, y, judged, truth = task
    line = torch.linspace(-5, 5, 200)
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    axes[0].semilogy(losses)
    axes[0].set(xlabel="meta step", ylabel="error after adapting")
    for steps, style in ((0, ":"), (1, "--"), (inner, "-")):
        adapted, _ = plg.scan(inner_step, (x, y), start, length=steps)
        axes[1].plot(line, network(adapted, line), style, label=f"{steps} steps")
    axes[1].plot(judged, truth, "k.", label="sine")
    axes[1].plot(x, y, "ro", label="seen")
    axes[1].legend(fontsize=8)
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
