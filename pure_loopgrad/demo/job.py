"""The main job: train, compare the four gradients, measure memory against n, find the speed of sound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad.demo.config import Config
from pure_loopgrad.demo.measure import THREADS, Measured, memory_of_each, seconds_of_each
from pure_loopgrad.demo.methods import flat
from pure_loopgrad.demo.model import init_params
from pure_loopgrad.demo.problem import make_problem
from pure_loopgrad.demo.recording import read_recording
from pure_loopgrad.demo.training import Focus, Report, Trained, autofocus, train

START_SPEED = 5900.0  # m/s, where the search for the speed of sound begins


@dataclass(frozen=True)
class Comparison:
    """One method's row: memory, time, and its gradient against the full graph's."""

    method: str
    mib: float
    seconds: float
    error: float
    angle: float


@dataclass(frozen=True)
class Result:
    """All that the job found."""

    title: str
    extent: tuple[float, float, float, float]
    n: int
    speed: float
    is_recording: bool
    target: Tensor
    trained: Trained
    rows: list[Comparison]
    memory: dict[str, list[tuple[int, float]]]
    focus: Focus | None

    def numbers(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "title": self.title,
            "iterations": self.n,
            "losses": self.trained.losses,
            "methods": [asdict(row) for row in self.rows],
            "memory": self.memory,
            "speed_of_sound": self.focus and asdict(self.focus) | {"found": self.focus.found, "named": self.speed},
        }


def run(config: Config, report: Report) -> Result:
    """Runs everything; `report(what, value)` is called with each step."""
    torch.set_num_threads(THREADS)
    problem = make_problem(config)
    focus = None
    if config.data is not None:
        recording = read_recording(config.data)
        focus = autofocus(recording, START_SPEED, config.autofocus_steps, min(config.size, 96), report)
    trained = train(config, problem, report)
    measured = {}
    for method, found in memory_of_each(config):
        measured[method] = found
        report(f"{method}, MiB", found.memory[-1][1])
    n_features = len(flat(init_params(config, problem)["features"]))
    return Result(
        title=problem.title,
        extent=problem.extent,
        n=problem.n,
        speed=problem.speed,
        is_recording=config.data is not None,
        target=problem.target,
        trained=trained,
        rows=compare(measured, seconds_of_each(config), n_features),
        memory={method: found.memory for method, found in measured.items()},
        focus=focus,
    )


def compare(measured: dict[str, Measured], seconds: dict[str, float], n_features: int) -> list[Comparison]:
    """Each method against the full graph. The angle is that of the feature extractor's gradient alone: the head stands
    behind the loop, and gets the same gradient from all.
    """
    full = measured["full graph"].gradient.double()
    rows = []
    for method, found in measured.items():
        g = found.gradient.double()
        error = (g - full).norm() / full.norm()
        a, b = g[:n_features], full[:n_features]
        angle = torch.rad2deg((a @ b / (a.norm() * b.norm())).clamp(-1, 1).acos())
        rows.append(Comparison(method, found.memory[-1][1], seconds[method], error.item(), angle.item()))
    return rows
