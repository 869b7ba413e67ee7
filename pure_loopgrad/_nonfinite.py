"""The first value that is not finite: which iteration, which leaf, from what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._levels import is_batched
from pure_loopgrad.errors import NonFiniteError

Named = dict[str, Tensor]
Rerun = Callable[[int], tuple[Sequence[Tensor], Named]]


@dataclass(frozen=True)
class NonFinite:
    """Where a value that is not finite came up first.

    Attributes:
        iteration: the true index, also inside a chunk.
        phase: `"forward"`, `"backward"`, `"forward mode"`, or `"accumulation"`, where the terms are finite and their
            sum is not.
        leaf: the path of the output, or of what has this gradient.
        n_nan: how many entries of the leaf are NaN.
        n_inf: how many are infinite.
        inputs: what the iteration was given, by path, without graph: params, x or carry, cotangents.
    """

    iteration: int
    phase: str
    leaf: str
    n_nan: int
    n_inf: int
    inputs: Named

    def save(self, path: str | Path) -> None:
        """Writes the record, which `torch.load` reads as a dict."""
        torch.save({**vars(self)}, path)

    def __str__(self) -> str:
        bad = ", ".join(name for name, t in self.inputs.items() if not is_finite(t))
        given = f"it was given values that are not: {bad}" if bad else "all that it was given is finite"
        what = f"{self.leaf} has {self.n_nan} NaN and {self.n_inf} inf"
        return f"{what} in iteration {self.iteration} ({self.phase}); {given}"


def is_finite(t: Tensor) -> bool:
    """Whether all entries are numbers, below all transforms."""
    plain = torch.func.debug_unwrap(t)
    return not _tree.is_differentiable(plain) or bool(torch.isfinite(plain).all())


def first_bad(named: Iterable[tuple[str, Tensor]]) -> tuple[str, Tensor] | None:
    """The first tensor with an entry that is not finite."""
    return next(((name, t) for name, t in named if not is_finite(t)), None)


def refuse(iteration: int, phase: str, leaf: str, t: Tensor, inputs: Named) -> NoReturn:
    """Raises with the record."""
    plain = torch.func.debug_unwrap(t)
    kept = {name: torch.func.debug_unwrap(v).detach().clone() for name, v in inputs.items()}
    counts = int(torch.isnan(plain).sum()), int(torch.isinf(plain).sum())
    raise NonFiniteError(NonFinite(iteration, phase, leaf, *counts, kept))


def check_outputs(iterations: range, outputs: Named, inputs: Named, leading: int) -> None:
    """Raises if an output of the user's body is not finite; finds the iteration inside a chunk.

    Args:
        iterations: the chunk.
        outputs: by path.
        inputs: by path.
        leading: how many leading axes of outputs and of x are those of the chunk.
    """
    bad = first_bad(outputs.items())
    if bad is None:
        return
    leaf, t = bad
    finite = torch.isfinite(t.flatten(1) if leading and t.dim() > 1 else t.reshape(1, -1)).all(1)
    flags = torch.func.debug_unwrap(finite).reshape(-1)
    if len(flags) != len(iterations) or (len(flags) == 1 and not leading):  # under further transforms, or alone
        refuse(iterations.start, "forward", leaf, t, inputs)
    i = int(flags.int().argmin())
    one = {name: _entry(v, i, bool(leading) and name.startswith("x")) for name, v in inputs.items()}
    refuse(iterations[i], "forward", leaf, _entry(t, i, bool(leading)), one)


def _entry(t: Tensor, i: int, leading: bool) -> Tensor:
    return torch.func.debug_unwrap(t)[i] if leading or is_batched(t) else t


def check_derivative(
    iterations: range, phase: str, found: list[tuple[str, Tensor]], rerun: Rerun | None, inputs: Named
) -> None:
    """Raises if a chunk's derivative is not finite; runs its iterations one by one to find the one that is to blame.

    Args:
        iterations: the chunk.
        phase: of the record.
        found: the derivatives, by path.
        rerun: the derivatives of one iteration alone, in the same order, and its inputs by path; None for one step.
        inputs: of the whole chunk, by path.
    """
    bad = first_bad(found)
    if bad is None:
        return
    if rerun is not None:
        place = [name for name, _ in found].index(bad[0])
        for i, iteration in enumerate(iterations):
            tensors, one = rerun(i)
            if not is_finite(tensors[place]):
                refuse(iteration, phase, bad[0], tensors[place], one)
    refuse(iterations.start, phase, *bad, inputs)


def check_sums(iteration: int, totals: Sequence[tuple[str, Tensor]]) -> None:
    """Raises if a running sum of finite terms is not finite."""
    bad = first_bad(totals)
    if bad is not None:
        refuse(iteration, "accumulation", *bad, {})
