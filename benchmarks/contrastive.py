"""W3: InfoNCE over n pairs 256 wide, an MLP 256-512-128: every output meets every other.

`gradient cache` is the algorithm of Gao et al. (arXiv 2101.06983) written plainly: outputs without a graph, the loss
and its gradient at the outputs, then chunk after chunk again with a surrogate whose gradient is that cotangent. All
bounded methods work in chunks of 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.floors import Run, by_backward, floors, streaming

SIZES = [4096]
QUICK_SIZES = [512]
CHUNK = 64
Params = dict[str, Tensor]


def encode(p: Params, x: Tensor) -> Tensor:
    """One view, or a batch of them."""
    return F.normalize(F.linear(F.gelu(F.linear(x, p["A"], p["a"])), p["B"], p["b"]), dim=-1)


def body(p: Params, x: Tensor) -> Tensor:
    """Both views of a pair."""
    return encode(p, x)


def setup(n: int) -> tuple[Params, Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / shape[-1] ** 0.5

    params = {"A": normal(512, 256), "a": normal(512), "B": normal(128, 512), "b": normal(128)}
    view = torch.randn(n, 256, generator=g)
    return params, torch.stack([view, view + 0.5 * torch.randn(n, 256, generator=g)], 1)


def loss(_: Any, z: Tensor) -> Tensor:
    logits = z[:, 0] @ z[:, 1].T / 0.1
    return F.cross_entropy(logits, torch.arange(len(z)))


def gradient_cache(n: int) -> Run:
    params, xs = setup(n)
    live = {k: p.clone().requires_grad_() for k, p in params.items()}

    def run() -> list[Tensor]:
        with torch.no_grad():
            z = torch.cat([body(live, x) for x in xs.split(CHUNK)])
        z.requires_grad_()
        (dz,) = torch.autograd.grad(loss(None, z), z)
        for p in live.values():
            p.grad = None
        for x, d in zip(xs.split(CHUNK), dz.split(CHUNK), strict=True):
            (body(live, x) * d).sum().backward()
        return [p.grad for p in live.values()]

    return run


def checkpointed(p: Params, xs: Tensor) -> Tensor:
    return torch.cat([checkpoint(body, p, x, use_reentrant=False) for x in xs.split(CHUNK)])


METHODS: dict[str, Callable[[int], Run]] = {
    **floors(body, setup),
    "one full batch": by_backward(lambda p, xs: loss(p, body(p, xs)), setup),
    "torch.utils.checkpoint, chunks": by_backward(lambda p, xs: loss(p, checkpointed(p, xs)), setup),
    "gradient cache, chunks": gradient_cache,
    "plg.value_and_grad, vmapped chunks": streaming(body, loss, setup, chunk_size=CHUNK),
    "plg.value_and_grad, batched chunks": streaming(body, loss, setup, chunk_size=CHUNK, batched=True),
    "plg.value_and_grad, chunk_size auto": streaming(body, loss, setup, chunk_size="auto", batched=True),
}
