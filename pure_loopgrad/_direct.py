"""The later chunks of a pass, with what the first one has settled decided once.

Behind a chunk of real work the processor's caches hold none of Python's own code and data, and a call there takes ten
times as long as in a loop that does nothing else: the layers between a loop and the user's function took 3 % of a pass
over a small CNN, 16 patches at a time. All that they ask has the same answer for every chunk but the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from pure_loopgrad._body import Chunk
from pure_loopgrad._compile import RunChunk
from pure_loopgrad._derived import RunBody
from pure_loopgrad._user import Tensors, Terms


@dataclass
class RunChunks:
    """A pass over the chunks of a body: the first one as it is, the others in fewer layers."""

    body: Chunk
    run: RunChunk = field(init=False)

    def __post_init__(self) -> None:
        self.run = self._first

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Terms, Terms]:
        return self.run(consts, xs)

    def _first(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        found = self.body(consts, xs)
        self.run = direct(self.body, xs[0].shape[0], recorded=False)
        return found


def direct(chunk: Chunk, size: int, *, recorded: bool) -> RunBody:
    """The same as `chunk` for later chunks of `size` iterations, outside of all transforms. Where they are `recorded`,
    what they return is expected to require grad, and else it is looked at.
    """
    user, trace = chunk.body, chunk.body.trace
    if (
        trace.examines_all
        or (trace.watching and not recorded)
        or trace.constants.plain
        or not trace.settled
        or chunk.how == "vmap"
        or chunk.weighted
        or chunk.grad_weighted
    ):
        return chunk
    one, stacked = chunk.how == "one", chunk.reduce == "stack"
    shape, dtype, device = None, None, None
    if trace.outputs is not None and trace.outputs.spec.is_leaf():
        shape, dtype, device = trace.shapes[0]
        shape = shape if one else (size, *shape)

    output = user.unchecked()

    def run(consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        x = [x.squeeze(0) for x in xs] if one else xs
        out = output(consts, x)
        usual = isinstance(out, Tensor) and out.requires_grad is recorded
        if usual and out.shape == shape and out.dtype == dtype and out.device == device:
            ys = [out]
        else:
            ys = chunk.accepted(user.accepted(out, [*consts, *x]), size)
        if stacked:
            return (), [y.unsqueeze(0) for y in ys] if one else ys
        return [chunk.term(y) for y in ys], ()

    return run
