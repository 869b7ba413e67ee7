"""What is to be reconstructed: the loop's inputs, how one element's trace becomes an image, the target.

The simulated ring is recorded with the very physics that reconstructs it, which flatters every method alike. The
recording is real; its target is the image from all its transmit events, its input a few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pure_loopgrad.demo.config import Config, InputError
from pure_loopgrad.demo.physics import Array, Ring
from pure_loopgrad.demo.recording import Recording, read_recording

WINDOW_MM = (12.0, 36.0)  # of the recording: below the dead time, above the back wall, around the notch
ACROSS_MM = 12.0
RING_MM = 10.0  # half the width of the ring's image


@dataclass(frozen=True)
class Problem:
    """One reconstruction.

    Attributes:
        xs: (traces, positions), with a leading axis over the elements used.
        image: `image(c, x)`: one element's trace to its images (batch, H, W).
        target: (batch, H, W).
        speed: the speed of sound to start from, in m/s.
        title: for reports.
        extent: left, right, lower and upper edge of the images in mm.
    """

    xs: tuple[Tensor, Tensor]
    image: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
    target: Tensor
    speed: float
    title: str
    extent: tuple[float, float, float, float]

    @property
    def n(self) -> int:
        """The number of iterations of the loop."""
        return len(self.xs[0])

    def first(self, n: int) -> Problem:
        """The same with only the first n elements."""
        return replace(self, xs=(self.xs[0][:n], self.xs[1][:n]))


def make_problem(config: Config) -> Problem:
    """The problem that a configuration describes; deterministic, so that child processes agree."""
    return ring_problem(config) if config.data is None else recording_problem(config, read_recording(config.data))


def vessels(size: int, batch: int) -> Tensor:
    """(batch, size, size) in [0, 1]: crops of scikit-image's CC0 retina, its vessels by a difference of Gaussians."""
    from skimage.data import retina
    from skimage.filters import difference_of_gaussians
    from skimage.transform import resize

    green = retina()[..., 1] / 255.0
    dark = difference_of_gaussians(-green, 2, 12).clip(min=0)
    corners = [(300, 300), (300, 650), (620, 300), (620, 650)][:batch]
    crops = [resize(dark[r : r + 440, c : c + 440], (size, size), anti_aliasing=True) for r, c in corners]
    images = torch.stack([torch.from_numpy(crop / crop.max()) for crop in crops])
    return images.float()


def ring_problem(config: Config) -> Problem:
    """A photoacoustic sinogram of the vessels, in water."""
    speed = 1500.0
    ring = Ring.around(config.size, config.elements, 2e-3 * RING_MM)
    target = vessels(config.size, config.batch)
    used = config.used(config.elements)
    sinogram = ring.record(target, torch.tensor(speed))[used]
    sinogram = sinogram / sinogram.std()

    def image(c: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        trace, sensor = x
        return ring.image(trace, sensor, c).reshape(-1, config.size, config.size)

    title = f"photoacoustic ring, {config.elements} sensors (simulated and reconstructed with the same physics)"
    extent = (-RING_MM, RING_MM, RING_MM, -RING_MM)
    return Problem((sinogram, ring.sensors[used]), image, target, speed, title, extent)


def array_for(recording: Recording, size: int) -> Array:
    """The pixels of the recording's images: `size` across and `size` along travel time.

    Raises:
        InputError: nothing was recorded at some of these times.
    """
    low, high = (2e-3 * z / recording.velocity for z in WINDOW_MM)
    first, last = recording.start, recording.start + recording.dt * (recording.traces.shape[-1] - 1)
    if first > low or last < high:
        recorded, needed = (f"{1e6 * a:.2f} to {1e6 * b:.2f} us" for a, b in ((first, last), (low, high)))
        raise InputError(f"the recording lasts from {recorded}, the image needs {needed}")
    travel, across = torch.meshgrid(
        torch.linspace(low, high, size), torch.linspace(-1e-3 * ACROSS_MM, 1e-3 * ACROSS_MM, size), indexing="ij"
    )
    return Array(recording.elements, across.flatten(), travel.flatten(), recording.dt, recording.start)


def recording_problem(config: Config, recording: Recording) -> Problem:
    """Few transmit events to the image from all of them."""
    n = len(recording.elements)
    used = config.used(n)
    array = array_for(recording, config.size)
    real = recording.traces[:, :1] / recording.traces.std()  # one image an event, from the real part

    def image(c: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
        traces, transmitter = x
        return array.image(traces, transmitter, c).reshape(-1, config.size, config.size) / n

    speed = torch.tensor(recording.velocity)
    full = sum((image(speed, x) for x in zip(real, recording.elements, strict=True)), torch.zeros(()))
    target = F.normalize(full.flatten(1), dim=1).reshape(full.shape) * config.size
    title = f"recording, {len(range(n)[used])} of {n} transmit events"
    extent = (-ACROSS_MM, ACROSS_MM, WINDOW_MM[1], WINDOW_MM[0])
    return Problem((real[used], recording.elements[used]), image, target, recording.velocity, title, extent)
