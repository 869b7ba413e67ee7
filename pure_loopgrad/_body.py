"""A chunk of iterations of the user's body, as one body of flat tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._levels import active_levels, in_forward_mode
from pure_loopgrad._shapes import Outline, run_on_fakes
from pure_loopgrad._user import Tensors, UserBody
from pure_loopgrad.errors import LoopGradError, LoopTypeError, LoopValueError, add_note

Randomness = Literal["error", "different", "same"]
ChunkSize: TypeAlias = "int | Literal['auto'] | None"
VMAP_ADVICE = (
    "with chunk_size > 1 the body runs under torch.vmap. If torch cannot batch it (writing in place into a fresh "
    "tensor, .item(), control flow on data, an op without a batching rule), use chunk_size=1, or batched=True with a "
    "body that takes a chunk itself"
)


class ChunkBody(Protocol):
    """consts and a chunk of xs -> what is summed over the chunk, what is stacked along it."""

    @property
    def what(self) -> str:
        """What it computes, for messages."""

    @property
    def n_sums(self) -> int:
        """How many outputs are sums; known once the body has run."""

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]: ...

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        """The shapes that the call would return, for xs of no iterations."""

    def labels(self) -> Labels:
        """Names for messages; known once the body has run."""


@dataclass(frozen=True)
class Labels:
    """A name for every input and output of a body."""

    consts: list[str]
    xs: list[str]
    sums: list[str]
    stacks: list[str]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk of iterations as one body: vmapped, or handed over whole to a batched body, or just one."""

    body: UserBody
    reduce: Literal["sum", "stack"]
    how: Literal["one", "vmap", "batched"]
    randomness: Randomness
    weighted: bool = False  # whether the last of xs holds a weight for each iteration
    grad_weighted: bool = False  # whether one of xs, before the weights, scales each iteration's derivative
    what: ClassVar[str] = "forward pass"

    @property
    def n_sums(self) -> int:
        return 0 if self.reduce == "stack" else len(self.body.trace.shapes)

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        n = len(xs) - self.weighted - self.grad_weighted
        ys = self._outputs(consts, xs[:n])
        if self.grad_weighted:
            ys = [scale_derivative(y, self._like(y, xs[n])) for y in ys]
        if self.reduce == "stack":
            return [], [y.unsqueeze(0) for y in ys] if self.how == "one" else ys
        return [self.term(y, self._like(y, xs[-1]) if self.weighted else None) for y in ys], []

    def _like(self, y: Tensor, numbers: Tensor) -> Tensor:
        """One number an iteration, so that they multiply its outputs."""
        w = numbers.squeeze(0) if self.how == "one" else numbers.reshape(-1, *(1 for _ in y.shape[1:]))
        # a float64 weight must not widen a float32 image
        return w.to(accumulation_dtype(y.dtype)) if y.is_floating_point() else w

    def _outputs(self, consts: Tensors, xs: Tensors) -> list[Tensor]:
        if self.how == "batched":
            return self.accepted(self.body(*consts, *xs), xs[0].shape[0])
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

    def accepted(self, ys: list[Tensor], size: int) -> list[Tensor]:
        """The outputs of `size` iterations.

        Raises:
            LoopValueError: the body is a batched one, and an output does not have the leading axis of its chunk.
        """
        for i, y in enumerate(ys if self.how == "batched" else ()):
            if y.dim() == 0 or y.shape[0] != size:
                raise LoopValueError(
                    f"{self.body.output_paths()[i]} of a batched body has "
                    f"{_tree.describe(y)}, but a chunk of {size} iterations needs a leading axis of {size}"
                )
        return ys

    def labels(self) -> Labels:
        inputs, outputs = self.body.input_paths(), self.body.output_paths()
        n = self.body.args[0].n_tensors
        more = [*(["grad_weights"] if self.grad_weighted else []), *(["weights"] if self.weighted else [])]
        xs = [*inputs[n:], *more]
        return Labels(inputs[:n], xs, *([], outputs) if self.reduce == "stack" else (outputs, []))

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        if self.body.trace.outputs is None:
            given = xs[: len(xs) - self.weighted - self.grad_weighted]
            one = [x.new_empty((0, 1, *x.shape[1:])) for x in given] if self.how == "batched" else given
            run_on_fakes(self.body, consts, one)
        shapes = self.body.trace.shapes
        if self.reduce == "stack":
            return [], [m.with_axis(0, 0) for m in shapes]
        wide = [accumulation_dtype(m.dtype) for m in shapes]
        if self.weighted:  # integers become what their weights are
            wide = [d if d.is_floating_point or d.is_complex else xs[-1].dtype for d in wide]
        return [m._replace(dtype=d) for m, d in zip(shapes, wide, strict=True)], []

    def term(self, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """What an output adds to its sum."""
        y = y.to(accumulation_dtype(y.dtype))
        if weights is not None:
            # a weight of zero keeps out what is not finite, and its own derivative stays y
            y = torch.where((weights == 0) & ~torch.isfinite(y), 0, y) * weights
        return y if self.how == "one" else y.sum(0, dtype=y.dtype)


@dataclass(frozen=True, eq=False)
class Once:
    """One call as a loop of one iteration: everything is shared, every output is a sum of one term."""

    body: UserBody
    what: ClassVar[str] = "forward pass"

    @property
    def n_sums(self) -> int:
        return len(self.body.trace.shapes)

    def __call__(self, consts: Tensors, xs: Tensors) -> tuple[Tensors, Tensors]:
        return self.body(*consts), []

    def outline(self, consts: Tensors, xs: Tensors) -> Outline:
        return self.body.trace.shapes, []  # there is always the one iteration, so this is never asked first

    def labels(self) -> Labels:
        return Labels(self.body.input_paths(), [], self.body.output_paths(), [])


def scale_derivative(y: Tensor, w: Tensor) -> Tensor:
    """y, with w times its derivative, of any order and in either mode."""
    if not _tree.is_differentiable(y):
        return y
    if not torch.compiler.is_dynamo_compiling() and not (y.requires_grad or active_levels() > 0 or in_forward_mode()):
        return y  # nothing is differentiated
    still = y.detach()
    change = torch.where(torch.isfinite(still), y - still, 0)  # zero, but for its derivative
    return still + (change * w).to(y.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which contributions are added: float32 for half precision, a count for bools."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.int64 if dtype == torch.bool else dtype


def check_chunk_size(chunk_size: ChunkSize, n: int) -> int:
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
