"""DP-SGD: each example's gradient clipped, their sum with noise (Abadi et al., arXiv 1607.00133, algorithm 1).

    python examples/dp_sgd.py [--quick]

The gradients of single examples are clipped and added up as they are computed, a chunk at a time, and never stored:
the memory is that of one chunk, where stacking them takes that of the whole batch. The privacy that a number of steps
costs is for an accountant to say (Opacus has one); this shows the step.
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

CLIP = 1.0
Params = dict[str, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.Tanh(),
        nn.Linear(64, 10),
    )  # fmt: skip


def main(quick: bool, picture: Path) -> None:
    data = load_digits()
    images, digits = torch.tensor(data.images[:, None, None] / 16, dtype=torch.float32), torch.tensor(data.target)
    batch, steps = (64, 2) if quick else (512, 60)
    model, params = plg.from_module(network())
    params = {k: p.detach().clone() for k, p in params.items()}

    def loss(p: Params, example: tuple[Tensor, Tensor]) -> Tensor:
        image, digit = example  # (1, 1, 8, 8), ()
        return F.cross_entropy(model(p, image)[0], digit)

    clip = plg.folds.clip_norm(CLIP)

    def clipped(p: Params, examples: tuple[Tensor, Tensor], noise: float, generator: torch.Generator) -> Params:
        """The clipped sum with noise of standard deviation noise * CLIP."""
        fold = plg.folds.noisy_sum(noise * CLIP, generator)
        return plg.fold_grads(loss, p, examples, fold, transform=clip, chunk_size=32)

    def stacked(p: Params, examples: tuple[Tensor, Tensor]) -> Params:
        """Plainly: all gradients, their norms, and the sum of the clipped ones."""
        grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(p, examples)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (CLIP / (norms + 1e-6)).clamp(max=1)
        return {k: torch.einsum("n,n...->...", factors, g) for k, g in grads.items()}

    examples = images[:batch], digits[:batch]
    generator = torch.Generator().manual_seed(0)
    found = compare(lambda: clipped(params, examples, 0.0, generator), lambda: stacked(params, examples))
    print(f"{batch} examples, no noise, against all gradients stacked: {found}")

    paths = {}
    for noise in (0.0, 1.0, 4.0):
        p, generator = dict(params), torch.Generator().manual_seed(1)
        paths[noise] = []
        for _ in range(steps):
            drawn = torch.rand(1500, generator=generator) < batch / 1500  # a Poisson sample, as the theory asks for
            total = clipped(p, (images[:1500][drawn], digits[:1500][drawn]), noise, generator)
            p = {k: v - 1.0 * total[k] / batch for k, v in p.items()}
            with torch.no_grad():
                right = model(p, images[1500:, 0]).argmax(1) == digits[1500:]
            paths[noise].append(right.float().mean().item())
        print(f"noise multiplier {noise}: {paths[noise][-1]:.1%} of held-out digits right after {steps} steps")
    draw(picture, paths)


def draw(picture: Path, paths: dict[float, list[float]]) -> None:
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for noise, accuracy in paths.items():
        axis.plot(accuracy, label=f"noise multiplier {noise}")
    axis.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    axis.legend()
    figure.savefig(picture, dpi=80)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv, picture=Path(__file__).with_suffix(".png"))
