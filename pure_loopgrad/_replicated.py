"""The four linear maps between what each rank has and what all have, under autograd and every torch.func transform.

A value that all ranks hold alike counts once, so that a loss that each rank computes on its own gives every rank the
gradient of one process, with no factor of the number of ranks:

    enter     what all have -> each rank's own use of it       transpose: add_up
    add_up    each rank's term -> the sum, which all have      transpose: enter
    gather    each rank's rows -> all rows, which all have     transpose: own_rows
    own_rows  all rows -> those of this rank                   transpose: gather
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal

import torch
from torch import Tensor

from pure_loopgrad import _batched_grads, _tree
from pure_loopgrad._channel import Channel
from pure_loopgrad._linearise import put

Kind = Literal["enter", "add_up", "gather", "own_rows"]
TRANSPOSE: dict[Kind, Kind] = {"enter": "add_up", "add_up": "enter", "gather": "own_rows", "own_rows": "gather"}


@dataclass
class Rows:
    """Which rows of what was gathered are this rank's; known once it has been gathered."""

    start: int = 0
    length: int = 0


def replicate(kind: Kind, channel: Channel, tensors: Sequence[Tensor], rows: Rows | None = None) -> list[Tensor]:
    """Applies one of the maps to some tensors, with one collective or none."""
    if not tensors:
        return []
    if _batched_grads.any_batched(tensors):
        return list(_batched_grads.vmapped(lambda *inner: tuple(replicate(kind, channel, inner, rows)), tensors))
    return list(_Linear.apply(kind, channel, rows or Rows(), *tensors))  # type: ignore[no-untyped-call]  # torch's


class _Linear(torch.autograd.Function):
    """Each map is its own jvp, and its backward another map: derivatives of any order are made of these four."""

    @staticmethod
    def forward(kind: Kind, channel: Channel, rows: Rows, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(MAPS[kind](channel, rows, [t.detach() for t in tensors]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kind, ctx.channel, ctx.rows = inputs[:3]
        ctx.floats = tuple(_tree.is_differentiable(t) for t in output)
        ctx.mark_non_differentiable(*(t for t, f in zip(output, ctx.floats, strict=True) if not f))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        given = list(compress(cotangents, ctx.floats))
        grads = replicate(TRANSPOSE[ctx.kind], ctx.channel, given, ctx.rows)
        return (None, None, None, *put([None] * len(ctx.floats), ctx.floats, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        given = list(compress(tangents[3:], ctx.floats))
        return tuple(put([None] * len(ctx.floats), ctx.floats, replicate(ctx.kind, ctx.channel, given, ctx.rows)))

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], kind: Kind, channel: Channel, rows: Rows, *tensors: Tensor) -> Any:
        behind = 1 if kind in ("gather", "own_rows") else 0  # the rows come first
        moved = [t if d is None else t.movedim(d, behind) for t, d in zip(tensors, dims[3:], strict=True)]
        return tuple(replicate(kind, channel, moved, rows)), tuple(None if d is None else behind for d in dims[3:])


def _enter(channel: Channel, rows: Rows, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def _add_up(channel: Channel, rows: Rows, tensors: Sequence[Tensor]) -> list[Tensor]:
    return channel.add_up(tensors, None)


def _gather(channel: Channel, rows: Rows, tensors: Sequence[Tensor]) -> list[Tensor]:
    every = channel.gather(tensors, None)
    lengths = [part[0].shape[0] for part in every]
    rows.start, rows.length = sum(lengths[: channel.rank]), lengths[channel.rank]
    return [torch.cat(parts) for parts in zip(*every, strict=True)]


def _own_rows(channel: Channel, rows: Rows, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.narrow(0, rows.start, rows.length).clone() for t in tensors]


MAPS: dict[Kind, Callable[[Channel, Rows, Sequence[Tensor]], list[Tensor]]] = {
    "enter": _enter,
    "add_up": _add_up,
    "gather": _gather,
    "own_rows": _own_rows,
}
