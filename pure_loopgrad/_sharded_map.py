"""The outputs of all ranks' iterations, stacked or added up; and a part for each rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pure_loopgrad import _run, _tree
from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._channel import Channel, Communication
from pure_loopgrad._eager import eager
from pure_loopgrad._identity import identity_of
from pure_loopgrad._levels import active_levels, is_wrapped
from pure_loopgrad._linearise import put
from pure_loopgrad._reduce import Body, Options, Prepared, Weights, prepare
from pure_loopgrad._replicated import Rows, replicate
from pure_loopgrad._sharded import Channels, Guarded, attempt, exchange, group_of, refuse_foreign
from pure_loopgrad._throughput import resolved
from pure_loopgrad._tree import PyTree


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
        DistributedError: see `value_and_grad`. Under torch.func transforms, a rank that raises in a backward is not
            heard by the others, which raise when they lose it or when the group's timeout is over.
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
    guarded = Guarded(body)
    prepared, error = attempt(lambda: _prepared(guarded, params, xs, options))
    needed = [] if prepared is None else [t.requires_grad or is_wrapped(t) for t in prepared.consts]
    channel = channels.find(own, body, prepared, options, needed)

    def run(prepared: Prepared) -> tuple[list[Tensor], None]:
        entered = replicate("enter", channel, list(compress(prepared.consts, needed)))
        if active_levels() == 0:
            guarded.channel, guarded.entered = channel, [t.detach() for t in entered if _tree.is_differentiable(t)]
        return replace(prepared, consts=put(prepared.consts, needed, entered)).run_live(), None

    whole, raw, _ = exchange(channel, options, prepared, run, error, Rows())
    return whole.finish(raw)


def _prepared(guarded: Guarded, params: PyTree, xs: PyTree, options: Options) -> Prepared:
    refuse_foreign(guarded.body, params)
    body = guarded if callable(guarded.body) else guarded.body
    return prepare(body, params, xs, resolved(body, params, xs, options))
