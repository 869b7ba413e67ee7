"""The user's body as a function of flat tensors, and a chunk of iterations of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._capture import Watch, refuse_captured
from pure_loopgrad._replay import Ambient, rng_devices
from pure_loopgrad._shapes import Meta, Outline, run_on_fakes
from pure_loopgrad.errors import ImpureBodyError, LoopGradError, LoopTypeError, LoopValueError, add_note

Tensors: TypeAlias = Sequence[Tensor]
Randomness = Literal["error", "different", "same"]


class ChunkBody(Protocol):
    """consts and a chunk of xs -> what is summed over the chunk, what is stacked along it."""

    @property
    def n_sums(self) -> int:
        """How many outputs are sums; known once the body has run."""

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]: ...

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        """The shapes that the call would return, for xs of no iterations."""


@dataclass
class Trace:
    """What the first pass of one call finds out; the later passes read it. Made by each call, kept by its graph."""

    devices: tuple[torch.device, ...]
    ambient: Ambient
    grad_mode: bool
    n: int  # iterations of the whole loop, for messages
    outputs: _tree.Skeleton | None = None
    shapes: list[Meta] = field(default_factory=list)  # of one iteration's outputs
    draws: bool = False  # whether some iteration drew random numbers
    settled: bool = False  # whether the ambient settings are in force around the pass that runs now
    watching: bool = False  # whether captured tensors are looked for now
    iterations: range = range(0)  # the chunk that runs now, for messages

    @classmethod
    def begin(cls, tensors: Tensors, n: int) -> Trace:
        """A trace for a call that starts here and now."""
        devices = rng_devices(tensors)
        return cls(devices, Ambient.capture(devices), torch.is_grad_enabled(), n)


@dataclass(frozen=True, eq=False)
class UserBody:
    """`fn(params, x)` as a function of flat tensors; refuses outputs that differ from the first ones."""

    fn: Callable[..., Any]
    args: tuple[_tree.Skeleton, ...]  # the skeletons of params and of one x (or of a chunk of them)
    trace: Trace
    leading: int = 0  # how many leading axes of the outputs may differ from call to call

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        trace = self.trace
        settings = nullcontext() if trace.settled else trace.ambient.restored()
        # the caller's grad mode, as in a plain loop; inputs are detached, so that this records nothing by itself
        with settings, torch.set_grad_enabled(trace.grad_mode or torch.is_grad_enabled()):
            out = self._watched(tensors) if trace.watching else self.fn(*self._arguments(tensors))
            leaves, spec = _tree.numbers_to_tensors(out, tensors, "output")
        self._compare_with_first(leaves, spec)
        return leaves

    def _watched(self, tensors: Tensors) -> Any:
        with Watch(self.fn, tensors) as watch:
            out = self.fn(*self._arguments(tensors))
        refuse_captured(watch, tensors, _tree.split(out)[0])
        return out

    def _arguments(self, tensors: Tensors) -> list[Any]:
        parts, start = [], 0
        for skeleton in self.args:
            parts.append(skeleton.fill(tensors[start : start + skeleton.n_tensors]))
            start += skeleton.n_tensors
        return parts

    def _compare_with_first(self, leaves: list[Tensor], spec: _tree.TreeSpec) -> None:
        trace = self.trace
        found = [Meta(tuple(t.shape[self.leading :]), t.dtype, t.device) for t in leaves]
        if trace.outputs is None:
            trace.outputs, trace.shapes = _tree.Skeleton.of_tensors(spec), found
        elif trace.outputs.spec != spec:
            raise ImpureBodyError(
                f"the body's output changed its structure in {where(trace)}: first {trace.outputs.spec}, "
                f"now {spec}. {IMPURE}"
            )
        elif found != trace.shapes:
            paths = trace.outputs.tensor_paths("output")
            path, first, now = next((p, a, b) for p, a, b in zip(paths, trace.shapes, found, strict=True) if a != b)
            raise ImpureBodyError(
                f"{path} changed in {where(trace)}: first {_tree.describe(first)}, now {_tree.describe(now)}. {IMPURE}"
            )


IMPURE = (
    "Every iteration, and every recomputation of it, must return the same structure, shapes and dtypes: look for a "
    "side effect (a Python counter, a changed global) or an output whose shape depends on the data; pad the latter"
)
VMAP_ADVICE = (
    "with chunk_size > 1 the body runs under torch.vmap. If torch cannot batch it (writing in place into a fresh "
    "tensor, .item(), control flow on data, an op without a batching rule), use chunk_size=1, or batched=True with a "
    "body that takes a chunk itself"
)


def where(trace: Trace) -> str:
    """The iterations that run now, in words."""
    it = trace.iterations
    return f"iteration {it.start}" if len(it) == 1 else f"iterations {it.start} to {it.stop - 1}"


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of iterations as one body: vmapped, or handed over whole to a batched body, or just one."""

    body: UserBody
    reduce: Literal["sum", "stack"]
    how: Literal["one", "vmap", "batched"]
    randomness: Randomness
    weighted: bool = False  # whether the last of xs holds a weight for each iteration

    @property
    def n_sums(self) -> int:
        return 0 if self.reduce == "stack" else len(self.body.trace.shapes)

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        if self.reduce == "stack":
            ys = self._outputs(consts, xs)
            return [], [y.unsqueeze(0) for y in ys] if self.how == "one" else ys
        if not self.weighted:
            return [self._sum(y) for y in self._outputs(consts, xs)], []
        return [self._sum(y, xs[-1]) for y in self._outputs(consts, xs[:-1])], []

    def _outputs(self, consts: Tensors, xs: Tensors) -> list[Tensor]:
        if self.how == "batched":
            return self._checked(self.body(*consts, *xs), xs[0].shape[0])
        if self.how == "one":
            return self.body(*consts, *(x.squeeze(0) for x in xs))
        dims = (*(None for _ in consts), *(0 for _ in xs))
        try:
            return torch.func.vmap(self.body, dims, randomness=self.randomness)(*consts, *xs)
        except LoopGradError:
            raise
        except Exception as error:
            add_note(error, VMAP_ADVICE)
            raise

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        if self.body.trace.outputs is None:
            given = xs[:-1] if self.weighted else xs
            one = [x.new_empty((0, 1, *x.shape[1:])) for x in given] if self.how == "batched" else given
            run_on_fakes(self.body, consts, one)
        shapes = self.body.trace.shapes
        if self.reduce == "stack":
            return [], [m.with_axis(0, 0) for m in shapes]
        return [m._replace(dtype=accumulation_dtype(m.dtype)) for m in shapes], []

    def _sum(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        y = y.to(accumulation_dtype(y.dtype))
        if weights is not None:
            w = weights.squeeze(0) if self.how == "one" else weights.reshape(-1, *(1 for _ in y.shape[1:]))
            w = w.to(y.dtype) if y.is_floating_point() else w  # a float64 weight must not widen a float32 image
            # a weight of zero keeps out what is not finite, and its own derivative stays y
            y = torch.where((w == 0) & ~torch.isfinite(y), 0, y) * w
        return y if self.how == "one" else y.sum(0, dtype=y.dtype)

    def _checked(self, ys: list[Tensor], size: int) -> list[Tensor]:
        for i, y in enumerate(ys):
            if y.dim() == 0 or y.shape[0] != size:
                assert self.body.trace.outputs is not None
                raise LoopValueError(
                    f"{self.body.trace.outputs.tensor_paths('output')[i]} of a batched body has "
                    f"{_tree.describe(y)}, but a chunk of {size} iterations needs a leading axis of {size}"
                )
        return ys


@dataclass(frozen=True, eq=False)
class Once:
    """One call as a loop of one iteration: everything is shared, every output is a sum of one term."""

    body: UserBody

    @property
    def n_sums(self) -> int:
        return len(self.body.trace.shapes)

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        return self.body(*consts), []

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        return self.body.trace.shapes, []  # there is always the one iteration, so this is never asked first


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions are added: float32 for half precision, a count for bools."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.int64 if dtype == torch.bool else dtype


def check_chunk_size(chunk_size: int | None, n: int) -> int:
    """The number of iterations in a chunk; None is all of them.

    Raises:
        LoopTypeError: no integer.
        LoopValueError: less than 1.
    """
    if chunk_size is None:
        return max(n, 1)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise LoopTypeError(f"chunk_size={chunk_size!r}: expected a positive int, or None for one chunk of all")
    if chunk_size < 1:
        raise LoopValueError(f"chunk_size={chunk_size}: expected at least 1, or None for one chunk of all")
    return chunk_size
