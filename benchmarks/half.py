"""W8: bfloat16 over n = 4096 iterations: what is added up in half precision loses what is small beside the sum.

The body is tanh(W x), 32 x 32, its mean of squares the loss. The error column is the point here: the full graph adds n
contributions to the gradient in bfloat16, the library in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.floors import Method, floors, in_double, plain_loop, streaming
from benchmarks.tiny import Params, body

SIZES = [256, 4096]
QUICK_SIZES = [256]


def setup(n: int) -> tuple[Params, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"W": (torch.randn(32, 32, generator=g) / 6).bfloat16()}, (torch.randn(n, 32, generator=g) + 0.5).bfloat16()


def loss(_: Any, ys: Tensor) -> Tensor:
    return ys.to(torch.promote_types(ys.dtype, torch.float32)).square().mean()


METHODS: dict[str, Method] = {
    **floors(body, setup),
    "plain loop": plain_loop(body, loss, setup),
    "plg.value_and_grad": streaming(body, loss, setup),
    "plg.value_and_grad, chunks of 64": streaming(body, loss, setup, chunk_size=64),
}

REFERENCES: dict[str, Method] = {"": plain_loop(body, loss, in_double(setup))}
