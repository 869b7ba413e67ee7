"""Gradient that would flow from call to call through a buffer, which `from_module` cuts: refused where it is read."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from pure_loopgrad import _effects
from pure_loopgrad._buffers import cut_refused, read_refused
from pure_loopgrad._capture import unwatched
from pure_loopgrad._dual_level import may_be_differentiated
from pure_loopgrad._flow import Flow, known_flow
from pure_loopgrad._levels import is_recorded, may_have_tangent
from pure_loopgrad._named import Named, NamedTensors


def refuse_cut(named: Named, params: NamedTensors, start: NamedTensors, changed: NamedTensors, x: Any) -> None:
    """Raises where a call of a module sets a buffer that a later call reads, or reads what an earlier one has set.

    Args:
        named: the module that was called.
        params: with which parameters.
        start: what its buffers were before.
        changed: those that the call has changed.
        x: with what it was called.
    """
    with unwatched():
        passing = {name for name, t in changed.items() if is_recorded([t]) or may_have_tangent(t)}
    cut: dict[Hashable, tuple[Tensor, str]] = _effects.notes().setdefault("cut", {})
    if not passing and not (cut and may_be_differentiated()):
        return
    earlier = frozenset(name for name in named.places if any(key in cut for key in _keys(named, name)))
    if not passing and not earlier:
        return
    flow = known_flow(named, params, start, x, earlier)
    for name in sorted(flow.read):
        if name in passing:
            raise cut_refused(name, changed[name])
        if name in earlier:
            raise read_refused(name, start[name], next(cut[key][1] for key in _keys(named, name) if key in cut))
    _note(named, changed, flow, cut)


def _note(named: Named, changed: NamedTensors, flow: Flow, cut: dict[Hashable, tuple[Tensor, str]]) -> None:
    """Which buffers have lost a gradient, for the calls that follow, also of other modules that have the buffer."""
    for name in changed:
        for key in _keys(named, name):
            if name in flow.left:
                cut[key] = named.buffers[name], _effects.when()
            else:
                cut.pop(key, None)


def _keys(named: Named, name: str) -> tuple[Hashable, Hashable]:
    """What tells a buffer: its place, and the tensor there."""
    layer, attribute = named.places[name]
    return (id(layer), attribute), id(layer._buffers.get(attribute))
