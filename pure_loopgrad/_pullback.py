"""The chunks of a loop's pullback: the first one as it is, the others in fewer layers, and in part where that pays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from pure_loopgrad._body import Chunk
from pure_loopgrad._compile import RunChunk
from pure_loopgrad._derived import RunBody, VjpBody
from pure_loopgrad._direct import direct
from pure_loopgrad._early_stop import Recording, Stopping, may_stop
from pure_loopgrad._trace import Trace
from pure_loopgrad._user import Tensors, Terms


@dataclass
class PullBackChunks:
    """The pullback of a loop's chunks on plain tensors, one after the other, in one pass; zeros are left out but for
    the first.
    """

    body: VjpBody
    trace: Trace
    n_chunks: int
    run: RunChunk = field(init=False)

    def __post_init__(self) -> None:
        self.run = self._recorded if may_stop(self.trace, self.n_chunks) else self._first

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Terms, Terms]:
        return self.run(consts, xs)

    def _first(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        found = self.body(consts, xs)
        self.run = self.body.terms(self._later(xs))
        return found

    def _recorded(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        recording = Recording(self.trace)
        sums, stacks = self.body.terms(recording.around(self.body.base))(consts, xs)
        later = self._later(xs)
        self.run = in_full = self.body.terms(later)
        if recording.pays:
            self.run = self._stopping(later, in_full, Stopping(recording.start, recording.tail))
        return self.body.parted(self.body.filled([*sums, *stacks], self.body.inputs(consts, xs)))

    def _later(self, xs: Tensors) -> RunBody:
        return direct(cast(Chunk, self.body.base), xs[0].shape[0], recorded=True)

    def _stopping(self, later: RunBody, in_full: RunChunk, stopping: Stopping) -> RunChunk:
        """Each chunk but for its last contraction, until some chunk needs that."""
        in_part = self.body.terms(stopping.around(later))

        def run(consts: Tensors, xs: Tensors) -> tuple[Terms, Terms]:
            try:
                found = in_part(consts, xs)
                if not stopping.needed:
                    return found
            except Exception:  # ways to ask for data raise errors of many kinds; one of the user's own is raised again
                if stopping.now < stopping.start:
                    raise
            self.run = in_full
            return in_full(consts, xs)

        return run
