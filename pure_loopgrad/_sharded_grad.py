"""Value and gradient of a loss over the iterations of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from typing import Any

from torch import Tensor

from pure_loopgrad import _run
from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._channel import Channel, Communication
from pure_loopgrad._eager import eager
from pure_loopgrad._grad import Argnums, FirstPass, add, check_argnums, check_plan, chosen, contracted, first_pass
from pure_loopgrad._linearise import Mask, put
from pure_loopgrad._loop import pull_back_loop
from pure_loopgrad._loss import Gradients, Loss, pull_back_loss
from pure_loopgrad._reduce import Body, Options, Prepared, Reduce, Weights
from pure_loopgrad._replicated import Rows, replicate
from pure_loopgrad._sharded import Channels, attempt, exchange, group_of, refuse_foreign
from pure_loopgrad._tree import PyTree
from pure_loopgrad._vjp import prepare_without_graph


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
    which = check_argnums(argnums)
    check_plan("auto", reduce, loss)
    channels = Channels(communication, deterministic)

    @eager
    def value_and_gradient(params: PyTree, xs: PyTree) -> tuple[Tensor, PyTree]:
        value, grads = _value_and_gradients(channels, group_of(group), (body, loss, params, xs), options, which)
        return value, chosen(grads, argnums)

    return value_and_gradient


def _value_and_gradients(
    channels: Channels,
    own: Any,
    call: tuple[Body, Loss | None, PyTree, PyTree],
    options: Options,
    which: tuple[int, ...],
) -> tuple[Tensor, tuple[PyTree, PyTree]]:
    body, loss, params, xs = call

    def prepared_here() -> tuple[Prepared, Mask]:
        refuse_foreign(body, params)
        prepared, wrt = prepare_without_graph(body, params, xs, options, which)
        return prepared.saving(wrt), wrt

    made, error = attempt(prepared_here)
    prepared, wrt = made or (None, ())
    marked = wrt[: prepared.loop.n_consts] if prepared is not None else ()
    channel, rows = channels.find(own, body, prepared, options, marked), Rows()

    def run(prepared: Prepared) -> tuple[list[Tensor], FirstPass]:
        first = first_pass(prepared, wrt, "auto")
        return [*first.raw, *first.over_consts], first

    whole, every, first = exchange(channel, options, prepared, run, error, rows)
    n = len(first.raw)
    every_first = replace(first, raw=every[:n], over_consts=tuple(every[n:]))
    value, direct, through = _pulled_back(channel, whole, loss, wrt, every_first, rows)
    return value, whole.gradient_trees([add(a, b) for a, b in zip(direct, through, strict=True)])


def _pulled_back(
    channel: Channel, whole: Prepared, loss: Loss | None, wrt: Mask, first: FirstPass, rows: Rows
) -> tuple[Tensor, Gradients, Gradients]:
    """The loss's value and its own gradient, and the gradient through the loops of all ranks."""
    pulled = pull_back_loss(loss, whole, wrt, first.raw)  # what it raises, it raises on all ranks
    if first.is_enough:
        return pulled.value, pulled.direct, contracted(first, whole.inputs, wrt, pulled.cotangents)
    stacked = whole.reduce == "stack"
    own = [c.narrow(0, rows.start, rows.length) if stacked and c is not None else c for c in pulled.cotangents]
    through, error = attempt(lambda: pull_back_loop(whole.loop, whole.inputs, wrt, own))
    n = whole.loop.n_consts
    if through is None:
        channel.fail("add_up", list(compress(whole.consts, wrt[:n])), error)
    if any(c is not None for c in own):
        grads = replicate("add_up", channel, [g for g in through[:n] if g is not None])
        through = [*put(through[:n], wrt[:n], grads), *through[n:]]
    return pulled.value, pulled.direct, through
