"""A recomputation stops before its last contraction, where nothing but that contraction's inputs is needed backward.

A matrix product or a convolution keeps its inputs for its derivative, not its result. Where a body ends in one, and
nothing follows that reads it, the second pass of a loop needs the node that autograd records for it, and not its value:
an iteration costs 2F + B less one layer, as under `torch.utils.checkpoint`, which stops early too.

The first chunk of a pass is recorded, to see where its last contraction stands and what follows. In later chunks that
contraction returns a tensor without data, of the shape that it had, which only the operations that were recorded may
take. Whatever else asks for its value is answered by running the chunk again, in full, as are all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from pure_loopgrad._counting import id_of
from pure_loopgrad._derived import RunBody
from pure_loopgrad._modes import OperationMode
from pure_loopgrad._trace import Trace
from pure_loopgrad._user import Tensors
from pure_loopgrad.errors import ImpureBodyError

aten = torch.ops.aten
CONTRACTIONS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
# what may follow: operations that keep none of their inputs for their derivative
FOLLOWERS = {
    *(aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.permute.default, aten.t.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.transpose.int, aten.expand.default),
    *(aten.select.int, aten.slice.Tensor, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
    *(aten.neg.default, aten.add.Tensor, aten.sub.Tensor, aten._to_copy.default, aten.clone.default),
    *(aten.mul.Scalar, aten.div.Scalar),
}
FEWEST_CHUNKS = 4  # else the one that is recorded is not worth it
# A mode sees every operation of a chunk, at some microseconds each: that many floating-point operations take longer.
WORTHWHILE = {"cpu": 1e7, "other": 1e9}


def may_stop(trace: Trace, n_chunks: int) -> bool:
    """Whether a chunk of the pass that starts now may be run in part, and it may be worth it."""
    return not trace.examines_all and trace.repeats and n_chunks >= FEWEST_CHUNKS


class Layout(NamedTuple):
    """All of a tensor but its data."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int

    @classmethod
    def of(cls, t: Tensor) -> Layout:
        return cls(t.shape, t.stride(), t.dtype, t.device, int(t.storage_offset()))


class Step(NamedTuple):
    """One operation of a chunk, its tensors as `Layout`."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]  # without tensors, in all of these operations
    output: Layout

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Step:
        return cls(func, _described(args), kwargs, Layout.of(output))

    def repeated_by(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether it is the same operation of the same kind of tensors."""
        return func is self.func and kwargs == self.kwargs and _described(args) == self.args

    @property
    def work(self) -> float:
        """The floating-point operations of a contraction."""
        shapes = [leaf.shape if isinstance(leaf, Layout) else leaf for leaf in self.args]
        return float(flop_registry[self.func.overloadpacket](*shapes, out_val=self.output.shape))


class NotComputed(Tensor):
    """What a contraction would have returned: a shape, a place in the graph, and no data."""

    @staticmethod
    def __new__(cls, layout: Layout) -> NotComputed:
        made: NotComputed = Tensor._make_wrapper_subclass(  # the way that torch's notes on extending it give
            cls,
            layout.shape,
            strides=layout.strides,
            storage_offset=layout.offset,
            dtype=layout.dtype,
            device=layout.device,
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]  # never returns
        raise ImpureBodyError(
            f"{func} asks for an output of the body that its recomputation leaves out, as no derivative needs it. Has "
            f"the body kept its output somewhere? Return it instead, or run with check='all', which computes everything"
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ImpureBodyError("the data of an output of the body that its recomputation leaves out")

    data_ptr = _refuse
    __dlpack__ = _refuse


class Recording(OperationMode):
    """Follows the operations of a chunk, and notes its last contraction with those that follow it.

    Attributes:
        count: how many operations there were.
        start: the number of the last contraction.
        tail: it and what follows; empty once its value was read.
        made: the storages of what these return and was made of it.
        reached: whether an output of the chunk is among them. Else something takes them that is not seen here, as
            functions that the user has compiled.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.count = self.start = 0
        self.tail: list[Step] = []
        self.made: set[int] = set()
        self.reached = False

    def around(self, base: RunBody) -> RunBody:
        """The same as `base`, recorded."""

        def run(consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
            with self:
                sums, stacks = base(consts, xs)
            self.reached = self._is_made_of_it([y for y in (*sums, *stacks) if y.layout is torch.strided])
            return sums, stacks

        return run

    def handle(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if self.trace.comparing:
            return out
        noted = (func in CONTRACTIONS or (self.tail and func in FOLLOWERS)) and _are_strided([*args, out])
        if not noted or func in CONTRACTIONS:
            self.start, self.tail, self.made = self.count, [], set()
        if noted:
            self.tail.append(Step.of(func, args, kwargs, out))
            if func in CONTRACTIONS or self._is_made_of_it(args):
                self.made.add(id_of(out.untyped_storage()))
        self.count += 1
        return out

    def _is_made_of_it(self, values: Sequence[Any]) -> bool:
        """Whether some of these are the contraction's result, or made of it within sight."""
        return any(id_of(v.untyped_storage()) in self.made for v in values if isinstance(v, Tensor))

    @property
    def pays(self) -> bool:
        """Whether the contraction takes longer than seeing every operation of a chunk, to leave it out."""
        if not self.tail or not self.reached:
            return False
        return self.tail[0].work >= self.count * WORTHWHILE.get(self.tail[0].output.device.type, WORTHWHILE["other"])


class Stopping(OperationMode):
    """Runs a chunk but for its last contraction, the operation number `start`, and for those after it that take it."""

    def __init__(self, start: int, tail: Sequence[Step]) -> None:
        super().__init__()
        self.start = start
        self.tail = tail
        self.now = -1
        self.needed = False  # kept here as well, since a body may catch what is raised

    def around(self, base: RunBody) -> RunBody:
        """The same as `base` for one chunk after the other, each stopped."""

        def run(consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
            self.now, self.needed = -1, False
            with self:
                return base(consts, xs)

        return run

    def handle(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.now += 1
        taken = NotComputed in types
        if self.now != self.start and not taken:
            return func(*args, **kwargs)
        i = self.now - self.start
        expected = self.tail[i] if 0 <= i < len(self.tail) else None
        if expected and expected.repeated_by(func, args, kwargs):
            return NotComputed(expected.output)
        self.needed |= taken
        return func(*args, **kwargs)  # raises, where something is taken that has no value


def _are_strided(values: Sequence[Any]) -> bool:
    return all(v.layout is torch.strided for v in values if isinstance(v, Tensor))


def _described(args: Sequence[Any]) -> list[Any]:
    """Arguments with each tensor as its `Layout`; none of these operations takes tensors in a list."""
    return [Layout.of(a) if isinstance(a, Tensor) else a for a in args]
