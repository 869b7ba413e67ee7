"""Inputs of a loop to which nothing leads back: not even a zero must go on from there, as behind it may stand the root
of zero, whose derivative is infinite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pure_loopgrad._effects import enclosing
from pure_loopgrad._linearise import Mask, put
from pure_loopgrad._user import Tensors, Terms


@dataclass
class Missing:
    """Which of a loop's gradients are None in each of its chunks that has run."""

    found: set[int] | None = None  # by their places among the marked inputs; None before the first chunk

    def note(self, grads: Terms) -> None:
        """Takes the gradients of one chunk into account."""
        if self.found is None or self.found:
            now = {i for i, g in enumerate(grads) if g is None}
            self.found = now if self.found is None else self.found & now

    def left_out(self, inputs: Tensors, wrt: Mask, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs without the missing ones; but a leaf of the user's own gets its zeros."""
        missing = put([False] * len(wrt), wrt, [i in (self.found or ()) for i in range(sum(wrt))])
        inside = bool(enclosing())
        triples = zip(missing, inputs, grads, strict=True)
        return [None if m and (inside or t.grad_fn is not None) else g for m, t, g in triples]
