"""The main job by a gradient through few iterations: one that is frozen for good, subsets drawn anew, all.

`python -m benchmarks.subset` trains the demo's features and head on the ring at its small sizes with Adam, from the
same start, for each of five seeds, and prints a table: the angle between the expected first gradient of the features
and the full one, how far one draw is from what is expected (relative to the full one), the mean loss over the last ten
steps, and the seconds of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import pure_loopgrad as plg
from pure_loopgrad.demo.config import QUICK, Config
from pure_loopgrad.demo.methods import flat, leaves_of
from pure_loopgrad.demo.model import Params, body, criterion, init_params
from pure_loopgrad.demo.problem import Problem, make_problem

Draw = Callable[[int, torch.Generator], Tensor]
DRAWS = 4000


def fixed(n: int, generator: torch.Generator) -> Tensor:
    """What people do: the gradient through one iteration, always the same."""
    return torch.eye(n, dtype=torch.float64)[n // 2]


def uniform(k: int) -> Draw:
    return lambda n, generator: plg.subsample(n, k, generator=generator)


def stratified(k: int) -> Draw:
    return lambda n, generator: plg.subsample(n, k, generator=generator, scheme="stratified")


WAYS: dict[str, Draw] = {
    "one, the same": fixed,
    "one, drawn": uniform(1),
    "4 of n, drawn": uniform(4),
    "4 of n, one of each quarter": stratified(4),
    "all": lambda n, generator: torch.ones(n, dtype=torch.float64),
}


def gradient(problem: Problem, params: Params, weights: Tensor) -> tuple[Tensor, Params]:
    f = plg.value_and_grad(body(problem), criterion(problem), grad_weights=weights)
    value, grads = f(params, problem.xs)
    return value, grads


def bias_and_noise(problem: Problem, config: Config, draw: Draw) -> tuple[float, float]:
    """The angle of the expected gradient of the features to the full one, in degrees, and the relative deviation of one
    draw, from the gradient of each iteration alone."""
    params, generator = init_params(config, problem), torch.Generator().manual_seed(0)
    size = len(flat(params["features"]))
    alone = [flat(gradient(problem, params, e)[1])[:size] for e in torch.eye(problem.n, dtype=torch.float64)]
    terms = torch.stack(alone).double()
    full = terms.sum(0)
    expected = draw(problem.n, generator) if draw is fixed else torch.ones(problem.n, dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(expected @ terms, full, dim=0)
    drawn = torch.stack([draw(problem.n, generator) for _ in range(DRAWS)])
    noise = ((drawn - expected) @ terms).square().sum(1).mean().sqrt() / full.norm()
    return float(torch.rad2deg(cosine.clamp(-1, 1).acos())), float(noise)


def trained(problem: Problem, config: Config, draw: Draw, steps: int, seed: int) -> tuple[float, float]:
    """Mean loss of the last ten steps, seconds of a step."""
    generator = torch.Generator().manual_seed(seed)
    params = init_params(config, problem)
    leaves, spec = leaves_of(params)
    leaves = [t.clone().requires_grad_() for t in leaves]
    optimiser = torch.optim.Adam(leaves, 4e-3)
    losses, start = [], time.perf_counter()
    for _ in range(steps):
        value, grads = gradient(problem, spec.unflatten(leaves), draw(problem.n, generator))
        for p, g in zip(leaves, leaves_of(grads)[0], strict=True):
            p.grad = g
        optimiser.step()
        losses.append(value.item())
    return statistics.mean(losses[-10:]), (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(2)
    config = Config(**QUICK)
    problem = make_problem(config)
    lines = [
        "# The main job by a gradient through few iterations",
        "",
        f"n = {problem.n}, {args.steps} steps of Adam, median of {args.seeds} seeds; torch {torch.__version__}.",
        "",
        "| gradient through | angle of the expectation (deg) | deviation of a draw | last losses | seconds a step |",
        "| --- | --: | --: | --: | --: |",
    ]
    for name, draw in WAYS.items():
        runs = [trained(problem, config, draw, args.steps, seed) for seed in range(args.seeds)]
        loss, seconds = (statistics.median(r[i] for r in runs) for i in (0, 1))
        bias, noise = bias_and_noise(problem, config, draw)
        lines.append(f"| {name} | {bias:.1f} | {noise:.2f} | {loss:.4g} | {seconds:.3f} |")
        print(lines[-1], flush=True)
    (Path(__file__).parent / "results" / "subset.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
