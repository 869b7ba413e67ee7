"""The floors of a loop: one iteration of the plain loop at a time, forward, and forward and backward; and its methods.

A method is made for n iterations, and called; what a call returns is the gradient, or None for a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import pure_loopgrad as plg

Run = Callable[[], Any]
Method = Callable[[int], Run]
Setup = Callable[[int], tuple[dict[str, Tensor], Any]]


def floors(body: Callable[[dict[str, Tensor], Any], Tensor], setup: Setup) -> dict[str, Method]:
    """The methods `F` and `F + B` of a workload, for params in a dict and xs to iterate over."""

    def build(backward: bool) -> Method:
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


def by_backward(loss: Callable[[dict[str, Tensor], Any], Tensor], setup: Setup) -> Method:
    """A method that computes a loss with live parameters and its gradient by autograd."""

    def with_n(n: int) -> Run:
        params, xs = setup(n)
        live = {k: p.clone().requires_grad_() for k, p in params.items()}
        return lambda: torch.autograd.grad(loss(live, xs), list(live.values()))

    return with_n


def in_double(setup: Setup) -> Setup:
    """The same data in float64, for the gradient that all others are compared with."""

    def double(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.double() if value.is_floating_point() else value
        return {k: double(v) for k, v in value.items()}

    def with_n(n: int) -> tuple[dict[str, Tensor], Any]:
        params, xs = setup(n)
        return double(params), double(xs)

    return with_n


def plain_loop(
    body: Callable[[dict[str, Tensor], Any], Tensor], loss: Callable[[Any, Tensor], Tensor], setup: Setup
) -> Method:
    """The plain loop: every iteration's graph is kept until the backward."""
    return by_backward(lambda p, xs: loss(p, torch.stack([body(p, x) for x in xs])), setup)


def streaming(
    body: Callable[[dict[str, Tensor], Any], Any],
    loss: Callable[[Any, Tensor], Tensor] | None,
    setup: Setup,
    **options: Any,
) -> Method:
    """A method that computes value and gradient with `plg.value_and_grad`."""

    def with_n(n: int) -> Run:
        params, xs = setup(n)
        f = plg.value_and_grad(body, loss, **options)
        return lambda: f(params, xs)[1]

    return with_n


def gradient_cache(
    body: Callable[[dict[str, Tensor], Any], Tensor], loss: Callable[[Any, Tensor], Tensor], setup: Setup, chunk: int
) -> Method:
    """The gradient cache of Gao et al. (arXiv 2101.06983) written plainly, for a body that takes a chunk.

    Outputs without a graph, the loss and its gradient at the outputs, then chunk after chunk again with a surrogate
    whose gradient is that cotangent.
    """

    def with_n(n: int) -> Run:
        params, xs = setup(n)
        live = {k: p.clone().requires_grad_() for k, p in params.items()}

        def run() -> Sequence[Tensor | None]:
            with torch.no_grad():
                z = torch.cat([body(live, x) for x in xs.split(chunk)])
            z.requires_grad_()
            dz, *direct = torch.autograd.grad(loss(live, z), [z, *live.values()], allow_unused=True)
            for p, d in zip(live.values(), direct, strict=True):
                p.grad = d
            for x, d in zip(xs.split(chunk), dz.split(chunk), strict=True):
                (body(live, x) * d).sum().backward()
            return [p.grad for p in live.values()]

        return run

    return with_n
