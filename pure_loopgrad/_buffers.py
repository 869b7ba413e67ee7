"""What a call does to a module's buffers: what it starts from, what it has changed, and what is refused of that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pure_loopgrad import _effects, _tree
from pure_loopgrad._capture import unwatched, version_of
from pure_loopgrad._levels import active_levels, below_all_levels, is_batched
from pure_loopgrad._named import NamedTensors
from pure_loopgrad._shapes import is_fake
from pure_loopgrad.errors import ImpureBodyError, LoopTypeError, LoopValueError


def copies(buffers: NamedTensors, inputs: Sequence[Tensor] = ()) -> NamedTensors:
    """Copies that a module may write into; batched where the inputs are, as torch.vmap asks of such tensors."""
    like = next(filter(is_batched, inputs), None)
    with unwatched():
        aliases = {name: t.detach() for name, t in buffers.items()}
    # a watch does see how these are made, so that it knows them
    with _counting_changes():
        if like is None:
            return {name: t.clone() for name, t in aliases.items()}
        return {name: like.new_zeros(t.shape, dtype=t.dtype).copy_(t) for name, t in aliases.items()}


def _counting_changes() -> AbstractContextManager[object]:
    """Tensors that are made in inference mode do not count how often they are changed."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@dataclass
class Held:
    """One copy of each buffer for as long as it does not change, with what it is a copy of and at which version."""

    known: dict[str, tuple[Tensor, int, Tensor]] = field(default_factory=dict)

    def of(self, buffers: NamedTensors) -> NamedTensors:
        """A copy of each."""
        return {name: self._copy(name, t) for name, t in buffers.items()}

    def _copy(self, name: str, t: Tensor) -> Tensor:
        source, version, copy = self.known.get(name, (None, 0, t))
        if source is t and version == version_of(t):
            return copy
        with below_all_levels(), _counting_changes():
            copy = t.detach().clone()
        # one without data belongs to a run that only measures, and an inference tensor does not count its changes
        if not is_fake(copy) and not t.is_inference():
            self.known[name] = t, version_of(t), copy
        return copy


@dataclass(frozen=True)
class Before:
    """What a call was given, and how often each had been changed then."""

    given: NamedTensors
    versions: dict[str, int]

    @classmethod
    def of(cls, given: NamedTensors) -> Before:
        return cls(given, _versions(given))

    def replaced(self, after: NamedTensors) -> NamedTensors:
        """Those in whose place another tensor stands."""
        return {name: t for name, t in after.items() if t is not self.given[name]}

    def written(self) -> list[str]:
        """Those that were changed in place; batch_norm does not count its changes."""
        now = _versions(self.given)
        return [name for name, version in self.versions.items() if version != now[name]]

    def changed(self, after: NamedTensors) -> NamedTensors:
        """Those that are not what they were."""
        return {**self.replaced(after), **{name: after[name] for name in self.written()}}


def _versions(tensors: NamedTensors) -> dict[str, int]:
    if active_levels() > 0:
        return {name: version_of(t) for name, t in tensors.items()}
    return {name: 0 if t.is_inference() else t._version for name, t in tensors.items()}  # the same, in a third of it


def write(live: NamedTensors, values: NamedTensors) -> None:
    """Puts values into the module's buffers; below all transforms, of which none owns them."""
    plain = unwrapped(values)
    with unwatched(), torch.no_grad(), below_all_levels():
        for name, t in plain.items():
            live[name].copy_(t)


def unwrapped(values: NamedTensors) -> NamedTensors:
    """The values alone, without a graph, below all transforms."""
    return {name: torch.func.debug_unwrap(t).detach() for name, t in values.items()}


def any_batched(tensors: Iterable[Tensor]) -> bool:
    return active_levels() > 0 and any(map(is_batched, tensors))


def batches_refused(name: str) -> LoopValueError:
    """Iterations at once cannot update a buffer one after the other."""
    return LoopValueError(
        f"the module would update its buffer {name!r} in every iteration, which iterations under torch.vmap cannot do "
        f"in order. Use chunk_size=1, or batched=True with an update for each chunk, or "
        f"from_module(..., buffers='frozen'), or module.eval() if it updates nothing then, or a layer without running "
        f"statistics (GroupNorm)"
    )


def refuse_other_kinds(before: NamedTensors, changed: NamedTensors) -> None:
    """Raises where a buffer has another shape or dtype than before, so that its value has no room."""
    for name, t in changed.items():
        old = before[name]
        if (t.shape, t.dtype) != (old.shape, old.dtype):
            raise LoopTypeError(
                f"the module replaces its buffer {name!r} ({_tree.describe(old)}) by one with {_tree.describe(t)}"
                f"{_effects.when()}; a buffer keeps its shape and dtype in a loop. Give it its last shape and dtype "
                f"from the start (if it only grows once, call the module before the loop), or keep the value in "
                f"params, or in a carry of plg.scan"
            )


def writing_in_eval_refused(name: str, t: Tensor) -> ImpureBodyError:
    """Nobody has a copy of what it was."""
    return ImpureBodyError(
        f"the module changes its buffer {name!r} ({_tree.describe(t)}) in place{_effects.when()}, in eval mode, which "
        f"a recomputation would do again. Put it in train mode, or use from_module(..., buffers='frozen'), or assign a "
        f"new tensor to the buffer"
    )


def read_refused(name: str, t: Tensor, when: str) -> LoopValueError:
    """The same where another call reads what one has set."""
    return LoopValueError(
        f"the buffer {name!r} ({_tree.describe(t)}) that the module reads{_effects.when()} was set by another "
        f"call{when} and depends on params or x there, so that gradient would flow from call to call; from_module cuts "
        f"it. Use plg.from_stateful_module with plg.scan, or .detach() what is assigned to the buffer if no gradient "
        f"is meant to flow"
    )


def cut_refused(name: str, t: Tensor) -> LoopValueError:
    """A buffer is handed on as a value alone."""
    return LoopValueError(
        f"the buffer {name!r} ({_tree.describe(t)}) that the module sets{_effects.when()} depends on params or x, and "
        f"later iterations read it, so that gradient would flow from iteration to iteration; from_module cuts it. Use "
        f"plg.from_stateful_module with plg.scan, or .detach() what is assigned to the buffer if no gradient is meant "
        f"to flow"
    )
