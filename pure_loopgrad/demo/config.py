"""The sizes of one run, checked; plain numbers, so that a child process can be given them as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


class InputError(Exception):
    """Something that the person who ran the command can put right; its text is one line."""


LEAST = {
    "size": 16,
    "elements": 2,
    "decimation": 1,
    "batch": 1,
    "channels": 1,
    "steps": 1,
    "seed": 0,
    "chunk_size": 1,
    "autofocus_steps": 1,
}


@dataclass(frozen=True)
class Config:
    """What to compute.

    Attributes:
        data: a recording, or None for the simulated ring.
        size: pixels along each side of an image.
        elements: sensors of the simulated ring; a recording has its own number.
        decimation: every how many elements one is used; None for all of the ring, a quarter of a recording's events.
        batch: how many images are reconstructed together.
        channels: width of the feature extractor.
        steps: training steps.
        seed: of the initial weights.
        chunk_size: iterations at a time in our loop.
        autofocus_steps: steps of the search for the speed of sound, with a recording.
    """

    data: str | None = None
    size: int = 208
    elements: int = 128
    decimation: int | None = field(default=None, metadata={"default": "1, with --data 4"})
    batch: int = 2
    channels: int = 12
    steps: int = 6
    seed: int = 0
    chunk_size: int = 1
    autofocus_steps: int = 7

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be.

        Raises:
            InputError: with the option and the value.
        """
        for name, low in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(f"--{name.replace('_', '-')} {value}: expected at least {low}")
        if self.seed >= 2**63:
            raise InputError(f"--seed {self.seed}: expected less than 2**63")
        if self.batch > 4:
            raise InputError(f"--batch {self.batch}: the default image has 4 crops")
        if self.data is None:
            self.used(self.elements)

    def used(self, n: int) -> slice:
        """Which of n elements the loop goes over.

        Raises:
            InputError: fewer than 2 are left.
        """
        usual = 1 if self.data is None else min(4, max(1, n // 2))
        step = self.decimation or usual
        if len(range(0, n, step)) < 2:
            raise InputError(f"--decimation {step} leaves fewer than 2 of {n} elements")
        return slice(0, n, step)

    def to_json(self) -> str:
        """For a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


QUICK = {"size": 64, "elements": 32, "batch": 1, "steps": 4, "autofocus_steps": 6}
