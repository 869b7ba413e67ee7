"""W7: gradients of single images 1x32x32 by a CNN of 25,200 parameters, stacked, or folded into statistics.

`F` and `F + B` are one iteration of the plain loop at a time. All others run chunks of 32 under torch.vmap. `added up`
is the plain accumulation of vmapped gradients, which the folds are to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import pure_loopgrad as plg
from pure_loopgrad import folds

SIZES = [1024]
QUICK_SIZES = [256]
CHUNK = 32
Run = Callable[[], Any]
Params = dict[str, Tensor]


def loss(p: Params, x: tuple[Tensor, Tensor]) -> Tensor:
    h = F.max_pool2d(torch.relu(F.conv2d(x[0], p["conv1"], padding=1)), 2)
    h = F.max_pool2d(torch.relu(F.conv2d(h, p["conv2"], padding=1)), 2)
    return F.cross_entropy(p["head"] @ h.reshape(-1), x[1])


def setup(n: int) -> tuple[Params, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / math.prod(shape[1:]) ** 0.5

    params = {"conv1": normal(16, 1, 3, 3), "conv2": normal(32, 16, 3, 3), "head": normal(10, 2048)}
    return params, (torch.randn(n, 1, 32, 32, generator=g), torch.randint(0, 10, (n,), generator=g))


def on_setup(run: Callable[[Params, tuple[Tensor, Tensor]], object]) -> Callable[[int], Run]:
    def build(n: int) -> Run:
        params, xs = setup(n)
        return lambda: run(params, xs)

    return build


def one_at_a_time(backward: bool) -> Callable[[Params, tuple[Tensor, Tensor]], None]:
    def run(params: Params, xs: tuple[Tensor, Tensor]) -> None:
        live = {k: p.clone().requires_grad_() for k, p in params.items()}
        for x in zip(*xs, strict=True):
            value = loss(live, x)
            if backward:
                torch.autograd.grad(value, list(live.values()))

    return run


def torchs(params: Params, xs: tuple[Tensor, Tensor]) -> Any:
    return torch.func.vmap(torch.func.grad(loss), (None, 0), chunk_size=CHUNK)(params, xs)


def added_up(params: Params, xs: tuple[Tensor, Tensor]) -> Params:
    one = torch.func.vmap(torch.func.grad(loss), (None, 0))
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for chunk in zip(*(x.split(CHUNK) for x in xs), strict=True):
        for k, g in one(params, chunk).items():
            total[k] += g.sum(0)
    return total


def folded(fold: Any) -> Callable[[Params, tuple[Tensor, Tensor]], Any]:
    return lambda params, xs: plg.fold_grads(loss, params, xs, fold, chunk_size=CHUNK)


METHODS: dict[str, Callable[[int], Run]] = {
    "F": on_setup(one_at_a_time(backward=False)),
    "F + B": on_setup(one_at_a_time(backward=True)),
    "stacked: torch.func.vmap(grad)": on_setup(torchs),
    "stacked: plg.per_iteration_grads": on_setup(
        lambda params, xs: plg.per_iteration_grads(loss, params, xs, chunk_size=CHUNK)
    ),
    "folded: added up": on_setup(added_up),
    "folded: plg.folds.sum": on_setup(folded(folds.sum())),
    "folded: plg.folds.norms": on_setup(folded(folds.norms())),
    "folded: plg.folds.moments": on_setup(folded(folds.moments())),
    "folded: sum, norms, noise scale": on_setup(folded((folds.sum(), folds.norms(), folds.noise_scale()))),
    "folded: clipped sum": on_setup(
        lambda params, xs: plg.fold_grads(
            loss, params, xs, folds.sum(), transform=folds.clip_norm(1.0), chunk_size=CHUNK
        )
    ),
}
