"""The training flags that modules had in a first pass, for the recomputation, whatever they are by then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

Layers: TypeAlias = tuple[nn.Module, ...]
Flags: TypeAlias = tuple[bool, ...]


def flags_of(layers: Layers) -> Flags:
    """Which of the layers are in train mode."""
    return tuple([layer.training for layer in layers])


@dataclass
class Modes:
    """What the calls of one first pass have found, by module."""

    noted: dict[nn.Module, tuple[Layers, Flags] | None] = field(default_factory=dict)

    def note(self, module: nn.Module, layers: Layers) -> None:
        """Notes the flags at a call; None where the body itself moves them, as it will do again."""
        now = layers, flags_of(layers)
        if self.noted.setdefault(module, now) != now:
            self.noted[module] = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Runs a block under the noted flags."""
        moved = [layer for found in self.noted.values() if found for layer in _differing(*found)]
        try:
            _flip(moved)
            yield
        finally:
            _flip(moved)


def _differing(layers: Layers, flags: Flags) -> list[nn.Module]:
    return [layer for layer, flag in zip(layers, flags, strict=True) if layer.training != flag]


def _flip(layers: list[nn.Module]) -> None:
    for layer in layers:
        layer.training = not layer.training
