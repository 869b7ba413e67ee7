"""Contrastive learning with a batch of 4,096 pairs: every pair is a negative for every other.

    python examples/contrastive.py [--quick]

Two noisy, shifted views of each digit are pulled together and all others pushed apart (InfoNCE; van den Oord, Li and
Vinyals, arXiv 1807.03748). The encoder runs in chunks, and so does the loss: a loop over the rows of the matrix of
similarities, so that neither the encoder's intermediates nor 4,096 x 4,096 logits are ever held. No label is used until
a nearest neighbour among thirty digits with a label classifies all others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

import pure_loopgrad as plg
from pure_loopgrad.testing import compare

mpl.use("Agg")
import matplotlib.pyplot as plt

CHUNK = 256
TEMPERATURE = 0.2
KNOWN = 30  # digits with a label
Params = dict[str, Tensor]


def encode(p: Params, x: Tensor) -> Tensor:
    """Images (..., 8, 8) to unit vectors of 64 numbers."""
    h = torch.relu(F.linear(x.flatten(-2), p["A"], p["a"]))
    h = torch.relu(F.linear(h, p["B"], p["b"]))
    return F.normalize(F.linear(h, p["C"]), dim=-1)


def init(generator: torch.Generator) -> Params:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (2 / shape[-1]) ** 0.5

    return {
        "A": normal(256, 64),
        "a": torch.zeros(256),
        "B": normal(256, 256),
        "b": torch.zeros(256),
        "C": normal(64, 256),
    }


def views(images: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """(n, 2, 8, 8): two views of each of n random digits, shifted by up to a pixel, with noise."""
    x = images[torch.randint(len(images), (n,), generator=generator)]
    padded = F.pad(x, (1, 1, 1, 1))

    def view() -> Tensor:
        r, c = torch.randint(3, (2, n), generator=generator)
        rows, cols = r[:, None] + torch.arange(8), c[:, None] + torch.arange(8)
        shifted = padded[torch.arange(n)[:, None, None], rows[:, :, None], cols[:, None, :]]
        return shifted + 0.2 * torch.randn(n, 8, 8, generator=generator)

    return torch.stack([view(), view()], 1)


def row_losses(z: Tensor, i: Tensor) -> Tensor:
    """Of rows i of the logits: pair i's first view must find its second."""
    return F.cross_entropy(z[i, 0] @ z[:, 1].T / TEMPERATURE, i, reduction="none")


def loss(_: Params, z: Tensor) -> Tensor:
    """The mean over all rows, itself a loop: z is what all of its iterations share."""
    return plg.mean(row_losses, z, torch.arange(len(z)), chunk_size=CHUNK, batched=True)


def plain_gradient(params: Params, xs: Tensor) -> Params:
    live = {k: p.clone().requires_grad_() for k, p in params.items()}
    z = encode(live, xs)
    value = F.cross_entropy(z[:, 0] @ z[:, 1].T / TEMPERATURE, torch.arange(len(z)))
    return dict(zip(live, torch.autograd.grad(value, list(live.values())), strict=True))


def accuracy(params: Params, images: Tensor, digits: Tensor, known: int) -> float:
    """Of the label of the nearest of the first `known` digits, for the others."""
    z = encode(params, images)
    nearest = (z[known:] @ z[:known].T).argmax(1)
    return float((digits[:known][nearest] == digits[known:]).float().mean())


def main(quick: bool, picture: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    data = load_digits()
    images, digits = torch.tensor(data.images / 16, dtype=torch.float32), torch.tensor(data.target)
    batch, steps = (512, 2) if quick else (4096, 80)
    params = init(generator)
    gradient = plg.value_and_grad(encode, loss, chunk_size=CHUNK, batched=True)

    xs = views(images, batch, generator)
    found = compare(lambda: gradient(params, xs)[1], lambda: plain_gradient(params, xs))
    print(f"{batch} pairs: {found}")

    before = accuracy(params, images, digits, KNOWN)
    losses = []
    state = {k: (torch.zeros_like(p), torch.zeros_like(p)) for k, p in params.items()}
    for step in range(1, steps + 1):
        value, grads = gradient(params, views(images, batch, generator))
        losses.append(value.item())
        for k, g in grads.items():  # Adam
            m, v = state[k] = state[k][0].lerp(g, 0.1), state[k][1].lerp(g * g, 0.01)
            params[k] = params[k] - 4e-3 * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
        if step % 20 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")
    after = accuracy(params, images, digits, KNOWN)
    print(f"with {KNOWN} labels, the nearest neighbour is right for {before:.1%} before, {after:.1%} after")
    draw(picture, losses, encode(params, images[KNOWN:]), digits[KNOWN:])


def draw(picture: Path, losses: list[float], z: Tensor, digits: Tensor) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    axes[0].plot(losses)
    axes[0].set(xlabel="step", ylabel="InfoNCE")
    flat = z - z.mean(0)
    plane = flat @ torch.linalg.svd(flat, full_matrices=False)[2][:2].T
    points = axes[1].scatter(*plane.T, c=digits, cmap="tab10", s=6)
    axes[1].set(title="digits, two principal axes of their features")
    figure.colorbar(points, ax=axes[1], label="digit")
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
