"""The sizes of one run, checked; plain numbers, so that a child process can be given them as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


class InputError(Exception):
    """Something that the person who ran the command can put right; its text is one line."""


@dataclass(frozen=True)
class Config:
    """What to compute.

    Attributes:
        data: a recording, or None for the simulated ring.
        size: pixels along each side of an image.
        elements: sensors of the simulated ring; a recording has its own number.
        decimation: every how many elements one is used.
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
    decimation: int = 1
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
        least = {"size": 16, "elements": 2, "decimation": 1, "batch": 1, "channels": 1, "steps": 1, "chunk_size": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {low}")
        if self.batch > 4:
            raise InputError(f"--batch {self.batch}: the default image has 4 crops")
        if self.data is None and self.decimation > self.elements // 2:
            raise InputError(f"--decimation {self.decimation} leaves fewer than 2 of {self.elements} elements")

    def to_json(self) -> str:
        """For a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Config:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


QUICK = {"size": 64, "elements": 32, "batch": 1, "steps": 4, "autofocus_steps": 4}
