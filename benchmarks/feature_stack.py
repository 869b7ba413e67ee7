"""W1: a CNN with 16 channels on n images 1x96x96, its features stacked and fused, or averaged.

`F` and `F + B` are one iteration of the plain loop at a time: recomputation must cost about 2F + B. Every method runs
the same pure body; `from_module` runs it as a torch.nn module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg

SIZES = [64, 256]
QUICK_SIZES = [32]
Run = Callable[[], Any]
Loop = Callable[[list[nn.Parameter], Tensor], Tensor]


def network() -> nn.Module:
    def conv(a: int, b: int) -> nn.Module:
        return nn.Conv2d(a, b, 3, padding=1)

    return nn.Sequential(conv(1, 16), nn.SiLU(), conv(16, 16), nn.SiLU(), conv(16, 16))


def body(p: list[nn.Parameter], x: Tensor) -> Tensor:
    """The same network as a function of its parameters."""
    x = F.silu(F.conv2d(x, p[0], p[1], padding=1))
    x = F.silu(F.conv2d(x, p[2], p[3], padding=1))
    return F.conv2d(x, p[4], p[5], padding=1)


def setup(n: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return network(), torch.randn(n, 1, 1, 96, 96)


def fused(ys: Tensor) -> Tensor:
    """A loss that couples all iterations: a softmax over them, as an attention would."""
    score = ys.mean(dim=(1, 2, 3, 4))
    return (torch.softmax(score, 0) * score).sum()


def averaged(y: Tensor) -> Tensor:
    return y.square().mean()


def training(loop: Loop, loss: Callable[[Tensor], Tensor]) -> Callable[[int], Run]:
    def build(n: int) -> Run:
        net, xs = setup(n)
        p = list(net.parameters())

        def run() -> None:
            net.zero_grad()
            loss(loop(p, xs)).backward()

        return run

    return build


def as_module(n: int) -> Run:
    net, xs = setup(n)

    def run() -> None:
        net.zero_grad()
        averaged(plg.mean(*plg.from_module(net), xs)).backward()

    return run


def plain(p: list[nn.Parameter], xs: Tensor) -> Tensor:
    return torch.stack([body(p, x) for x in xs])


def checkpointed(p: list[nn.Parameter], xs: Tensor) -> Tensor:
    return torch.stack([checkpoint(body, p, x, use_reentrant=False) for x in xs])


def checkpointed_sum(p: list[nn.Parameter], xs: Tensor) -> Tensor:
    """As one would write a mean that keeps no stack."""
    total = checkpoint(body, p, xs[0], use_reentrant=False)
    for x in xs[1:]:
        total = total + checkpoint(body, p, x, use_reentrant=False)
    return total / len(xs)


def forward(n: int) -> Run:
    """F: the forward with its graph, one iteration at a time."""
    net, xs = setup(n)
    p = list(net.parameters())

    def run() -> None:
        for x in xs:
            body(p, x)

    return run


def forward_and_backward(n: int) -> Run:
    """F + B: one iteration at a time, so that the caches are as warm as in a loop that recomputes."""
    net, xs = setup(n)
    p, seed = list(net.parameters()), torch.ones(1, 16, 96, 96)

    def run() -> None:
        for x in xs:
            body(p, x).backward(seed)

    return run


METHODS: dict[str, Callable[[int], Run]] = {
    "F": forward,
    "F + B": forward_and_backward,
    "stacked: plain loop": training(plain, fused),
    "stacked: torch.utils.checkpoint": training(checkpointed, fused),
    "stacked: plg.map": training(lambda p, xs: plg.map(body, p, xs), fused),
    "mean: plain loop": training(lambda p, xs: plain(p, xs).mean(0), averaged),
    "mean: torch.utils.checkpoint, stacked": training(lambda p, xs: checkpointed(p, xs).mean(0), averaged),
    "mean: torch.utils.checkpoint, running sum": training(checkpointed_sum, averaged),
    "mean: plg.mean": training(lambda p, xs: plg.mean(body, p, xs), averaged),
    "mean: plg.mean of from_module": as_module,
}
