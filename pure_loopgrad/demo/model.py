"""The model as pure functions: features of one element's image, a stack of them, a head that fuses the stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pure_loopgrad.demo.config import Config
from pure_loopgrad.demo.problem import Problem

Params = dict[str, Any]


def init_params(config: Config, problem: Problem) -> Params:
    """Weights of the feature extractor and of the head, and the speed of sound."""
    generator = torch.Generator().manual_seed(config.seed)

    def conv(inputs: int, outputs: int, gain: float = 1.0) -> dict[str, Tensor]:
        weight = torch.randn(outputs, inputs, 3, 3, generator=generator)
        return {"weight": gain * weight / (9 * inputs) ** 0.5, "bias": torch.zeros(outputs)}

    return {
        "speed": torch.tensor(problem.speed),
        "features": [conv(1, config.channels), conv(config.channels, config.channels), conv(config.channels, 1, 0.1)],
        "head": [conv(problem.n, 16, 0.3), conv(16, 1, 0.3)],
        "gain": torch.tensor(0.1),
    }


def convolve(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    """A 3 x 3 convolution that keeps the size."""
    return F.conv2d(x, layer["weight"], layer["bias"], padding=1)


def body(problem: Problem) -> Callable[[Params, Any], Tensor]:
    """One iteration: an element's trace to an image at the given speed of sound, and that to features (batch, H, W)."""

    def features(params: Params, x: Any) -> Tensor:
        image = problem.image(params["speed"], x)[:, None]
        first, second, last = params["features"]
        hidden = F.silu(convolve(second, F.silu(convolve(first, image))))
        return (image + convolve(last, hidden))[:, 0]

    return features


def reconstruct(params: Params, stack: Tensor) -> Tensor:
    """Fuses the features (n_elements, batch, H, W), as channels [batch, n_elements, H, W], into (batch, H, W)."""
    channels = stack.movedim(0, 1)
    first, last = params["head"]
    refined = convolve(last, F.silu(convolve(first, channels)))[:, 0]
    average: Tensor = params["gain"] * channels.mean(1)
    return average + refined


def criterion(problem: Problem) -> Callable[[Params, Tensor], Tensor]:
    """The loss on the reconstruction."""
    return lambda params, stack: F.mse_loss(reconstruct(params, stack), problem.target)
