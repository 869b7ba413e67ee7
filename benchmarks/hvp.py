"""W6: a Hessian-vector product of W1's averaged CNN, forward over reverse and reverse over reverse.

No eager peer does it in bounded memory: torch.utils.checkpoint refuses torch.func, and under double backward it keeps
what it recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import pure_loopgrad as plg
from benchmarks.floors import Method, Run, Setup, floors, in_double

SIZES = [32, 64]
QUICK_SIZES = [8]
CHUNK = 4
Params = dict[str, Tensor]


def body(p: Params, x: Tensor) -> Tensor:
    x = F.silu(F.conv2d(x, p["a"], padding=1))
    x = F.silu(F.conv2d(x, p["b"], padding=1))
    return F.conv2d(x, p["c"], padding=1)


def setup(n: int) -> tuple[Params, Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / torch.Size(shape[1:]).numel() ** 0.5

    params = {"a": normal(16, 1, 3, 3), "b": normal(16, 16, 3, 3), "c": normal(16, 16, 3, 3)}
    return params, torch.randn(n, 1, 1, 96, 96, generator=g)


def plain(p: Params, xs: Tensor) -> Tensor:
    return torch.stack([body(p, x) for x in xs]).mean(0).square().mean()


def ours(p: Params, xs: Tensor) -> Tensor:
    return plg.mean(body, p, xs).square().mean()


def chunk_body(p: Params, xs: Tensor) -> Tensor:
    """A chunk of images, one after the other in the batch that the convolutions take."""
    return body(p, xs.flatten(0, 1)).unflatten(0, xs.shape[:2])


def ours_in_chunks(p: Params, xs: Tensor) -> Tensor:
    return plg.mean(chunk_body, p, xs, chunk_size=CHUNK, batched=True).square().mean()


def product(loss: Callable[[Params, Tensor], Tensor], forward: bool, setup: Setup = setup) -> Method:
    def with_n(n: int) -> Run:
        params, xs = setup(n)
        v = {k: torch.ones_like(p) for k, p in params.items()}

        def along(p: Params) -> Tensor:
            grads = torch.func.grad(loss)(p, xs)
            return sum((grads[k] * v[k]).sum() for k in grads)  # type: ignore[return-value]  # of at least one

        def run() -> Any:
            if forward:
                return torch.func.jvp(lambda p: torch.func.grad(loss)(p, xs), (params,), (v,))[1]
            return torch.func.grad(along)(params)

        return run

    return with_n


METHODS: dict[str, Method] = {
    **floors(body, setup),
    "forward over reverse: plain loop": product(plain, forward=True),
    "forward over reverse: plg.mean": product(ours, forward=True),
    f"forward over reverse: plg.mean, chunks of {CHUNK}": product(ours_in_chunks, forward=True),
    "reverse over reverse: plain loop": product(plain, forward=False),
    "reverse over reverse: plg.mean": product(ours, forward=False),
    f"reverse over reverse: plg.mean, chunks of {CHUNK}": product(ours_in_chunks, forward=False),
}

REFERENCES: dict[str, Method] = {"": product(plain, forward=True, setup=in_double(setup))}
