"""W2: attention pooling over a bag of n patches 3x32x32, a small CNN and a head, as in multiple-instance learning.

All bounded methods work in chunks of 16 patches, on which the CNN is at its best on this machine.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg
from benchmarks.floors import Method, by_backward, floors, gradient_cache, in_double, plain_loop, streaming

SIZES = [256, 2048]
QUICK_SIZES = [128]
CHUNK = 16
Params = dict[str, Tensor]


def encode(p: Params, x: Tensor) -> Tensor:
    """Patches (c, 3, 32, 32), or one, to features."""
    x = x if x.dim() == 4 else x[None]
    h = F.max_pool2d(torch.relu(F.conv2d(x, p["conv1"], padding=1)), 2)
    h = F.max_pool2d(torch.relu(F.conv2d(h, p["conv2"], padding=1)), 2)
    return F.linear(h.flatten(1), p["out"])


def one(p: Params, x: Tensor) -> Tensor:
    return encode(p, x)[0]


def setup(n: int) -> tuple[Params, Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / torch.Size(shape[1:]).numel() ** 0.5

    params = {
        "conv1": normal(16, 3, 3, 3), "conv2": normal(32, 16, 3, 3), "out": normal(64, 2048),
        "attention": normal(32, 64), "score": normal(1, 32), "head": normal(1, 64),
    }  # fmt: skip
    return params, torch.randn(n, 3, 32, 32, generator=g)


def loss(p: Params, h: Tensor) -> Tensor:
    weights = torch.softmax(torch.tanh(h @ p["attention"].T) @ p["score"][0], 0)
    return F.binary_cross_entropy_with_logits(p["head"][0] @ (weights @ h), weights.new_ones(()))


def checkpointed(p: Params, xs: Tensor) -> Tensor:
    return torch.cat([checkpoint(encode, p, x, use_reentrant=False) for x in xs.split(CHUNK)])


def features_only(n: int) -> tuple[Params, Tensor]:
    """What the loop itself differentiates, for the floors."""
    params, xs = setup(n)
    return {k: params[k] for k in ("conv1", "conv2", "out")}, xs


METHODS: dict[str, Method] = {
    **floors(one, features_only),
    "plain loop": plain_loop(one, loss, setup),
    "one full batch": by_backward(lambda p, xs: loss(p, encode(p, xs)), setup),
    "torch.utils.checkpoint, chunks": by_backward(lambda p, xs: loss(p, checkpointed(p, xs)), setup),
    "gradient cache, chunks": gradient_cache(encode, loss, setup, CHUNK),
    "plg.value_and_grad": streaming(one, loss, setup),
    "plg.value_and_grad, batched chunks": streaming(encode, loss, setup, chunk_size=CHUNK, batched=True),
    "plg.value_and_grad, chunk_size auto": streaming(encode, loss, setup, chunk_size="auto", batched=True),
    "plg.value_and_grad, chunks, all saved": streaming(
        encode, loss, setup, chunk_size=CHUNK, batched=True, run=plg.Run(save="everything")
    ),
    "plg.value_and_grad, chunks, compiled": streaming(
        encode, loss, setup, chunk_size=CHUNK, batched=True, run=plg.Run(compile=True)
    ),
}

REFERENCES: dict[str, Method] = {"": plain_loop(one, loss, in_double(setup))}

# by the name of the method in mil_jax.py
JAX_METHODS = {
    "JAX lax.map of jax.checkpoint": "map",
    "JAX lax.map of jax.checkpoint, chunks": "chunks",
}
