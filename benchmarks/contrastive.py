"""W3: InfoNCE over n pairs 256 wide, an MLP 256-512-128: every output meets every other.

`gradient cache` is the algorithm of Gao et al. (arXiv 2101.06983) written plainly. All bounded methods work in chunks
of 64 pairs, unless they say otherwise; the cached loss of sentence-transformers also cuts the loss into such chunks,
and so never holds all logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg
from benchmarks.floors import Method, Run, by_backward, floors, gradient_cache, in_double, plain_loop, streaming

SIZES = [1024, 4096]
QUICK_SIZES = [512]
CHUNK = 64
ROWS = 256
SAVING = plg.Run(save=9 * 2**20)  # bytes: within 5 % of the peak, which is the loss's
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


def rows(b: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
    """The losses of some rows of the logits."""
    a, i = x
    return F.cross_entropy(a @ b.T / 0.1, i, reduction="none")


def loss_in_chunks(_: Any, z: Tensor) -> Tensor:
    """The same by a loop over rows of the logits, which never holds all of them."""
    a, b = z.unbind(1)
    return plg.mean(rows, b, (a, torch.arange(len(z))), chunk_size=ROWS, batched=True)


def sentence_transformers(n: int) -> Run:
    """The cached loss of that package, with the encoder as its model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    params, xs = setup(n)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterDict(params)

        def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
            return {**features, "sentence_embedding": encode(dict(self.weights), features["input_ids"])}

    model = SentenceTransformer(modules=[Encoder()], device="cpu")
    cached = CachedMultipleNegativesRankingLoss(model, scale=10.0, mini_batch_size=CHUNK)

    def run() -> list[Tensor | None]:
        model.zero_grad()
        cached([{"input_ids": xs[:, 0]}, {"input_ids": xs[:, 1]}], None).backward()
        return [dict(model[0].weights)[k].grad for k in params]

    return run


def checkpointed(p: Params, xs: Tensor) -> Tensor:
    return torch.cat([checkpoint(body, p, x, use_reentrant=False) for x in xs.split(CHUNK)])


METHODS: dict[str, Method] = {
    **floors(body, setup),
    "one full batch": by_backward(lambda p, xs: loss(p, body(p, xs)), setup),
    "torch.utils.checkpoint, chunks": by_backward(lambda p, xs: loss(p, checkpointed(p, xs)), setup),
    "gradient cache, chunks": gradient_cache(body, loss, setup, CHUNK),
    "gradient cache, chunks of 256": gradient_cache(body, loss, setup, 256),
    "sentence-transformers, cached loss": sentence_transformers,
    "plg.value_and_grad, vmapped chunks": streaming(body, loss, setup, chunk_size=CHUNK),
    "plg.value_and_grad, batched chunks": streaming(body, loss, setup, chunk_size=CHUNK, batched=True),
    "plg.value_and_grad, batched chunks of 256": streaming(body, loss, setup, chunk_size=256, batched=True),
    "plg.value_and_grad, batched chunks of 256, some saved": streaming(
        body, loss, setup, chunk_size=256, batched=True, run=SAVING
    ),
    "plg.value_and_grad, batched chunks, the loss in chunks of 256": streaming(
        body, loss_in_chunks, setup, chunk_size=CHUNK, batched=True
    ),
    "plg.value_and_grad, chunk_size auto": streaming(body, loss, setup, chunk_size="auto", batched=True),
    "plg.value_and_grad, chunk_size auto, the loss in chunks of 256": streaming(
        body, loss_in_chunks, setup, chunk_size="auto", batched=True
    ),
    "plg.value_and_grad, batched chunks, all saved": streaming(
        body, loss, setup, chunk_size=CHUNK, batched=True, run=plg.Run(save="everything")
    ),
    "plg.value_and_grad, batched chunks, compiled": streaming(
        body, loss, setup, chunk_size=CHUNK, batched=True, run=plg.Run(compile=True)
    ),
    "plg.value_and_grad, batched chunks of 256, compiled": streaming(
        body, loss, setup, chunk_size=256, batched=True, run=plg.Run(compile=True)
    ),
}

REFERENCES: dict[str, Method] = {"": plain_loop(body, loss, in_double(setup))}

# by the name of the method in contrastive_jax.py
JAX_METHODS = {
    "JAX lax.map of jax.checkpoint, chunks": "64",
    "JAX lax.map of jax.checkpoint, chunks of 256": "256",
}
