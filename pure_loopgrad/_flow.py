"""Through which of its buffers a module passes gradient on to its next call, found without data.

A module that updates its buffers as torch's own layers do, under `torch.no_grad` or by a detached value, passes none.
To give all buffers as values that need a gradient would make such a module fail where plain autograd does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _effects, _tree
from pure_loopgrad._capture import graph_leaves, unwatched
from pure_loopgrad._levels import below_all_levels
from pure_loopgrad._modes import compiled_run_eagerly
from pure_loopgrad._named import Named, NamedTensors
from pure_loopgrad._shapes import Meta, without_data

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Flow:
    """Names of buffers.

    Attributes:
        set_from_inputs: what a call leaves there depends, differentiably, on params, x or another such buffer.
        read: of these, the ones on which the output of a call depends, or that of a later one through further buffers.
        left: those that depend on params, x or another such buffer after a call, be it that it has left them alone.
    """

    set_from_inputs: frozenset[str]
    read: frozenset[str]
    left: frozenset[str]


def known_flow(
    named: Named, params: NamedTensors, buffers: NamedTensors, x: Any, live: frozenset[str] = frozenset()
) -> Flow:
    """`flow_of`, found once for all calls in a loop that run the same code; the next loop may find other flags and
    settings of which nobody here knows.
    """
    attributes = [vars(layer).items() for layer in named.layers]
    settings = (tuple((name, _plain(v)) for name, v in own if _decides(v)) for own in attributes)
    static = map(_plain, _tree.split(x)[1].static)
    key = (id(named.module), named.flags, tuple(settings), tuple(static), live)
    notes = _effects.notes()
    if key not in notes:
        notes[key] = flow_of(named, params, buffers, x, live)
    found: Flow = notes[key]
    return found


def _decides(value: Any) -> bool:
    """Whether a module may choose by the value what it does."""
    return isinstance(value, _PLAIN) or callable(value)


def _plain(value: Any) -> Hashable:
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def flow_of(
    named: Named, params: NamedTensors, buffers: NamedTensors, x: Any, live: frozenset[str] = frozenset()
) -> Flow:
    """Calls the module on tensors without data, until no further buffer turns out to depend on inputs.

    Where that fails, as the module needs data, it may be any of them.

    Args:
        named: the module.
        params: its parameters.
        buffers: its buffers.
        x: what it is called with.
        live: buffers that depend on inputs already.
    """
    floats = frozenset(name for name, t in buffers.items() if _tree.is_differentiable(t))
    metas = {name: Meta.of(t) for name, t in buffers.items()}
    shared = {name: Meta.of(t) for name, t in params.items()}
    tensors, skeleton = _tree.split(x)
    one = [Meta.of(t) for t in tensors]
    try:
        with _unnoticed(named), torch.enable_grad():
            p = {name: _leaf(meta) for name, meta in shared.items()}
            while True:
                given = {name: _leaf(meta, requires_grad=name in live) for name, meta in metas.items()}
                mine = {name: t.clone() for name, t in given.items()}
                after, y = named.call(p, mine, skeleton.fill([_leaf(meta) for meta in one]))
                left = frozenset(name for name, t in after.items() if t.requires_grad)
                found = live | left
                if found == live:
                    return Flow(live, _read({name: given[name] for name in live}, after, _tree.split(y)[0]), left)
                live = found
    except Exception:  # whatever the module raises
        return Flow(floats, floats, floats)


@contextmanager
def _unnoticed(named: Named) -> Iterator[None]:
    """A block without data, which no mode and no transform sees, and after which the layers have the attributes that
    they had before: a call that only finds something out may count itself, or note that it was the first.
    """
    before = [dict(vars(layer)) for layer in named.layers]
    try:
        with unwatched(), below_all_levels(), compiled_run_eagerly(), without_data():
            yield
    finally:
        for layer, attributes in zip(named.layers, before, strict=True):
            now = vars(layer)
            for name in now.keys() - attributes.keys():
                del now[name]
            now.update(attributes)


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
