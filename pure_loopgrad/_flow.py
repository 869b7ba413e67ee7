"""Through which of its buffers a module passes gradient on to its next call, found without data.

A module that updates its buffers as torch's own layers do, under `torch.no_grad` or by a detached value, passes none.
To give all buffers as values that need a gradient would make such a module fail where plain autograd does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._capture import graph_leaves, unwatched
from pure_loopgrad._levels import below_all_levels
from pure_loopgrad._modes import compiled_run_eagerly
from pure_loopgrad._named import Named, NamedTensors
from pure_loopgrad._shapes import Meta, without_data


@dataclass(frozen=True)
class Flow:
    """Names of buffers.

    Attributes:
        set_from_inputs: what a call leaves there depends, differentiably, on params, x or another such buffer.
        read: of these, the ones on which the output of a call depends, or that of a later one through further buffers.
    """

    set_from_inputs: frozenset[str]
    read: frozenset[str]


def flow_of(named: Named, params: NamedTensors, buffers: NamedTensors, x: Any) -> Flow:
    """Calls the module on tensors without data, until no further buffer turns out to depend on inputs.

    Where that fails, as the module needs data, it may be any of them.
    """
    floats = frozenset(name for name, t in buffers.items() if _tree.is_differentiable(t))
    metas = {name: Meta.of(t) for name, t in buffers.items()}
    shared = {name: Meta.of(t) for name, t in params.items()}
    tensors, skeleton = _tree.split(x)
    one = [Meta.of(t) for t in tensors]
    live: frozenset[str] = frozenset()
    try:
        with unwatched(), below_all_levels(), compiled_run_eagerly(), without_data(), torch.enable_grad():
            p = {name: _leaf(meta) for name, meta in shared.items()}
            while True:
                given = {name: _leaf(meta, requires_grad=name in live) for name, meta in metas.items()}
                mine = {name: t.clone() for name, t in given.items()}
                after, y = named.call(p, mine, skeleton.fill([_leaf(meta) for meta in one]))
                found = live | {name for name, t in after.items() if t.requires_grad}
                if found == live:
                    return Flow(live, _read({name: given[name] for name in live}, after, _tree.split(y)[0]))
                live = found
    except Exception:  # whatever the module raises
        return Flow(floats, floats)


def _read(given: NamedTensors, after: NamedTensors, ys: Sequence[Tensor]) -> frozenset[str]:
    """The buffers that lead to an output, at once or by way of what they leave in others."""
    found: frozenset[str] = frozenset()
    while True:
        behind = graph_leaves([*ys, *(after[name] for name in found)])
        more = frozenset(name for name, t in given.items() if t in behind)
        if more == found:
            return found
        found = more


def _leaf(meta: Meta, *, requires_grad: bool = True) -> Tensor:
    t = meta.zeros()
    return t.requires_grad_(requires_grad and _tree.is_differentiable(t))
