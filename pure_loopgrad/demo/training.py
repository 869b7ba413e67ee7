"""A few training steps with our gradient, and the search for the speed of sound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import pure_loopgrad as plg
from pure_loopgrad.demo.config import Config
from pure_loopgrad.demo.methods import Gradient, leaves_of, ours
from pure_loopgrad.demo.model import Params, body, init_params, reconstruct
from pure_loopgrad.demo.problem import Problem, array_for
from pure_loopgrad.demo.recording import Recording

Report = Callable[[str, float], None]
LEARNING_RATE = 4e-3
CLOSE = 0.5  # m/s, when the search for the speed of sound ends


@dataclass(frozen=True)
class Trained:
    """Losses of every step, reconstructions before and after."""

    losses: list[float]
    before: Tensor
    after: Tensor


def train(config: Config, problem: Problem, report: Report, gradient: Gradient | None = None) -> Trained:
    """Adam on the weights; the speed of sound keeps its value, though its gradient is there for the taking."""
    params, gradient = init_params(config, problem), gradient or ours(config, problem)
    optimiser = torch.optim.Adam(_weights(params), lr=LEARNING_RATE)
    before = predict(problem, params)
    losses = []
    for _ in range(config.steps):
        value, grads = gradient(params)
        for p, g in zip(_weights(params), _weights(grads), strict=True):
            p.grad = g
        optimiser.step()
        losses.append(value.item())
        report("training", value.item())
    return Trained(losses, before, predict(problem, params))


def _weights(tree: Params) -> list[Tensor]:
    return leaves_of({name: t for name, t in tree.items() if name != "speed"})[0]


def predict(problem: Problem, params: Params) -> Tensor:
    """The reconstruction, without a gradient."""
    with torch.no_grad():
        return reconstruct(params, plg.map(body(problem), params, problem.xs))


@dataclass(frozen=True)
class Focus:
    """The search's path: speeds in m/s, log sharpness."""

    speeds: list[float]
    sharpness: list[float]

    @property
    def found(self) -> float:
        """The speed of the sharpest image."""
        return max(zip(self.sharpness, self.speeds, strict=True))[1]


def log_sharpness(image: Tensor) -> Tensor:
    """The log of the integral of squared intensity (Muller and Buffington, J. Opt. Soc. Am. 64, 1974, S1)."""
    intensity = image.square().sum(0)
    return intensity.square().mean().log()


def autofocus(recording: Recording, start: float, steps: int, size: int, report: Report, decimation: int = 1) -> Focus:
    """Maximises the sharpness of the image summed over all transmit events, over the speed of sound alone.

    The gradient goes through the whole transmit loop in the memory of one event. Steps are those of the secant method
    on the derivative, which needs two gradients to know the curvature; the first is of fixed length. They end where
    they are shorter than `CLOSE`, as there the curvature would be the quotient of two rounding errors.

    The maximum lies somewhat below the true speed: a pulse's energy comes after its start, from which time is counted.
    On the notch in aluminium of the arim project it is 6260 m/s; with the traces 0.08 us earlier it is 6320.
    """
    array = array_for(recording, size)

    def event(c: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        return array.image(x[0], x[1], c)

    f = plg.value_and_grad(event, lambda c, image: log_sharpness(image), reduce="sum", plan="two_pass")
    traces = (recording.traces / recording.traces.std()).double()
    xs = traces[::decimation], recording.elements[::decimation].double()
    focus, step, last = Focus([], []), 0.0, math.nan
    c = start
    for _ in range(steps):
        value, slope = (t.item() for t in f(torch.tensor(c, dtype=torch.float64), xs))
        focus.speeds.append(c)
        focus.sharpness.append(value)
        report("speed of sound", c)
        step, last = _secant(slope, last, step), slope
        if abs(step) < CLOSE:
            break
        c += step
    return focus


def _secant(slope: float, last: float, step: float, first: float = 100.0, most: float = 200.0) -> float:
    """The next step uphill: to where the slope would vanish if it went on falling as it did."""
    curvature = (slope - last) / step if step else math.nan
    if math.isnan(curvature) or curvature >= 0:
        return math.copysign(first, slope)
    return max(-most, min(most, -slope / curvature))


def nothing(_: str, __: float) -> None:
    """A report to nobody."""
