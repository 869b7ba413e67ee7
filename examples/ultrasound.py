"""Autofocus: the speed of sound that makes an ultrasound image sharpest, by a gradient through all transmit events.

    python examples/ultrasound.py [FILE.mat] [--quick]

FILE is a full-matrix capture in MATLAB's format, such as the notch in aluminium of the arim project (MIT licence,
https://github.com/ndtatbristol/arim); without one, point scatterers are simulated. Every event makes an image of its
own by delay and sum; their sum is the image. A plain loop keeps what every event interpolated.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

import pure_loopgrad as plg
from pure_loopgrad.demo.problem import array_for
from pure_loopgrad.demo.recording import Recording, read_recording
from pure_loopgrad.testing import compare

mpl.use("Agg")
import matplotlib.pyplot as plt

TRUE_SPEED, START = 6300.0, 6000.0  # m/s


def simulated(n: int = 32) -> Recording:
    """Pulses of 5 MHz from three points below a linear array."""
    elements = (torch.arange(n) - (n - 1) / 2) * 0.6e-3
    points = torch.tensor([[-4e-3, 18e-3], [0.0, 24e-3], [5e-3, 30e-3]])
    way = torch.hypot(elements[:, None] - points[:, 0], points[:, 1]) / TRUE_SPEED  # (n, points)
    time = torch.arange(700) * 2e-8
    delay = time - (way[:, None] + way[None, :])[..., None]  # (n, n, points, T)
    envelope = torch.exp(-((delay / 1.5e-7) ** 2))
    phase = 2 * torch.pi * 5e6 * delay
    traces = torch.stack([envelope * phase.cos(), envelope * phase.sin()], 1).sum(3)
    return Recording(traces, elements, 2e-8, TRUE_SPEED)


def log_sharpness(_: Tensor, image: Tensor) -> Tensor:
    """Of a complex image (2, pixels): the log of the mean of squared intensity (Muller and Buffington, 1974)."""
    return image.square().sum(0).square().mean().log()


def main(file: str | None, quick: bool, picture: Path) -> None:
    recording = simulated() if file is None else read_recording(file)
    size, steps = (24, 3) if quick else (56, 12)
    array = array_for(recording, size)
    xs = (recording.traces / recording.traces.std(), recording.elements)

    def event(c: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        traces, transmitter = x
        return array.image(traces, transmitter, c)

    gradient = plg.value_and_grad(event, log_sharpness, reduce="sum")

    few = (xs[0][:8], xs[1][:8])
    live = torch.tensor(START, requires_grad=True)
    found = compare(
        lambda: gradient(torch.tensor(START), few)[1],
        lambda: torch.autograd.grad(
            log_sharpness(live, torch.stack([event(live, x) for x in zip(*few, strict=True)]).sum(0)), live
        )[0],
    )
    print(f"8 of {len(xs[1])} events: {found}")

    speed = torch.tensor(START, requires_grad=True)
    optimiser = torch.optim.Adam([speed], lr=60.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.85)
    path = []
    for _ in range(steps):
        value, slope = gradient(speed, xs)
        path.append((speed.item(), value.item()))
        print(f"speed of sound {path[-1][0]:7.1f} m/s, log sharpness {path[-1][1]:.3f}")
        speed.grad = -slope  # uphill
        optimiser.step()
        decay.step()

    before, after = (plg.sum(event, torch.tensor(c), xs) for c in (START, speed.item()))
    draw(picture, size, before, after, path)


def draw(picture: Path, size: int, before: Tensor, after: Tensor, path: list[tuple[float, float]]) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    for axis, image, c in zip(axes, (before, after), (path[0][0], path[-1][0]), strict=False):
        envelope = image.square().sum(0).sqrt().reshape(size, size)
        axis.imshow(20 * (envelope / after.square().sum(0).sqrt().max()).log10(), vmin=-30, vmax=0, cmap="inferno")
        axis.set(title=f"{c:.0f} m/s (dB)", xlabel="across (pixels)", ylabel="travel time (pixels)")
    axes[2].plot(*zip(*path, strict=True), "o-")
    axes[2].set(xlabel="speed of sound (m/s)", ylabel="log sharpness", title="the path of the gradient")
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    given = [a for a in sys.argv[1:] if a != "--quick"]
    main(given[0] if given else None, quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
