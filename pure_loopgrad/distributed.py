"""Loops whose iterations are spread over the processes of a torch.distributed group.

Each rank holds its own part of xs, of any length, also none; params are the same on all. Every function returns on
every rank what one process would return for all iterations, in the order of the ranks: no factor of the number of ranks
is left to anybody. All ranks call the same functions in the same order, and, where they differentiate, compute the same
loss of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pure_loopgrad import _run, _tree
from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._channel import Channel, Communication
from pure_loopgrad._derived import Mask, put
from pure_loopgrad._eager import eager
from pure_loopgrad._grad import Argnums, FirstPass, add, check_argnums, contracted, first_pass
from pure_loopgrad._identity import identity_of
from pure_loopgrad._levels import is_wrapped
from pure_loopgrad._loop import pull_back_loop
from pure_loopgrad._loss import Gradients, Loss, pull_back_loss
from pure_loopgrad._reduce import Body, Options, Prepared, Reduce, Weights, prepare
from pure_loopgrad._replicated import Rows, replicate
from pure_loopgrad._sharded import Channels, attempt, exchange, group_of, refuse_foreign
from pure_loopgrad._throughput import resolved
from pure_loopgrad._tree import PyTree
from pure_loopgrad._vjp import prepare_without_graph
from pure_loopgrad.errors import LoopValueError

__all__ = ["map", "mean", "shard", "sum", "value_and_grad"]


def value_and_grad(
    body: Body,
    loss: Loss | None = None,
    *,
    reduce: Reduce = "stack",
    group: Any = None,
    argnums: Argnums = 0,
    weights: Weights = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    communication: Communication = "fp32",
    deterministic: bool = False,
    run: _run.Run | None = None,
) -> Callable[[PyTree, PyTree], tuple[Tensor, PyTree]]:
    """`plg.value_and_grad` over the iterations of all ranks; every rank gets the value and the whole gradient.

    Args:
        body: see `plg.map`.
        loss: see `plg.value_and_grad`; each rank evaluates it on everybody's outputs.
        reduce: see `plg.value_and_grad`.
        group: a process group; by default that of all processes.
        argnums: see `plg.value_and_grad`; the gradient of xs is that of this rank's own part.
        weights: those of this rank's own iterations.
        chunk_size: see `plg.map`; each rank may have its own.
        batched: see `plg.map`.
        randomness: see `plg.map`. Ranks draw from streams of their own, which recomputations replay; the default
            generator moves on by one draw.
        communication: `"fp32"` (float64 where there is some), or `"bf16"`: sums over ranks are sent in bfloat16 and
            added in float32; outputs that are stacked are sent as they are.
        deterministic: add in the order of the ranks, at the cost of as many gradients as there are ranks; otherwise the
            backend chooses an order.
        run: see `plg.map`.

    Returns:
        `f(params, xs) -> (value, gradient)`; see `plg.value_and_grad`.

    Raises:
        DistributedError: another rank raised (with its message), or cannot be reached.
        LoopValueError: the ranks' params, xs or outputs differ in structure, shapes or dtypes, which the first call
            compares.
        LoopTypeError: the body is wrapped in DistributedDataParallel, or params holds a DTensor.
        LoopGradError: see `plg.map`.

    Memory: as `plg.value_and_grad`, and everybody's outputs. Time: that of the rank with the most iterations, and two
    collectives: an all_gather of outputs (or an all_reduce of sums) and an all_reduce of gradients, of one flat buffer
    each. Where one pass is enough, there is one. The first call compares notes in a third, and so does each call whose
    outputs have outgrown those before.

    Example:
        >>> import torch, torch.distributed as dist, pure_loopgrad as plg
        >>> from pure_loopgrad import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> f = distributed.value_and_grad(lambda w, x: w * x, lambda w, ys: ys.logsumexp(0))
        >>> f(torch.tensor(0.0), distributed.shard(torch.tensor([1.0, 3.0])))
        (tensor(0.6931), tensor(2.))
        >>> dist.destroy_process_group()

    Source: the exchange of outputs is that of the gradient cache, Gao et al., arXiv 2101.06983, section 3.3.
    """
    options = Options(reduce, weights, None, chunk_size, batched, randomness, run, partial=True)
    check_argnums(argnums)
    if loss is None and reduce == "stack":
        raise LoopValueError("a stack is no scalar: give a loss(params, ys), or reduce='sum' or 'mean'")
    channels = Channels(communication, deterministic)

    @eager
    def value_and_gradient(params: PyTree, xs: PyTree) -> tuple[Tensor, PyTree]:
        return _value_and_gradient(channels, group_of(group), (body, loss, params, xs), options, argnums)

    return value_and_gradient


@eager
def map(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    group: Any = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    communication: Communication = "fp32",
    deterministic: bool = False,
    run: _run.Run | None = None,
) -> PyTree:
    """`plg.map` over the iterations of all ranks: everybody's outputs, stacked in the order of the ranks.

    Differentiable as `plg.map` is, where each rank computes the same function of the result.

    Args:
        body: see `plg.map`.
        params: see `plg.map`.
        xs: this rank's own part.
        group: see `value_and_grad`.
        chunk_size: see `plg.map`.
        batched: see `plg.map`.
        randomness: see `value_and_grad`.
        communication: see `value_and_grad`.
        deterministic: see `value_and_grad`.
        run: see `plg.map`.

    Returns:
        The structure of the body's output; every leaf has a leading axis of all iterations.

    Raises:
        DistributedError: see `value_and_grad`. A rank that raises in a backward is not heard by the others, which raise
            when they lose it or when the group's timeout is over.
        LoopGradError: see `value_and_grad`.

    Memory: everybody's outputs, beside what `plg.map` takes. Time: one all_gather, and in the backward one all_reduce.

    Example:
        >>> import torch, torch.distributed as dist, pure_loopgrad as plg
        >>> from pure_loopgrad import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> distributed.map(lambda w, x: w * x, torch.tensor(2.0), torch.arange(3.0))
        tensor([0., 2., 4.])
        >>> dist.destroy_process_group()
    """
    options = Options("stack", None, None, chunk_size, batched, randomness, run)
    return _looped(body, params, xs, options, group, communication, deterministic)


@eager
def sum(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    group: Any = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    communication: Communication = "fp32",
    deterministic: bool = False,
    run: _run.Run | None = None,
) -> PyTree:
    """`plg.sum` over the iterations of all ranks.

    Args:
        body: see `map`.
        params: see `map`.
        xs: see `map`.
        group: see `map`.
        chunk_size: see `map`.
        batched: see `map`.
        randomness: see `map`.
        communication: see `map`.
        deterministic: see `map`.
        run: see `map`.

    Returns:
        The structure and shapes of one output.

    Raises:
        LoopGradError: see `map`.

    Memory: as `plg.sum`. Time: one all_reduce, and another one in the backward.

    Example:
        >>> import torch, torch.distributed as dist, pure_loopgrad as plg
        >>> from pure_loopgrad import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> distributed.sum(lambda w, x: w * x, torch.tensor(2.0), torch.arange(3.0))
        tensor(6.)
        >>> dist.destroy_process_group()
    """
    options = Options("sum", None, None, chunk_size, batched, randomness, run)
    return _looped(body, params, xs, options, group, communication, deterministic)


@eager
def mean(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    weights: Weights = None,
    group: Any = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    communication: Communication = "fp32",
    deterministic: bool = False,
    run: _run.Run | None = None,
) -> PyTree:
    """`plg.mean` over the iterations of all ranks: divided once, by their number or by the sum of all weights.

    Args:
        body: see `map`.
        params: see `map`.
        xs: see `map`.
        weights: of this rank's own iterations; constants.
        group: see `map`.
        chunk_size: see `map`.
        batched: see `map`.
        randomness: see `map`.
        communication: see `map`.
        deterministic: see `map`.
        run: see `map`.

    Returns:
        The structure and shapes of one output.

    Raises:
        LoopValueError: there are no iterations, or all weights add up to zero.
        LoopGradError: see `map`.

    Memory and time: as `sum`.

    Example:
        >>> import torch, torch.distributed as dist, pure_loopgrad as plg
        >>> from pure_loopgrad import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> distributed.mean(lambda w, x: w * x, torch.tensor(2.0), torch.arange(3.0), weights=[0, 1, 1])
        tensor(3.)
        >>> dist.destroy_process_group()
    """
    options = Options("mean", weights, None, chunk_size, batched, randomness, run, partial=True)
    return _looped(body, params, xs, options, group, communication, deterministic)


def shard(xs: PyTree, group: Any = None) -> PyTree:
    """This rank's part of xs that all ranks hold: consecutive iterations, as many for each, the first ranks one more.

    Args:
        xs: a pytree whose tensors have a leading axis of length n.
        group: a process group; by default that of all processes.

    Returns:
        The same structure; views of n // N or n // N + 1 entries.

    Raises:
        LoopValueError: there is no group, or the leading axes disagree.

    Memory: none.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from pure_loopgrad import distributed
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> distributed.shard(torch.arange(3))
        tensor([0, 1, 2])
        >>> dist.destroy_process_group()
    """
    channel = Channel(group_of(group))
    tensors, skeleton = _tree.split(xs)
    _tree.leading_axis(tensors, skeleton)
    return skeleton.fill([torch.tensor_split(t, channel.world)[channel.rank] for t in tensors])


# the channels of map, sum and mean, by the body's code, since such a call leaves nothing behind that could hold them
_known: WeakKeyDictionary[Any, dict[Any, Channels]] = WeakKeyDictionary()


def _looped(
    body: Body,
    params: PyTree,
    xs: PyTree,
    options: Options,
    group: Any,
    communication: Communication,
    deterministic: bool,
) -> PyTree:
    own, key = group_of(group), (options.reduce, communication, deterministic)
    channels = _known.setdefault(identity_of(body), {}).setdefault(key, Channels(communication, deterministic))
    prepared, error = attempt(lambda: _prepared(body, params, xs, options))
    channel = channels.find(own, prepared, options)

    def run(prepared: Prepared) -> tuple[list[Tensor], None]:
        needed = [t.requires_grad or is_wrapped(t) for t in prepared.consts]
        entered = replicate("enter", channel, list(compress(prepared.consts, needed)))
        prepared = replace(prepared, consts=put(prepared.consts, needed, entered))
        live = [torch.is_grad_enabled() and t.requires_grad for t in prepared.inputs]
        return prepared.saving(live).run(), None

    whole, raw, _ = exchange(channel, options, prepared, run, error, Rows())
    return whole.finish(raw)


def _prepared(body: Body, params: PyTree, xs: PyTree, options: Options) -> Prepared:
    refuse_foreign(body, params)
    return prepare(body, params, xs, resolved(body, params, xs, options))


def _value_and_gradient(
    channels: Channels,
    own: Any,
    call: tuple[Body, Loss | None, PyTree, PyTree],
    options: Options,
    argnums: Argnums,
) -> tuple[Tensor, PyTree]:
    body, loss, params, xs = call
    which = check_argnums(argnums)

    def prepared_here() -> tuple[Prepared, Mask]:
        refuse_foreign(body, params)
        prepared, wrt = prepare_without_graph(body, params, xs, options, which)
        return prepared.saving(wrt), wrt

    made, error = attempt(prepared_here)
    prepared, wrt = made or (None, ())
    channel, rows = channels.find(own, prepared, options), Rows()

    def run(prepared: Prepared) -> tuple[list[Tensor], FirstPass]:
        first = first_pass(prepared, wrt, "auto")
        return [*first.raw, *first.over_consts], first

    whole, every, first = exchange(channel, options, prepared, run, error, rows)
    n = len(first.raw)
    every_first = replace(first, raw=every[:n], over_consts=tuple(every[n:]))
    value, direct, through = _pulled_back(channel, whole, loss, wrt, every_first, rows)
    grads = whole.gradient_trees([add(a, b) for a, b in zip(direct, through, strict=True)])
    return value, grads[argnums] if isinstance(argnums, int) else tuple(grads[i] for i in argnums)


def _pulled_back(
    channel: Channel, whole: Prepared, loss: Loss | None, wrt: Mask, first: FirstPass, rows: Rows
) -> tuple[Tensor, Gradients, Gradients]:
    """The loss's value and its own gradient, and the gradient through the loops of all ranks."""
    pulled, error = attempt(lambda: pull_back_loss(loss, whole, wrt, first.raw))
    if pulled is None:  # the same on all ranks
        assert error is not None
        raise error
    if first.is_enough:
        return pulled.value, pulled.direct, contracted(first, whole.inputs, wrt, pulled.cotangents)
    stacked = whole.reduce == "stack"
    own = [c.narrow(0, rows.start, rows.length) if stacked and c is not None else c for c in pulled.cotangents]
    through, error = attempt(lambda: pull_back_loop(whole.loop, whole.inputs, wrt, own))
    n = whole.loop.n_consts
    over_consts = list(compress(whole.consts, wrt[:n]))
    if through is None:
        channel.add_up([torch.zeros_like(t) for t in over_consts], error)
        raise AssertionError("a collective raises where this rank has failed")
    if any(c is not None for c in own):
        grads = replicate("add_up", channel, [g for g in through[:n] if g is not None])
        through = [*put(through[:n], wrt[:n], grads), *through[n:]]
    return pulled.value, pulled.direct, through
