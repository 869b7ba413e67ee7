"""Tensors that a body keeps from its first pass and uses again in the recomputation of the same iteration.

A first pass records nothing, so what it leaves in a dictionary is a constant by then: its values are right, as the
comparison of outputs sees, and its gradient is lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loopgrad import _tree
from pure_loopgrad._levels import may_have_tangent, needs_gradient
from pure_loopgrad._names import find_name
from pure_loopgrad.errors import ImpureBodyError

Sources: TypeAlias = int  # a bit for each tensor that the body is given

OF_THE_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # a second tensor gives its dtype or shape alone
OVERWRITING = {"copy_", "zero_", "fill_"}


def sources_of(func: Callable[..., Any], tensors: Sequence[Tensor], known: dict[int, Sources]) -> Sources:
    """Which of what was given the result of a torch function depends on, differentiably."""
    name = func.__name__
    if name.endswith("_like") or name.startswith(("new_", "detach")) or func == _data or not torch.is_grad_enabled():
        return 0
    found = 0
    for t in tensors[:1] if name in OF_THE_FIRST else tensors:
        found |= known.get(id(t), 0)
    return found


_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a property, for torch's types


class Memo(TorchFunctionMode):
    """Inside it, no torch function may use what was kept."""

    def __init__(self, body: Callable[..., Any], kept: Iterable[Tensor]) -> None:
        super().__init__()
        self.body = body
        self.kept = {id(t): t for t in kept}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in OVERWRITING:
            self.kept.pop(id(args[0]), None)
        for t in _tree.tensors_in((args, kwargs)):
            if id(t) in self.kept:
                raise memoised(self.body, t)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Kept:
    """What the first pass of an iteration has computed from its inputs, as far as it lives, and from which of them."""

    inner: list[tuple[weakref.ref[Tensor], Sources]]
    outputs: list[tuple[weakref.ref[Tensor], Sources]]

    def refused(self, body: Callable[..., Any], given: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """A block in which torch functions refuse what depends on something that needs a derivative now."""
        found = list(_living(self.inner, given))
        return Memo(body, found) if found else nullcontext()

    def refuse_returned(self, body: Callable[..., Any], given: Sequence[Tensor], outputs: Sequence[Any]) -> None:
        """Raises where the recomputation returns a tensor that is there since the first pass."""
        for t in _living([*self.inner, *self.outputs], given):
            if any(t is y for y in outputs):
                raise memoised(body, t)


def _living(kept: Iterable[tuple[weakref.ref[Tensor], Sources]], given: Sequence[Tensor]) -> Iterator[Tensor]:
    there = [(t, sources) for ref, sources in kept if (t := ref()) is not None]
    wanted = sum(1 << i for i, t in enumerate(given) if there and (needs_gradient(t) or may_have_tangent(t)))
    return (t for t, sources in there if sources & wanted)


def memoised(body: Callable[..., Any], t: Tensor) -> ImpureBodyError:
    """The error for a tensor that was kept."""
    return ImpureBodyError(
        f"the recomputation uses {find_name(body, t) or 'a tensor'} ({_tree.describe(t)}), which the body computed "
        f"from what it was given in the first pass, and kept: it would get no gradient. Compute it anew in each "
        f"iteration, or once before the loop and pass it in params, or .detach() it if it is a constant. "
        f"plg.run(check='off') turns this check off"
    )
