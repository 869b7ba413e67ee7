"""W4: a GRU-like step, hidden 256, batch 32, n steps: a loop with a carry.

`F` and `F + B` are the plain loop forward, and whole. JAX runs in an environment of its own, named by BENCH_JAX_PYTHON;
its time is under jit, compiled beforehand. A method whose packages are missing is shown as missing. The cotangents of
this loop vanish over many steps, so that they become denormal numbers, on which the CPU is several times slower; XLA
flushes them to zero, and all benchmarks have torch do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg
from benchmarks.floors import Method, Run, Setup, by_backward, in_double

SIZES = [100, 1000]
QUICK_SIZES = [50]
HIDDEN, BATCH = 256, 32


def setup(n: int) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    weights = {str(i): torch.randn(HIDDEN, HIDDEN) / math.sqrt(HIDDEN) for i in range(3)}
    return weights, 0.1 * torch.randn(n, BATCH, HIDDEN)


def step(p: list[Tensor], c: Tensor, x: Tensor) -> tuple[Tensor, None]:
    reset, update = torch.sigmoid(c @ p[0] + x), torch.sigmoid(c @ p[1] + x)
    new = torch.tanh((reset * c) @ p[2] + x)
    return update * c + (1 - update) * new, None


def training(loop: Callable[[list[Tensor], Tensor, Tensor], Tensor], setup: Setup = setup) -> Method:
    def loss(p: dict[str, Tensor], xs: Tensor) -> Tensor:
        return loop(list(p.values()), xs.new_zeros(BATCH, HIDDEN), xs).square().mean()

    return by_backward(loss, setup)


def forward(n: int) -> Run:
    p, xs = setup(n)

    def run() -> None:
        with torch.no_grad():
            plain(list(p.values()), torch.zeros(BATCH, HIDDEN), xs)

    return run


def plain(p: list[Tensor], c: Tensor, xs: Tensor) -> Tensor:
    for x in xs:
        c, _ = step(p, c, x)
    return c


def segmented(p: list[Tensor], c: Tensor, xs: Tensor) -> Tensor:
    """What one writes by hand: torch.utils.checkpoint around segments of sqrt(n) steps."""
    for part in xs.split(math.isqrt(len(xs) - 1) + 1):
        c = checkpoint(plain, p, c, part, use_reentrant=False)
    return c


def segmented_twice(p: list[Tensor], c: Tensor, xs: Tensor) -> Tensor:
    """The same with a checkpoint around each step too, so that a segment keeps carries and no intermediates."""

    def inner(p: list[Tensor], c: Tensor, xs: Tensor) -> Tensor:
        for x in xs:
            c, _ = checkpoint(step, p, c, x, use_reentrant=False)
        return c

    for part in xs.split(math.isqrt(len(xs) - 1) + 1):
        c = checkpoint(inner, p, c, part, use_reentrant=False)
    return c


def ours(plan: Any, **options: Any) -> Method:
    return training(lambda p, c, xs: plg.scan(step, p, c, xs, checkpoints=plan, **options)[0])


METHODS: dict[str, Method] = {
    "F": forward,
    "F + B": training(plain),
    "torch.utils.checkpoint, sqrt segments": training(segmented),
    "torch.utils.checkpoint, sqrt segments and steps": training(segmented_twice),
    "plg.scan, all": ours("all"),
    "plg.scan, sqrt": ours("sqrt"),
    "plg.scan, 10 carries": ours(10),
    "plg.scan, 40 carries": ours(40),
    "plg.scan, sqrt, compiled": ours("sqrt", run=plg.Run(compile=True)),
}

REFERENCES: dict[str, Method] = {"": training(plain, in_double(setup))}

# by the name of the method in carry_jax.py
JAX_METHODS = {
    "JAX lax.scan": "scan",
    "JAX lax.scan of jax.checkpoint, sqrt segments": "segments",
    "equinox checkpointed scan": "equinox",
}
