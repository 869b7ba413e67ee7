"""A loop's outputs and its pullback, with live parameters as constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from pure_loopgrad import _run, _tree
from pure_loopgrad._accumulate import recordable
from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._eager import eager
from pure_loopgrad._effects import enclosing
from pure_loopgrad._levels import is_wrapped, without_graph
from pure_loopgrad._linearise import Mask
from pure_loopgrad._loop import pull_back_loop
from pure_loopgrad._loss import Gradients
from pure_loopgrad._reduce import Body, Options, Prepared, Reduce, Weights, prepare
from pure_loopgrad._throughput import resolved
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import LoopValueError


@eager
def vjp(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    reduce: Reduce = "stack",
    weights: Weights = None,
    grad_weights: Weights = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: _run.Run | None = None,
) -> tuple[PyTree, Callable[[PyTree], tuple[PyTree, PyTree]]]:
    """The loop's outputs and its pullback; mirrors `torch.func.vjp`, and builds no graph for more than one chunk.

    Args:
        body: see `plg.map`.
        params: any pytree. Live parameters count as constants: the results carry no graph of ordinary autograd. Where
            some leaf requires grad, those that do not are frozen.
        xs: a pytree with a leading axis of length n on its tensors.
        reduce: `"stack"` as `plg.map`, `"sum"` as `plg.sum`, `"mean"` as `plg.mean`.
        weights: of a mean; see `plg.mean`.
        grad_weights: see `plg.map`.
        chunk_size: see `plg.map`.
        batched: see `plg.map`.
        randomness: see `plg.map`.
        run: see `plg.map`.

    Returns:
        ys: what the loop returns.
        pullback: `pullback(dys) -> (dparams, dxs)`, with the structures of params and xs, None for leaves without a
            gradient. A leaf of dys may be None for zero. It may be called any number of times; each runs the loop.

    Raises:
        LoopValueError: cotangents of another structure, shape or dtype than the outputs.
        LoopGradError: see `plg.map`.

    Memory: inputs, outputs, two copies of params, one chunk. Time: n F, and n (F + B) for each call of the pullback.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> ys, pullback = plg.vjp(lambda w, x: w * x, torch.tensor(2.0), torch.arange(3.0))
        >>> pullback(torch.ones(3))
        (tensor(3.), tensor([2., 2., 2.]))
    """
    options = Options(reduce, weights, grad_weights, chunk_size, batched, randomness, run)
    prepared, wrt = prepare_without_graph(body, params, xs, options, (0, 1))
    prepared = prepared.saving(wrt)
    raw = prepared.run()
    ys = prepared.finish(raw)

    @eager
    def pullback(dys: PyTree) -> tuple[PyTree, PyTree]:
        cotangents = prepared.raw_cotangents(raw, _cotangent_leaves(ys, dys))
        return prepared.gradient_trees(pull_back_loop(prepared.loop, prepared.inputs, wrt, cotangents))

    return ys, pullback


def prepare_without_graph(
    body: Body, params: PyTree, xs: PyTree, options: Options, argnums: tuple[int, ...]
) -> tuple[Prepared, Mask]:
    """The loop with live parameters as constants (see `as_constant`), and which of its inputs are differentiated."""
    if isinstance(options.weights, Tensor):
        options = replace(options, weights=as_constant(options.weights))
    prepared = prepare(body, params, xs, resolved(body, params, xs, options))
    prepared.loop.trace.differentiates = True
    over_params = [0 in argnums and marked for marked in not_frozen(prepared.consts)]
    n_xs = prepared.xs_skeleton.n_tensors  # weights may stand behind them
    over_xs = [1 in argnums and i < n_xs and _tree.is_differentiable(t) for i, t in enumerate(prepared.xs)]
    constant = replace(
        prepared, consts=[as_constant(t) for t in prepared.consts], xs=[as_constant(t) for t in prepared.xs]
    )
    return constant, (*over_params, *over_xs)


def as_constant(t: Tensor) -> Tensor:
    """A live parameter as a constant; but inside the body of another loop, which differentiates what that computes."""
    return t if enclosing() else recordable(without_graph(t))


def not_frozen(consts: Sequence[Tensor]) -> list[bool]:
    """Which tensors of params are differentiated.

    Where some leaf requires grad, those that do not are frozen: that is how torch.nn freezes a layer. Inside the body
    of another loop it is that loop's business which of them require grad, and it differs from pass to pass.
    """
    live = not enclosing() and any(t.requires_grad and not is_wrapped(t) for t in consts)
    return [_tree.is_differentiable(t) and (not live or t.requires_grad or is_wrapped(t)) for t in consts]


def _cotangent_leaves(ys: PyTree, dys: PyTree) -> Gradients:
    """The cotangents in the order of the outputs' leaves; None stands for zero.

    Raises:
        LoopValueError: the structure, a shape or a dtype differs from the output's.
    """
    leaves, skeleton = _tree.split(ys)
    try:
        cotangents = cast(Gradients, skeleton.spec.flatten_up_to(dys))
    except ValueError as error:
        raise LoopValueError(f"the cotangents do not have the structure of the outputs: {error}") from None
    for path, y, dy in zip(skeleton.tensor_paths("dys"), leaves, cotangents, strict=True):
        if dy is not None and _tree.is_differentiable(y) and (dy.shape, dy.dtype) != (y.shape, y.dtype):
            raise LoopValueError(
                f"{path} has {_tree.describe(dy)}, but a cotangent is like its output: {_tree.describe(y)}"
            )
    return cotangents
