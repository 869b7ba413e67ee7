"""W7: gradients of single iterations of an MLP 64-256-10 (19,210 parameters), stacked, or folded into statistics.

`F` and `F + B` are one iteration of the plain loop at a time. All others run chunks of 32 under torch.vmap. `added up`
is the plain accumulation of vmapped gradients, which the folds are to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import pure_loopgrad as plg
from pure_loopgrad import folds

SIZES = [1024, 4096]
QUICK_SIZES = [256]
CHUNK = 32
Run = Callable[[], Any]
Params = dict[str, Tensor]


def loss(p: Params, x: tuple[Tensor, Tensor]) -> Tensor:
    h = torch.tanh(F.linear(x[0], p["W1"], p["b1"]))
    return F.cross_entropy(F.linear(h, p["W2"], p["b2"]), x[1])


def setup(n: int) -> tuple[Params, tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / shape[-1] ** 0.5

    params = {"W1": normal(256, 64), "b1": normal(256), "W2": normal(10, 256), "b2": normal(10)}
    return params, (normal(n, 64), torch.randint(0, 10, (n,), generator=g))


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
