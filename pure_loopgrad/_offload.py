"""Where a loop's kept carries lie while the backward runs: beside everything else, in CPU memory, or on disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad._levels import is_wrapped
from pure_loopgrad.errors import LoopTypeError, LoopValueError, OffloadError

Offload: TypeAlias = "str | os.PathLike[str] | None"


class Store(Protocol):
    """Takes the tensors of a carry and gives them back once."""

    def put(self, carry: list[Tensor]) -> Any:
        """Keeps a carry; returns what `take` wants."""

    def take(self, kept: Any) -> list[Tensor]:
        """The carry, which is kept no longer."""


class InPlace:
    """Keeps carries as they are."""

    def put(self, carry: list[Tensor]) -> list[Tensor]:
        return carry

    def take(self, kept: list[Tensor]) -> list[Tensor]:
        return kept


class OnCpu:
    """Keeps carries of another device in CPU memory."""

    def put(self, carry: list[Tensor]) -> list[tuple[Tensor, torch.device]]:
        return [(t.to("cpu"), t.device) for t in carry]

    def take(self, kept: list[tuple[Tensor, torch.device]]) -> list[Tensor]:
        return [t.to(device) for t, device in kept]


@dataclass(frozen=True)
class OnDisk:
    """Keeps each carry in a file of its own, which is deleted when it is taken."""

    folder: Path
    numbers: Iterator[int]

    def put(self, carry: list[Tensor]) -> Path:
        if any(map(is_wrapped, carry)):
            raise LoopValueError("carries under torch.vmap cannot be kept on disk: use offload='cpu', or none")
        path = self.folder / f"{next(self.numbers)}.pt"
        try:
            torch.save(carry, path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as either
            raise OffloadError(
                f"a carry could not be written to {self.folder} ({error}); no gradient was computed. Make room, keep "
                f"fewer carries (checkpoints=), or offload elsewhere"
            ) from error
        return path

    def take(self, kept: Path) -> list[Tensor]:
        carry: list[Tensor] = torch.load(kept, weights_only=True)
        kept.unlink()
        return carry


def check_offload(offload: Offload) -> Offload:
    """Refuses what is neither None, `"cpu"`, nor a folder that exists.

    Raises:
        LoopTypeError: no string and no path.
        LoopValueError: there is no such folder.
    """
    if offload is None or offload == "cpu":
        return offload
    if not isinstance(offload, (str, os.PathLike)):
        raise LoopTypeError(f"offload={offload!r}: expected None, 'cpu' or a folder")
    if not Path(offload).is_dir():
        raise LoopValueError(f"offload={os.fspath(offload)!r}: there is no such folder")
    return offload


@contextmanager
def opened(offload: Offload) -> Iterator[Store]:
    """A store for one backward; whatever happens, nothing of it is left on disk."""
    if offload is None:
        yield InPlace()
    elif offload == "cpu":
        yield OnCpu()
    else:
        with _new_folder(offload) as folder:
            yield OnDisk(Path(folder), count())


def _new_folder(offload: str | os.PathLike[str]) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="pure_loopgrad-", dir=offload)
    except OSError as error:  # the user's folder is gone since the forward, or cannot be written to
        raise OffloadError(
            f"no folder for carries could be made in {os.fspath(offload)} ({error}); no gradient was computed"
        ) from error
