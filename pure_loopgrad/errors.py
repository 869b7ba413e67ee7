"""What the library raises. Each error is a `LoopGradError` and also the builtin error that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pure_loopgrad._nonfinite import NonFinite

__all__ = [
    "CapturedTensorError",
    "DistributedError",
    "ImpureBodyError",
    "LoopGradError",
    "LoopTypeError",
    "LoopValueError",
    "NonFiniteError",
    "OffloadError",
    "ShapeInferenceError",
]


class LoopGradError(Exception):
    """The base of everything that pure_loopgrad raises on its own account."""


class LoopValueError(LoopGradError, ValueError):
    """An argument has the right type and a value that cannot be: a chunk size of 0, axes that disagree."""


class LoopTypeError(LoopGradError, TypeError):
    """An argument or a leaf of a pytree is of a kind that the call cannot take."""


class CapturedTensorError(LoopValueError):
    """The body reads a tensor that needs a gradient and was not given to it, so it would get none."""


class ImpureBodyError(LoopValueError):
    """The body did something else the second time, or changed one of its inputs in place."""


class NonFiniteError(LoopGradError, FloatingPointError):
    """A value became NaN or infinite under `plg.debug_nonfinite()`.

    Attributes:
        record: where, and from what; `record.save(path)` writes it with the inputs that reproduce it.
    """

    def __init__(self, record: NonFinite) -> None:
        super().__init__(f"{record}. The record of this exception holds the inputs")
        self.record = record


class ShapeInferenceError(LoopValueError):
    """A loop of no iterations could not find its outputs' shapes without running the body."""


class OffloadError(LoopGradError, OSError):
    """A kept carry could not be written to disk."""


class DistributedError(LoopGradError, RuntimeError):
    """Another rank of the group raised, or cannot be reached."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to somebody else's exception, where Python has notes (3.11 and newer)."""
    if hasattr(error, "add_note"):
        error.add_note(f"pure_loopgrad: {note}")
