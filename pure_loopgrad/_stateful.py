"""The bodies that are made of a module: its buffers updated by the first pass, kept as they are, or carried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from pure_loopgrad import _effects, _tree
from pure_loopgrad._buffers import (
    Before,
    Held,
    any_batched,
    batches_refused,
    copies,
    refuse_other_kinds,
    unwrapped,
    write,
    writing_in_eval_refused,
)
from pure_loopgrad._capture import unwatched
from pure_loopgrad._cut import refuse_cut
from pure_loopgrad._dual_level import may_be_differentiated
from pure_loopgrad._flow import known_flow
from pure_loopgrad._levels import is_recorded
from pure_loopgrad._named import Named, NamedTensors
from pure_loopgrad._training import Flags
from pure_loopgrad.errors import ImpureBodyError

# modules that have assigned to a buffer in eval mode, in which nearly none does, so that nothing is copied at first
_changing_in_eval: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, eq=False)
class ModuleBody:
    """What all of them have."""

    named: Named

    @property
    def identity(self) -> nn.Module:
        """What stays the same where the body is made anew."""
        return self.named.module

    @property
    def mode(self) -> Flags:
        """What decides which code the module runs."""
        return self.named.flags


@dataclass(frozen=True, eq=False)
class Frozen(ModuleBody):
    """A body that keeps its buffers from changing."""

    def __call__(self, params: NamedTensors, x: Any) -> Any:
        buffers = {name: t.detach() for name, t in params.items() if name in self.named.places}
        if self.named.training:
            buffers = copies(buffers, [*params.values(), *_tree.split(x)[0]])
        return self.named.call(params, buffers, x)[1]


@dataclass(frozen=True, eq=False)
class Updating(ModuleBody):
    """A body whose first pass updates the module's buffers."""

    held: Held = field(default_factory=Held)

    def __call__(self, params: NamedTensors, x: Any) -> Any:
        if not self.named.places:
            return self.named.call(params, {}, x)[1]
        if self.named.training or self.named.module in _changing_in_eval:
            return self._on_copies(params, x)
        return self._in_eval(params, x)

    def _in_eval(self, params: NamedTensors, x: Any) -> Any:
        """Without a copy, as a call is not expected to change a buffer. To write into one is refused; to replace one
        leaves the old one as it was, which is all that a recomputation needs.
        """
        named = self.named
        if torch.compiler.is_compiling():  # a chunk that ran as it is has shown what the module does
            return named.call(params, {}, x)[1]
        with unwatched():
            before = Before.of(named.buffers)
        _, y = named.call(params, {}, x)
        with unwatched():
            after = named.buffers
            written, replaced = before.written(), before.replaced(after)
        if written:
            raise writing_in_eval_refused(written[0], after[written[0]])
        if replaced:
            self._replaced_in_eval(params, x, before.given, replaced)
        else:
            refuse_cut(self.named, params, before.given, {}, x)
        return y

    def _replaced_in_eval(self, params: NamedTensors, x: Any, live: NamedTensors, replaced: NamedTensors) -> None:
        """What `_on_copies` does before and after a call, for the first one."""
        self.named.put(live)
        _changing_in_eval.add(self.named.module)
        start, counts = self._begin(live, set())
        self._check(params, x, {**live, **start}, replaced)
        if counts:
            self.named.put(unwrapped(replaced))  # nothing is written into what it was, which a watch may have seen read
        else:
            _effects.rehearse(self.identity, unwrapped({**live, **replaced}), replaced)

    def _on_copies(self, params: NamedTensors, x: Any) -> Any:
        """The module works on copies of its buffers; the first pass hands on to the module what becomes of them."""
        named = self.named
        statistics = named.running_statistics()
        if statistics and any_batched([*params.values(), *_tree.split(x)[0]]):
            raise batches_refused(min(statistics))
        with unwatched():
            live = named.buffers
        start, counts = self._begin(live, statistics)
        given = copies({**live, **start})
        with unwatched():
            before = Before.of(given)
        after, y = named.call(params, given, x)
        with unwatched():
            changed = before.changed(after)
        self._check(params, x, {**live, **start}, changed)
        # batch_norm does not count its changes as others do
        if counts:
            write(live, {**changed, **{name: after[name] for name in statistics}})
        else:
            _effects.rehearse(self.identity, unwrapped({name: after[name] for name in start}), {*changed, *statistics})
        return y

    def _begin(self, live: NamedTensors, statistics: set[str]) -> tuple[NamedTensors, bool]:
        """What the buffers that may be read held in the first pass, and whether this is it."""
        with unwatched():
            read = {name: t for name, t in live.items() if name not in statistics}
            return _effects.begin(self.identity, lambda: self.held.of(read))

    def _check(self, params: NamedTensors, x: Any, start: NamedTensors, changed: NamedTensors) -> None:
        """Refuses what cannot be handed on from iteration to iteration."""
        with unwatched():
            if changed and any_batched([*params.values(), *_tree.split(x)[0], *changed.values()]):
                raise batches_refused(min(changed))
            refuse_other_kinds(start, changed)
        refuse_cut(self.named, params, start, changed, x)


@dataclass(frozen=True, eq=False)
class Carrying(ModuleBody):
    """A body of `plg.scan`, whose carry is the buffers."""

    latest: dict[Flags, frozenset[str]] = field(default_factory=dict)  # for the compiled steps of a loop

    def __call__(self, params: NamedTensors, buffers: NamedTensors, x: Any) -> tuple[NamedTensors, Any]:
        live = self._flowing(params, buffers, x)
        given = {name: t.clone() if name in live else t.detach().clone() for name, t in buffers.items()}
        after, y = self.named.call(params, given, x)
        if torch.compiler.is_compiling():  # a step that ran as it is has been looked at
            return after, y
        for name, t in after.items():
            if name not in live and is_recorded([t]):
                raise ImpureBodyError(
                    f"the buffer {name!r} ({_tree.describe(t)}) depends on params or x{_effects.when()}, but did not "
                    f"when this loop first called the module so, and its gradient would be cut. .detach() what is "
                    f"assigned to it, or let it depend on them in every call"
                )
        return after, y

    def _flowing(self, params: NamedTensors, buffers: NamedTensors, x: Any) -> frozenset[str]:
        """The buffers that pass gradient on."""
        floats = frozenset(n for n, t in buffers.items() if _tree.is_differentiable(t)) - self.named.norms
        if torch.compiler.is_compiling():
            return self.latest.get(self.named.flags, floats) & floats
        if not floats or not may_be_differentiated():
            return frozenset()
        notes, key = _effects.notes(), ("carried", id(self.named.module))
        known: frozenset[str] = notes.get(key, frozenset())  # another call in the same step may set what this one reads
        live = known_flow(self.named, params, buffers, x, known).set_from_inputs & floats
        notes[key] = self.latest[self.named.flags] = live
        return live
