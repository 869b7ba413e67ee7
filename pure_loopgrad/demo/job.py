"""The main job: train, compare the four gradients, measure memory against n, find the speed of sound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad.demo.config import Config
from pure_loopgrad.demo.measure import THREADS, Measured, in_child
from pure_loopgrad.demo.methods import METHODS, flat
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
            "speed_of_sound": None if self.focus is None else asdict(self.focus) | {"named": self.speed},
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
    for method in METHODS:
        measured[method] = in_child(config, method)
        report(method, measured[method].memory[-1][1])
    memory = {method: found.memory for method, found in measured.items()}
    rows = compare(measured, n_features=len(flat(init_params(config, problem)["features"])))
    return Result(
        problem.title, problem.n, problem.speed, config.data is not None, problem.target, trained, rows, memory, focus
    )


def compare(measured: dict[str, Measured], n_features: int) -> list[Comparison]:
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
        rows.append(Comparison(method, found.memory[-1][1], found.seconds, error.item(), angle.item()))
    return rows
