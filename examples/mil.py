"""Attention over bags: does a bag of digits hold a nine? Only bags are labelled; the network sees single digits.

    python examples/mil.py [--quick]

The encoder runs over the instances of a bag, a chunk at a time; the attention pools their features, and the head
judges the bag. (Ilse, Tomczak and Welling, arXiv 1802.04712.) On whole slides a bag has tens of thousands of patches,
and the encoder's intermediates do not fit; here it is scikit-learn's digits, so that it runs anywhere.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import pure_loopgrad as plg
from pure_loopgrad.testing import compare

mpl.use("Agg")
import matplotlib.pyplot as plt

NINE = 9
Bag = tuple[Tensor, Tensor, float]  # images (n, 1, 8, 8), digits, label


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 32), nn.ReLU(),
        )  # fmt: skip
        self.attention = nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
        self.head = nn.Linear(32, 1)

    def weights(self, features: Tensor) -> Tensor:
        return torch.softmax(self.attention(features)[:, 0], 0)

    def judge(self, features: Tensor) -> Tensor:
        return self.head(self.weights(features) @ features)[0]

    def forward(self, bag: Tensor) -> Tensor:
        """The encoder by a loop over the bag, in the memory of 16 instances."""
        features = plg.map(*plg.from_module(self.encoder), bag, chunk_size=16, batched=True)
        return self.judge(features)

    def plain(self, bag: Tensor) -> Tensor:
        return self.judge(torch.cat([self.encoder(part) for part in bag.split(16)]))


def bags(images: Tensor, digits: Tensor, how_many: int, generator: torch.Generator) -> list[Bag]:
    """Bags of 30 to 60 digits; every other one holds four nines."""
    others, nines = (digits != NINE).nonzero()[:, 0], (digits == NINE).nonzero()[:, 0]

    def pick(pool: Tensor, k: int) -> Tensor:
        return pool[torch.randint(len(pool), (k,), generator=generator)]

    found = []
    for i in range(how_many):
        k = int(torch.randint(30, 57, (), generator=generator))
        index = torch.cat([pick(others, k), pick(nines, 4)]) if i % 2 else pick(others, k)
        found.append((images[index], digits[index], float(i % 2)))
    return found


def main(quick: bool, picture: Path) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data = load_digits()
    images, digits = torch.tensor(data.images[:, None] / 16, dtype=torch.float32), torch.tensor(data.target)
    n_bags, epochs = (8, 1) if quick else (80, 10)
    training = bags(images[:1200], digits[:1200], n_bags, generator)
    held_out = bags(images[1200:], digits[1200:], 40, generator)
    model = Model()

    large = torch.cat([bag for bag, _, _ in training])[:1024]
    params = list(model.parameters())

    def gradient(judged: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.softplus(-judged), params)

    print(f"a bag of {len(large)}: {compare(lambda: gradient(model(large)), lambda: gradient(model.plain(large)))}")

    optimiser = torch.optim.Adam(params, 4e-3)
    losses = []
    for epoch in range(epochs):
        for bag, _, label in training:
            optimiser.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(bag), torch.tensor(label))
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        with torch.no_grad():
            right = sum((model(bag) > 0) == bool(label) for bag, _, label in held_out)
        print(f"epoch {epoch + 1}: loss {sum(losses[-n_bags:]) / n_bags:.3f}, {right} of {len(held_out)} bags right")
    draw(picture, model, held_out[1], losses)


def draw(picture: Path, model: Model, bag: Bag, losses: list[float]) -> None:
    """The instances of one bag that the attention looks at most."""
    with torch.no_grad():
        weights = model.weights(model.encoder(bag[0]))
    figure = plt.figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.4])
    left.subplots().plot(losses, lw=0.5)
    left.suptitle("loss of each bag")
    for axis, i in zip(right.subplots(2, 5).flat, weights.argsort(descending=True), strict=False):
        axis.imshow(bag[0][i, 0], cmap="gray_r")
        axis.set(title=f"{weights[i]:.2f}", xticks=[], yticks=[])
    right.suptitle(f"where the attention of a bag of {len(weights)} goes")
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
