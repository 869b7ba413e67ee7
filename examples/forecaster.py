"""A GRU that forecasts the temperature in Seattle, an hour after the other, trained through thousands of steps at once.

    python examples/forecaster.py [--quick]

The series is `seattle-temps` of the package vega_datasets: 8,759 hourly temperatures of 2010. A `plg.scan` carries the
hidden state through it; with `checkpoints="sqrt"` its backward keeps 2 sqrt(n) states, so that the gradient need not be
cut into windows for want of memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from vega_datasets import data

import pure_loopgrad as plg
from pure_loopgrad.testing import compare

mpl.use("Agg")
import matplotlib.pyplot as plt

HIDDEN, DAY = 24, 24


class Forecaster(nn.Module):
    """From the temperature now, the time of day, and a state to the change until the next hour."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, x = given
        h = self.cell(x, h)
        return h, x[:1] + self.out(h)


def inputs(temperatures: Tensor) -> Tensor:
    """(n, 3): the temperature, and the hour as a point on a circle."""
    hour = torch.arange(len(temperatures)) * (2 * torch.pi / DAY)
    return torch.stack([temperatures, hour.sin(), hour.cos()], 1)


def main(quick: bool, picture: Path) -> None:
    torch.manual_seed(0)
    series = torch.tensor(data.seattle_temps()["temp"].to_numpy(), dtype=torch.float32)
    scaled = (series - series.mean()) / series.std()
    n, steps = (200, 2) if quick else (24 * 60, 25)
    xs, targets = inputs(scaled[:-1]), scaled[1:]
    net = Forecaster()
    step, params = plg.from_module(net)

    def body(p: dict[str, Tensor], h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return step(p, (h, x))

    def loss(start: int, n: int, checkpoints: str = "sqrt") -> Tensor:
        part = slice(start, start + n)
        _, ys = plg.scan(body, params, torch.zeros(HIDDEN), xs[part], checkpoints=checkpoints)
        return (ys[:, 0] - targets[part]).square().mean()

    def plain(start: int, n: int) -> Tensor:
        h, total = torch.zeros(HIDDEN), torch.zeros(())
        for x, target in zip(xs[start : start + n], targets[start : start + n], strict=True):
            h, y = net((h, x))
            total = total + (y[0] - target) ** 2
        return total / n

    live = list(net.parameters())
    found = compare(
        lambda: torch.autograd.grad(loss(0, n), live),
        lambda: torch.autograd.grad(plain(0, n), live),
    )
    print(f"{n} hours: {found}")

    optimiser = torch.optim.Adam(live, 1e-2)
    for i in range(steps):
        optimiser.zero_grad()
        value = loss(n * i % (6000 - n), n)
        value.backward()
        optimiser.step()
        if i % 5 == 4:
            print(f"step {i + 1}: error of an hour's forecast {value.item() ** 0.5 * series.std():.2f} F")
    with torch.no_grad():
        _, ys = plg.scan(body, params, torch.zeros(HIDDEN), xs[6000:])
    error = (ys[:, 0] - targets[6000:]).square().mean().sqrt() * series.std()
    naive = (xs[6000:, 0] - targets[6000:]).square().mean().sqrt() * series.std()
    print(f"from September on: {error:.2f} F, against {naive:.2f} F of 'as it is now'")
    week = slice(6000, 6000 + 7 * DAY)
    draw(picture, series[1:][week], ys[: 7 * DAY, 0] * series.std() + series.mean())


def draw(picture: Path, truth: Tensor, forecast: Tensor) -> None:
    figure, axis = plt.subplots(figsize=(9, 3.4), layout="constrained")
    axis.plot(truth, label="measured")
    axis.plot(forecast, "--", label="forecast an hour before")
    axis.set(xlabel="hour", ylabel="temperature (F)", title="a week that was not trained on")
    axis.legend()
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
