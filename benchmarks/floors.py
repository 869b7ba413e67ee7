"""The floors of a loop: one iteration of the plain loop at a time, forward, and forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import pure_loopgrad as plg

Run = Callable[[], Any]
Setup = Callable[[int], tuple[dict[str, Tensor], Sequence[Any]]]


def floors(body: Callable[[dict[str, Tensor], Any], Tensor], setup: Setup) -> dict[str, Callable[[int], Run]]:
    """The methods `F` and `F + B` of a workload, for params in a dict and xs to iterate over."""

    def build(backward: bool) -> Callable[[int], Run]:
        def with_n(n: int) -> Run:
            params, xs = setup(n)
            live = {k: p.clone().requires_grad_() for k, p in params.items()}

            def run() -> None:
                for x in xs:
                    y = body(live, x)
                    if backward:
                        torch.autograd.grad(y, list(live.values()), torch.ones_like(y))

            return run

        return with_n

    return {"F": build(backward=False), "F + B": build(backward=True)}


def by_backward(loss: Callable[[dict[str, Tensor], Sequence[Any]], Tensor], setup: Setup) -> Callable[[int], Run]:
    """A method that computes a loss with live parameters and its gradient by autograd."""

    def with_n(n: int) -> Run:
        params, xs = setup(n)
        live = {k: p.clone().requires_grad_() for k, p in params.items()}
        return lambda: torch.autograd.grad(loss(live, xs), list(live.values()))

    return with_n


def streaming(
    body: Callable[[dict[str, Tensor], Any], Any], loss: Callable[[Any, Tensor], Tensor], setup: Setup, **options: Any
) -> Callable[[int], Run]:
    """A method that computes value and gradient with `plg.value_and_grad`."""

    def with_n(n: int) -> Run:
        params, xs = setup(n)
        f = plg.value_and_grad(body, loss, **options)
        return lambda: f(params, xs)

    return with_n
