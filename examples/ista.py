"""Reconstruction by unrolled ISTA: the steps and thresholds of an iterative solver are learned through 60 iterations.

    python examples/ista.py [--quick]

A sparse signal is seen through a random matrix with fewer rows than columns, and noise. ISTA alternates a gradient step
and a soft threshold; learning both, an iteration each, makes few iterations do the work of many (Gregor and LeCun,
ICML 2010). The iterations are a `plg.scan`: the iterate is the carry, the learned numbers of each are its xs, and the
backward keeps 2 sqrt(n) iterates instead of all intermediates.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

import pure_loopgrad as plg
from pure_loopgrad.testing import compare

mpl.use("Agg")
import matplotlib.pyplot as plt

ROWS, COLUMNS, NONZERO, BATCH = 100, 200, 12, 64
Learned = dict[str, Tensor]  # "step" and "threshold", one number an iteration each, as logarithms


def soft(x: Tensor, t: Tensor) -> Tensor:
    return x.sign() * torch.relu(x.abs() - t)


def iteration(seen: tuple[Tensor, Tensor], x: Tensor, learned: Learned) -> tuple[Tensor, None]:
    """One step of ISTA for a batch of signals x (batch, columns)."""
    A, y = seen
    step = learned["step"].exp()
    return soft(x - step * (x @ A.T - y) @ A, step * learned["threshold"].exp()), None


def unrolled(learned: Learned, A: Tensor, y: Tensor) -> Tensor:
    return plg.scan(iteration, (A, y), y.new_zeros(len(y), COLUMNS), learned)[0]


def plain(learned: Learned, A: Tensor, y: Tensor) -> Tensor:
    x = y.new_zeros(len(y), COLUMNS)
    for step, threshold in zip(learned["step"], learned["threshold"], strict=True):
        x, _ = iteration((A, y), x, {"step": step, "threshold": threshold})
    return x


def signals(A: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sparse signals, and what is seen of them."""
    where = torch.rand(BATCH, COLUMNS, generator=generator).argsort(1)[:, :NONZERO]
    x = torch.zeros(BATCH, COLUMNS).scatter(1, where, torch.randn(BATCH, NONZERO, generator=generator))
    return x, x @ A.T + 0.01 * torch.randn(BATCH, ROWS, generator=generator)


def error_db(found: Tensor, x: Tensor) -> Tensor:
    """The error relative to the signal, in decibels."""
    return 10 * ((found - x).square().sum() / x.square().sum()).log10()


def main(quick: bool, picture: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    n, steps = (12, 5) if quick else (60, 150)
    A = torch.randn(ROWS, COLUMNS, generator=generator) / math.sqrt(ROWS)
    classical = 1 / torch.linalg.matrix_norm(A, 2).square()  # the largest step for which ISTA is known to converge
    learned = {
        "step": torch.full((n,), math.log(classical)).requires_grad_(),
        "threshold": torch.full((n,), math.log(0.05)).requires_grad_(),
    }
    x, y = signals(A, generator)
    untrained = error_db(unrolled(learned, A, y), x)

    def gradient(solver: object) -> tuple[Tensor, ...]:
        return torch.autograd.grad((solver(learned, A, y) - x).square().sum(), list(learned.values()))

    print(f"{n} iterations: {compare(lambda: gradient(unrolled), lambda: gradient(plain))}")

    optimiser = torch.optim.Adam(learned.values(), 0.03)
    errors = []
    for _ in range(steps):
        batch, seen = signals(A, generator)
        optimiser.zero_grad()
        loss = (unrolled(learned, A, seen) - batch).square().sum() / batch.square().sum()
        loss.backward()
        optimiser.step()
        errors.append(10 * math.log10(loss.item()))
    trained = error_db(unrolled(learned, A, y), x)
    print(f"error after {n} iterations: {untrained:.1f} dB with the classical step, {trained:.1f} dB learned")
    draw(picture, errors, learned, unrolled(learned, A, y).detach()[0], x[0])


def draw(picture: Path, errors: list[float], learned: Learned, found: Tensor, x: Tensor) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    axes[0].plot(errors)
    axes[0].set(xlabel="training step", ylabel="error (dB)")
    for name, values in learned.items():
        axes[1].semilogy(values.detach().exp(), label=name)
    axes[1].set(xlabel="iteration of ISTA", title="what was learned")
    axes[1].legend()
    axes[2].plot(x, "o", mfc="none", label="signal")
    axes[2].plot(found, "x", ms=4, label="found")
    axes[2].legend()
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
