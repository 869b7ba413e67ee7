"""Whether a body does the same thing again: what the first pass saw of it, and how a later one differs.

A later pass must compute what the first one did. Its outputs are compared by digest, the tensors that the body reads
without being given them by version counter, and generators that nobody replays by their state.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._capture import Known, Watch, version_of
from pure_loopgrad._memo import Kept
from pure_loopgrad._names import find_name
from pure_loopgrad._rng import GLOBALS
from pure_loopgrad._shapes import is_fake
from pure_loopgrad.errors import ImpureBodyError

SAMPLE = 256  # entries of an output that its digest sees
# No ordinary output is orthogonal to these. Made here, since a tensor made later may belong to a transform, and by
# Python, since an operation of torch on so many entries would start its threads, after which a fork may hang.
DIRECTIONS = torch.tensor(
    [[math.cos(i * i * k * 0.7548776662) for k in range(1, 9)] for i in range(1, SAMPLE + 1)],
    dtype=torch.float64,
    device="cpu",
)
MT19937_BYTES = 625 * 4  # 624 words and a position
REMEDY = (
    "The body has a side effect or reads something that changed: a Python number or object, a counter, a generator "
    "that is not replayed. Pass what changes in params or xs; plg.run(generators=(g,)) replays a generator. "
    "plg.run(check='off') turns this check off"
)


@dataclass(frozen=True)
class Digest:
    """A few numbers that say what an output's values are, whatever transforms are active."""

    numbers: list[float]
    scale: float
    tolerance: float

    @classmethod
    def of(cls, t: Tensor) -> Digest:
        """Projections of at most SAMPLE entries, averaged over the axes that transforms have added."""
        with torch.no_grad():
            real = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
            flat = real.reshape(-1)
            if flat.numel() == 0:
                return cls([], 0.0, 0.0)
            flat = flat[:: -(-flat.numel() // SAMPLE)]
            wide = flat.to(torch.float32 if flat.device.type == "mps" else torch.float64)
            both = torch.cat([wide @ DIRECTIONS[: wide.shape[0]].to(wide), wide.abs().sum().unsqueeze(0)])
            found = torch.func.debug_unwrap(both)
            *numbers, scale = found.reshape(-1, found.shape[-1]).mean(0).tolist()
        return cls(numbers, scale, _tolerance(t.dtype) / math.sqrt(wide.shape[0]))

    def agrees(self, other: Digest) -> bool:
        """Whether the same values may stand behind both; NaN agrees with NaN."""
        allowed = self.tolerance * max(self.scale, other.scale)
        pairs = zip([*self.numbers, self.scale], [*other.numbers, other.scale], strict=True)
        return all(abs(a - b) <= allowed or a == b or (a != a and b != b) for a, b in pairs)


def _tolerance(dtype: torch.dtype) -> float:
    """What two kernels may differ by, relative to the mean magnitude: half of the digits, 2 % in half precision."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1e-9
    return 4 * min(math.sqrt(torch.finfo(dtype).eps), 0.02)


@dataclass
class FirstSight:
    """What the first pass of a call saw in the iterations that are checked."""

    digests: dict[int, list[Digest]] = field(default_factory=dict)
    kept: dict[int, Kept] = field(default_factory=dict)
    captured: list[tuple[weakref.ref[Tensor], int]] = field(default_factory=list)  # with their versions
    unnamed: Known = field(default_factory=dict)  # leaves behind outputs, to which no name leads

    def differing(self, iteration: int, outputs: Sequence[Tensor]) -> tuple[int, Digest, Digest] | None:
        """The first output whose values are not those of the first pass, with both digests."""
        if any(map(is_fake, outputs)) or torch.compiler.is_compiling():
            return None
        found = [Digest.of(t) for t in outputs]
        first = self.digests.setdefault(iteration, found)
        pairs = enumerate(zip(first, found, strict=True))
        return next(((i, a, b) for i, (a, b) in pairs if not a.agrees(b)), None)

    def note_captured(self, watch: Watch) -> None:
        """Notes the constants that the first iteration used.

        Raises:
            ImpureBodyError: it changed one of them in place.
        """
        living = [(t, version_of(t), before) for ref, before in watch.constants if (t := ref()) is not None]
        for t, now, before in living:
            if now != before and (name := find_name(watch.body, t)) is not None:
                raise ImpureBodyError(
                    f"the body changes {name} ({_tree.describe(t)}) in place, which a recomputation would do again. "
                    f"Pass it in params and work on a copy, or carry it with plg.scan; for the buffers of a module "
                    f"use plg.from_module"
                )
        self.captured += [(weakref.ref(t), now) for t, now, _ in living]

    def refuse_changed_constants(self, body: Any) -> None:
        """Raises if a captured constant was changed in place since the first pass used it."""
        for ref, version in self.captured:
            t = ref()
            if t is not None and version_of(t) != version:
                raise ImpureBodyError(
                    f"{find_name(body, t) or 'a tensor'} ({_tree.describe(t)}), which the body reads without being "
                    f"given it, was changed in place between the first pass and its recomputation. Pass it in params"
                )


def refuse_changed_inputs(versions: Sequence[int], inputs: Sequence[Tensor]) -> None:
    """Raises if the body wrote into an input: the next pass would start from something else."""
    changed = [t for before, t in zip(versions, inputs, strict=True) if version_of(t) != before]
    if changed:
        raise ImpureBodyError(
            f"the body changed an input in place ({', '.join(map(_tree.describe, changed))}), which a recomputation "
            f"would see changed. Work on a copy: x.clone()"
        )


@contextmanager
def foreign_draws_refused(replayed: Sequence[Any]) -> Iterator[None]:
    """Raises where a first pass draws from Python's or numpy's global generator, unless they are replayed."""
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # numpy loads it at its first use, which may be inside the body
    names = [name for name in GLOBALS if sys.modules.get(name) not in (None, *replayed)]
    before = [_foreign_state(name) for name in names]
    yield
    for name, state in zip(names, before, strict=True):
        if _foreign_state(name) != state:
            raise ImpureBodyError(
                f"the body draws from the global generator of {name}, so a recomputation would see other numbers, and "
                f"the iterations of a vmapped chunk the same ones. Draw from torch, or pass the numbers in xs, or "
                f"replay it: plg.run(generators=({name},)). "
                f"plg.run(check='off') turns this check off"
            )


def _foreign_state(name: str) -> Any:
    if name == "random":
        return random.getstate()
    bits = sys.modules[name].get_bit_generator()
    if type(bits).__name__ != "MT19937":  # somebody has put another one in its place
        return repr(bits.state)
    return ctypes.string_at(bits.ctypes.state_address, MT19937_BYTES)  # numpy takes 40 us to copy a state
