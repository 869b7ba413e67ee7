"""The gradient noise scale of a small network while it learns: how large a batch is worth its price.

    python examples/noise_scale.py [--quick]

Up to the noise scale, twice the batch halves the number of steps; beyond it, it buys little (McCandlish et al.,
arXiv 1812.06162). It is the ratio of the variance of single gradients to the square of their mean, and grows as the
loss falls. One pass over the data gives it, with the norms of all gradients, and stores none of them.
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


def main(quick: bool, picture: Path) -> None:
    torch.manual_seed(0)
    data = load_digits()
    images, digits = torch.tensor(data.images / 16, dtype=torch.float32).flatten(1), torch.tensor(data.target)
    n, steps, every = (128, 20, 10) if quick else (1797, 400, 20)
    images, digits = images[:n], digits[:n]
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    body, params = plg.from_module(net)

    def loss(p: dict[str, Tensor], example: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(body(p, example[0]), example[1])

    def mean_and_variance() -> tuple[object, object]:
        stats = plg.grad_stats(loss, params, (images, digits), chunk_size=64)
        return stats.mean, stats.variance

    def plain() -> tuple[object, object]:
        detached = {k: p.detach() for k, p in params.items()}
        grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(detached, (images, digits))
        return {k: g.mean(0) for k, g in grads.items()}, {k: g.var(0) for k, g in grads.items()}

    print(f"mean and variance of {n} gradients, against stacking them: {compare(mean_and_variance, plain)}")

    optimiser = torch.optim.SGD(net.parameters(), 0.2)
    found = []
    for step in range(steps + 1):
        if step % every == 0:
            stats = plg.grad_stats(loss, params, (images, digits), chunk_size=64)
            value = F.cross_entropy(net(images), digits).item()
            found.append((step, value, stats.noise_scale.simple.item(), stats.norms))
            print(f"step {step:3d}: loss {value:.3f}, noise scale {found[-1][2]:8.1f}")
        index = torch.randint(n, (64,))
        optimiser.zero_grad()
        F.cross_entropy(net(images[index]), digits[index]).backward()
        optimiser.step()
    draw(picture, found)


def draw(picture: Path, found: list[tuple[int, float, float, Tensor]]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    axes[0].semilogy([s for s, *_ in found], [scale for *_, scale, _ in found], "o-")
    axes[0].set(xlabel="step", ylabel="noise scale (examples)")
    for step, _, _, norms in (found[0], found[-1]):
        axes[1].hist(norms.log10(), bins=40, alpha=0.6, label=f"step {step}")
    axes[1].set(xlabel="log10 of the norm of single gradients", ylabel="examples")
    axes[1].legend()
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
