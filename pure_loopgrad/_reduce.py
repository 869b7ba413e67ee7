"""A loop over independent iterations, made ready to run: pytrees flattened, weights checked, the reduction chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad import _run, _tree
from pure_loopgrad._body import Chunk, ChunkSize, Randomness, accumulation_dtype, check_chunk_size
from pure_loopgrad._levels import active_levels, is_wrapped, unpack_dual
from pure_loopgrad._loop import Loop
from pure_loopgrad._residuals import Residuals
from pure_loopgrad._shapes import is_fake
from pure_loopgrad._trace import Trace, first_pass_checked
from pure_loopgrad._tracing import is_traced
from pure_loopgrad._tree import PyTree
from pure_loopgrad._user import UserBody
from pure_loopgrad.errors import LoopTypeError, LoopValueError

Body: TypeAlias = Callable[[Any, Any], Any]
Reduce = Literal["stack", "sum", "mean"]
Weights: TypeAlias = "Tensor | Sequence[float] | None"


@dataclass(frozen=True)
class Options:
    """The keywords that all loops over independent iterations share."""

    reduce: Reduce = "stack"
    weights: Weights = None
    grad_weights: Weights = None
    chunk_size: ChunkSize = 1
    batched: bool = False
    randomness: Randomness = "error"
    run: _run.Run | None = None
    partial: bool = False  # the iterations are some of more, so that they may be none, or weigh nothing

    def __post_init__(self) -> None:
        if self.reduce not in ("stack", "sum", "mean"):
            raise LoopValueError(f"reduce={self.reduce!r}: expected 'stack', 'sum' or 'mean'")
        if self.weights is not None and self.reduce != "mean":
            raise LoopValueError(f"weights= goes with a mean, not with reduce={self.reduce!r}; scale inside the body")
        if self.randomness not in ("error", "different", "same"):
            raise LoopValueError(f"randomness={self.randomness!r}: expected 'error', 'different' or 'same'")


@dataclass(frozen=True)
class Prepared:
    """A loop and its tensors, and what turns its sums or stacks into the pytree that the caller gets."""

    loop: Loop
    consts: list[Tensor]
    xs: list[Tensor]
    params: _tree.Skeleton
    xs_skeleton: _tree.Skeleton
    chunk: Chunk
    reduce: Reduce
    total: Tensor | float | None  # what a mean divides by
    kept: Tensor | None = None  # which iterations are run at all, where some weigh nothing

    @property
    def inputs(self) -> list[Tensor]:
        return [*self.consts, *self.xs]

    def saving(self, wrt: Sequence[bool]) -> Prepared:
        """The same, with what `Run.save` allows kept of the first pass for gradients of the marked inputs."""
        loop, save = self.loop, self.loop.trace.save
        mask = tuple(w and _tree.is_differentiable(t) for w, t in zip(wrt, self.inputs, strict=True))
        if save in ("nothing", 0) or not any(mask) or active_levels() > 0 or loop.trace.debug_nonfinite:
            return self
        if torch.is_inference_mode_enabled():  # nothing can be recorded
            return self
        budget = save if isinstance(save, int) else inf
        kept = Residuals(self.chunk, mask, budget, -(-loop.n // loop.chunk_size))
        return replace(self, loop=replace(loop, residuals=kept))

    def run_live(self) -> list[Tensor]:
        """The same as `run`, for a backward through the inputs that require grad."""
        return self.saving([torch.is_grad_enabled() and t.requires_grad for t in self.inputs]).run()

    def run(self) -> list[Tensor]:
        """The raw outputs: wide sums, or stacks."""
        with first_pass_checked(self.loop.trace, self.inputs):
            sums, stacks = self.loop(self.consts, self.xs)
        return [*sums, *stacks]

    def finish(self, raw: Sequence[Tensor]) -> PyTree:
        """Raw outputs to the caller's pytree: a mean divides once, half precision is rounded once."""
        trace = self.loop.trace
        assert trace.outputs is not None
        if self.loop.body.n_sums == 0:
            return trace.outputs.fill(raw)
        return trace.outputs.fill([self._rounded(s, meta.dtype) for s, meta in zip(raw, trace.shapes, strict=True)])

    def gradient_trees(self, grads: Sequence[Tensor | None]) -> tuple[PyTree, PyTree]:
        """One gradient for each input as the trees of params and xs, with None where there is none."""
        n = len(self.consts)
        over_xs = grads[n:] if self.kept is None else [g if g is None else _spread(g, self.kept) for g in grads[n:]]
        return self.params.fill_only(grads[:n]), self.xs_skeleton.fill_only(over_xs)

    def raw_cotangents(self, raw: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Cotangents of the finished leaves to those of the raw outputs; None where there can be none."""
        return [
            None if c is None or not _tree.is_differentiable(r) else self._divided(c.to(r.dtype))
            for r, c in zip(raw, cotangents, strict=True)
        ]

    def _divided(self, t: Tensor) -> Tensor:
        return t if self.total is None else t / self.total

    def _rounded(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        value = self._divided(total)
        return value.to(dtype) if dtype.is_floating_point or dtype.is_complex else value


def prepare(body: Body, params: PyTree, xs: PyTree, options: Options) -> Prepared:
    """Flattens the pytrees, checks the arguments and makes the loop; runs nothing."""
    if not callable(body):
        raise LoopTypeError(f"body is a {type(body).__name__}; expected a function body(params, x)")
    consts, params_skeleton = _tree.split(params)
    x_tensors, x_skeleton = _tree.split(xs)
    n = _tree.leading_axis(x_tensors, x_skeleton)
    weighted = options.weights is not None
    total: Tensor | float | None = None
    kept: Tensor | None = None
    if options.grad_weights is not None:
        x_tensors = [*x_tensors, _grad_weights(options.grad_weights, n, x_tensors[0].device)]
    if options.reduce == "mean":
        x_tensors, total, kept = _weighed(x_tensors, n, options.weights, options.partial)
        n = x_tensors[0].shape[0]
    chunk_size = check_chunk_size(options.chunk_size, n)
    trace = Trace.begin([*consts, *x_tensors], (params_skeleton, x_skeleton), n, _run.current(options.run))
    user = UserBody(body, (params_skeleton, x_skeleton), trace, leading=int(options.batched))
    how: Literal["one", "vmap", "batched"] = "batched" if options.batched else "one" if chunk_size == 1 else "vmap"
    trace.sources = replace(trace.sources, vmapped=how == "vmap" and options.randomness != "same")
    scaled = options.grad_weights is not None
    chunk = Chunk(user, "stack" if options.reduce == "stack" else "sum", how, options.randomness, weighted, scaled)
    loop = Loop(chunk, n, chunk_size, len(consts), trace)
    if scaled and not (is_wrapped(factors := x_tensors[-2 if weighted else -1]) or is_traced()):
        loop = replace(loop, idle=tuple((factors == 0).tolist()))
    return Prepared(loop, consts, x_tensors, params_skeleton, x_skeleton, chunk, options.reduce, total, kept)


def _grad_weights(given: Tensor | Sequence[float], n: int, device: torch.device) -> Tensor:
    """One constant number an iteration."""
    w = given if isinstance(given, Tensor) else torch.tensor(given, device=device)
    if w.shape != (n,):
        raise LoopValueError(f"grad_weights has shape {tuple(w.shape)}, but xs has {n} iterations: expected ({n},)")
    return w.detach().to(device, torch.float64 if device.type != "mps" else torch.float32)


def _weighed(
    xs: list[Tensor], n: int, weights: Weights, partial: bool
) -> tuple[list[Tensor], Tensor | float, Tensor | None]:
    """The xs of a mean (with the weights behind them, if there are some), what to divide by, and which are kept.

    Iterations of weight zero are left out, so that one whose value or gradient is not finite adds nothing; unless the
    weights are themselves differentiated or batched, where the derivative at zero counts, or a graph records them,
    which must not depend on their values.
    """
    if weights is None:
        if n == 0 and not partial:
            raise LoopValueError("the mean of no iterations is not defined: xs has a leading axis of 0")
        return xs, float(n), None
    w = weights if isinstance(weights, Tensor) else torch.tensor(weights, dtype=torch.float64, device=xs[0].device)
    if w.shape != (n,):
        raise LoopValueError(f"weights has shape {tuple(w.shape)}, but xs has {n} iterations: expected ({n},)")
    asked = w.requires_grad or is_wrapped(w) or unpack_dual(w).tangent is not None
    if partial and asked:
        raise LoopValueError("the weights of a mean over ranks are constants: pass weights.detach()")
    if asked or is_traced():
        summed = w.to(accumulation_dtype(w.dtype)).sum()
        _check_totals(summed)
        return [*xs, w], summed, None
    total = w.sum(dtype=torch.float64).item()
    if not partial:
        checked_total(total)
    kept = w != 0
    if kept.all():
        return [*xs, w], total, None
    return [*(x[kept] for x in xs), w[kept]], total, kept


def _spread(grads: Tensor, kept: Tensor) -> Tensor:
    """The gradients of some iterations among zeros for the others."""
    places = kept.nonzero().squeeze(1)
    return grads.new_zeros((kept.shape[0], *grads.shape[1:])).index_copy(0, places, grads)


def _check_totals(total: Tensor) -> None:
    """Raises as `checked_total` does, for each of a batch of totals; not where there are no values yet."""
    if not (is_traced() or is_fake(total)):
        for value in torch.func.debug_unwrap(total).detach().flatten().tolist():
            checked_total(value)


def checked_total(total: float) -> float:
    """What a weighted mean divides by.

    Raises:
        LoopValueError: it is zero or no number.
    """
    if not isfinite(total) or total == 0:
        raise LoopValueError(f"the weights add up to {total}, so their mean is not defined")
    return total
