"""W5: a tiny body, tanh(W x) of 32 x 32, n = 10,000: what the loop itself costs.

`hand-written` is the shortest two-pass loop with torch.func: outputs first, then one torch.func.vjp an iteration.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg
from benchmarks.floors import Method, Run, by_backward, floors, in_double, plain_loop, streaming

SIZES = [1000, 10_000]
QUICK_SIZES = [1000]
Params = dict[str, Tensor]


def body(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(p["W"] @ x)


def setup(n: int) -> tuple[Params, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"W": torch.randn(32, 32, generator=g) / 6}, torch.randn(n, 32, generator=g)


def loss(_: Any, ys: Tensor) -> Tensor:
    return torch.logsumexp(ys.flatten(), 0)


def hand_written(n: int) -> Run:
    params, xs = setup(n)
    W = params["W"]

    def run() -> Tensor:
        with torch.no_grad():
            ys = torch.stack([torch.tanh(W @ x) for x in xs])
        total = torch.zeros_like(W)
        for x, dy in zip(xs, torch.func.grad(lambda ys: loss(None, ys))(ys), strict=True):
            _, pullback = torch.func.vjp(lambda w, x=x: torch.tanh(w @ x), W)
            total += pullback(dy)[0]
        return total

    return run


METHODS: dict[str, Method] = {
    **floors(body, setup),
    "plain loop": plain_loop(body, loss, setup),
    "torch.utils.checkpoint": by_backward(
        lambda p, xs: loss(p, torch.stack([checkpoint(body, p, x, use_reentrant=False) for x in xs])), setup
    ),
    "hand-written with torch.func": hand_written,
    "plg.value_and_grad": streaming(body, loss, setup),
    "plg.value_and_grad, chunks of 256": streaming(body, loss, setup, chunk_size=256),
    "plg.value_and_grad, chunk_size auto": streaming(body, loss, setup, chunk_size="auto"),
    "plg.value_and_grad, compiled": streaming(body, loss, setup, run=plg.Run(compile=True)),
    "plg.value_and_grad, chunks of 256, compiled": streaming(
        body, loss, setup, chunk_size=256, run=plg.Run(compile=True)
    ),
    "plg.value_and_grad, chunks of 2500, compiled, no check": streaming(
        body, loss, setup, chunk_size=2500, run=plg.Run(compile=True, check="off")
    ),
}

REFERENCES: dict[str, Method] = {"": plain_loop(body, loss, in_double(setup))}

# by the name of the method in tiny_jax.py
JAX_METHODS = {
    "JAX lax.map of jax.checkpoint": "map",
    "JAX lax.map of jax.checkpoint, chunks of 256": "chunks",
}
