"""Ultrasound by rays: times of flight, circular sums, delay-and-sum that is differentiable in the speed of sound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def interpolate(trace: Tensor, position: Tensor) -> Tensor:
    """Reads a signal between its samples; linear, so that the result has a gradient with respect to the position.

    Args:
        trace: (..., T) samples.
        position: (..., P) where to read, in samples; outside of the signal it is zero.

    Returns:
        (..., P).
    """
    last = trace.shape[-1] - 2
    below = position.detach().floor().clamp(0, last).long()
    fraction = position - below
    inside = (position >= 0) & (position <= last + 1)
    low, high = trace.gather(-1, below), trace.gather(-1, below + 1)
    return torch.where(inside, low + fraction * (high - low), 0)


@dataclass(frozen=True)
class Ring:
    """A photoacoustic ring: sensors around a square image, each recording what its circles pass through.

    Attributes:
        sensors: (n, 2) positions in m.
        pixels: (H * W, 2) positions in m.
        dt: sampling interval in s.
        samples: length of a trace.
    """

    sensors: Tensor
    pixels: Tensor
    dt: float
    samples: int

    @classmethod
    def around(cls, size: int, n: int, width: float = 0.02, c_min: float = 1400.0) -> Ring:
        """A ring of n sensors around an image of `size` squared pixels and `width` m."""
        angle = torch.arange(n) * (2 * math.pi / n)
        radius = 0.75 * width
        axis = (torch.arange(size) + 0.5) / size * width - width / 2
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        dt = width / size / 1500.0
        samples = int((radius + width) / c_min / dt) + 2
        sensors = radius * torch.stack([angle.cos(), angle.sin()], 1)
        return cls(sensors, torch.stack([x.flatten(), y.flatten()], 1), dt, samples)

    def positions(self, sensor: Tensor, c: Tensor) -> Tensor:
        """(P,) times of flight from every pixel to a sensor, in samples."""
        across, along = (self.pixels - sensor).unbind(-1)
        return torch.hypot(across, along) / (c * self.dt)

    def record(self, images: Tensor, c: Tensor) -> Tensor:
        """The sinogram (n, batch, T) of images (batch, H, W): the time derivative of the sums over circles."""
        return torch.stack([self._trace(images.flatten(1), self.positions(s, c)) for s in self.sensors])

    def _trace(self, flat: Tensor, position: Tensor) -> Tensor:
        below = position.floor().long()
        fraction = position - below
        sums = flat.new_zeros(flat.shape[0], self.samples)
        sums.index_add_(1, below, flat * (1 - fraction))
        sums.index_add_(1, below + 1, flat * fraction)
        return torch.diff(sums, dim=1, append=sums[:, -1:])

    def image(self, trace: Tensor, sensor: Tensor, c: Tensor) -> Tensor:
        """Delay-and-sum of one element: its trace (batch, T), laid back along the circles; (batch, P)."""
        position = self.positions(sensor, c).expand(trace.shape[0], -1)
        return interpolate(trace, position)


@dataclass(frozen=True)
class Array:
    """A linear array in contact with a block: element e transmits, all receive.

    Attributes:
        elements: (n,) positions along the array in m.
        across: (P,) pixel positions along the array in m.
        travel: (P,) pixel depths as two-way travel times in s, so that an echo keeps its row when c changes.
        dt: sampling interval in s.
        start: time of the first sample in s.
    """

    elements: Tensor
    across: Tensor
    travel: Tensor
    dt: float
    start: float = 0.0

    def positions(self, transmitter: Tensor, c: Tensor) -> Tensor:
        """(n, P) times of flight transmitter - pixel - receiver, in samples."""
        depth = c * self.travel / 2
        out = torch.hypot(self.across - transmitter, depth)
        back = torch.hypot(self.across - self.elements[:, None], depth)
        return ((out + back) / c - self.start) / self.dt

    def image(self, traces: Tensor, transmitter: Tensor, c: Tensor) -> Tensor:
        """Delay-and-sum of one transmit event over all receivers: traces (k, n, T) to (k, P)."""
        position = self.positions(transmitter, c)
        return torch.stack([interpolate(t, position).sum(0) for t in traces])
