"""W1: a CNN with 16 channels on n images 1x96x96, its features stacked and fused, or averaged.

`F` and `F + B` are one iteration of the plain loop at a time: recomputation must cost about 2F + B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg

SIZES = [64, 256]
QUICK_SIZES = [32]
Run = Callable[[], Any]


def network() -> nn.Module:
    def conv(a: int, b: int) -> nn.Module:
        return nn.Conv2d(a, b, 3, padding=1)

    return nn.Sequential(conv(1, 16), nn.SiLU(), conv(16, 16), nn.SiLU(), conv(16, 16))


def setup(n: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return network(), torch.randn(n, 1, 1, 96, 96)


def fused(ys: Tensor) -> Tensor:
    """A loss that couples all iterations: a softmax over them, as an attention would."""
    score = ys.mean(dim=(1, 2, 3, 4))
    return (torch.softmax(score, 0) * score).sum()


def averaged(y: Tensor) -> Tensor:
    return y.square().mean()


def training(loop: Callable[[nn.Module, Tensor], Tensor], loss: Callable[[Tensor], Tensor]) -> Callable[[int], Run]:
    def build(n: int) -> Run:
        net, xs = setup(n)

        def run() -> None:
            net.zero_grad()
            loss(loop(net, xs)).backward()

        return run

    return build


def plain(net: nn.Module, xs: Tensor) -> Tensor:
    return torch.stack([net(x) for x in xs])


def checkpointed(net: nn.Module, xs: Tensor) -> Tensor:
    return torch.stack([checkpoint(net, x, use_reentrant=False) for x in xs])


def checkpointed_sum(net: nn.Module, xs: Tensor) -> Tensor:
    """As one would write a mean that keeps no stack."""
    total = checkpoint(net, xs[0], use_reentrant=False)
    for x in xs[1:]:
        total = total + checkpoint(net, x, use_reentrant=False)
    return total / len(xs)


def forward(n: int) -> Run:
    """F: the forward with its graph, one iteration at a time."""
    net, xs = setup(n)

    def run() -> None:
        for x in xs:
            net(x)

    return run


def forward_and_backward(n: int) -> Run:
    """F + B: one iteration at a time, so that the caches are as warm as in a loop that recomputes."""
    net, xs = setup(n)
    seed = torch.ones(1, 16, 96, 96)

    def run() -> None:
        for x in xs:
            net(x).backward(seed)

    return run


METHODS: dict[str, Callable[[int], Run]] = {
    "F": forward,
    "F + B": forward_and_backward,
    "stacked: plain loop": training(plain, fused),
    "stacked: torch.utils.checkpoint": training(checkpointed, fused),
    "stacked: plg.map": training(lambda net, xs: plg.map(*plg.from_module(net), xs), fused),
    "mean: plain loop": training(lambda net, xs: plain(net, xs).mean(0), averaged),
    "mean: torch.utils.checkpoint, stacked": training(lambda net, xs: checkpointed(net, xs).mean(0), averaged),
    "mean: torch.utils.checkpoint, running sum": training(checkpointed_sum, averaged),
    "mean: plg.mean": training(lambda net, xs: plg.mean(*plg.from_module(net), xs), averaged),
}
