"""Reverse mode for a function of flat tensors, some of which are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from pure_loopgrad._levels import active_levels
from pure_loopgrad._user import Tensors

T = TypeVar("T")
PROBE = torch.zeros(0, requires_grad=True, device="cpu")
ENGINE = torch.autograd.Variable._execution_engine
Mask = tuple[bool, ...]
# cotangents, or None, and whether this is the last call -> gradients, None where no output with a cotangent depends on
# the primal
Pullback: TypeAlias = "Callable[[Sequence[Tensor | None], bool], Sequence[Tensor | None]]"


def linearise(
    fn: Callable[..., tuple[tuple[Tensor, ...], Tensors]], primals: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Pullback, Tensors]:
    """The one place that differentiates in reverse: `fn(*primals) -> (outputs, aux)` to (outputs, pullback, aux).

    Grad mode decides whether the backward is itself recorded. It is off in a loop's first derivative, on plain tensors:
    there, ordinary autograd on detached leaves does the same as `torch.func.vjp` with less overhead (90 us instead of
    220 us for an iteration of tanh(W x), 32 x 32). Inside another derivative it is on. In inference mode
    ordinary autograd records nothing whatever the grad mode, but torch.func does.
    """
    if torch.compiler.is_dynamo_compiling():  # of the two, the one that dynamo can follow
        outputs, pullback, aux = cast(Any, torch.func.vjp(fn, *primals, has_aux=True))
        return outputs, lambda c, last: pullback(tuple(zeros_for_none(c, outputs))), aux
    if torch.is_grad_enabled() or active_levels() > 0 or torch.is_inference_mode_enabled():
        return _linearised_in_functorch(fn, primals)
    leaves = [p.detach().requires_grad_() for p in primals]
    with torch.enable_grad():
        outputs, aux = fn(*leaves)
    return outputs, PlainPullback(outputs, leaves), [t.detach() for t in aux]


def _linearised_in_functorch(
    fn: Callable[..., tuple[tuple[Tensor, ...], Tensors]], primals: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], Pullback, Tensors]:
    """`torch.func.vjp`, but for its pullback, which makes zeros of None and keeps the graph to the end."""
    inside: list[Sequence[Tensor]] = []

    def recorded(*inner: Tensor) -> tuple[tuple[Tensor, ...], Tensors]:
        outputs, aux = fn(*inner)
        inside.extend((inner, outputs))
        return outputs, aux

    outputs, _, aux = cast(Any, torch.func.vjp(recorded, *primals, has_aux=True))

    def pullback(cotangents: Sequence[Tensor | None], last: bool) -> Sequence[Tensor | None]:
        inner, outs = inside
        needed = [o.requires_grad and c is not None for o, c in zip(outs, cotangents, strict=True)]
        if not any(needed):
            return [None] * len(inner)
        again = torch.is_grad_enabled()
        return torch.autograd.grad(
            list(compress(outs, needed)),
            inner,
            list(compress(cotangents, needed)),
            retain_graph=again or not last,
            create_graph=again,
            allow_unused=True,
        )

    return outputs, pullback, aux


def records() -> bool:
    """Whether ordinary autograd records anything here, with grad mode on. It does not in inference mode, of which
    torch.func leaves half in force around the backward of its transforms: no mode is on, and yet nothing is recorded.
    """
    with torch.enable_grad():
        return (PROBE + PROBE).requires_grad


@dataclass(frozen=True)
class PlainPullback:
    """The pullback of a graph that ordinary autograd recorded."""

    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]

    def part(self, wanted: Mask, given: Mask) -> PlainPullback:
        """The same for some of the leaves, from cotangents of some of the outputs."""
        return PlainPullback(list(compress(self.outputs, given)), list(compress(self.leaves, wanted)))

    def __call__(self, cotangents: Sequence[Tensor | None], last: bool) -> Sequence[Tensor | None]:
        return gradients(self.outputs, self.leaves, cotangents, last)


def gradients(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None], last: bool = True
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` for outputs that need not depend on any leaf; it may walk the graph again if not `last`.

    The engine is called without the public function's checks in Python: cotangents are like their outputs here, and the
    engine compares them as well. They take 14 of 31 us of a tiny chunk, and import sympy. Private, but for years the
    same; tests/test_private_torch.py says so if it goes.
    """
    recorded = [o.requires_grad and c is not None for o, c in zip(outputs, cotangents, strict=True)]
    if not all(recorded):
        outputs, cotangents = list(compress(outputs, recorded)), list(compress(cotangents, recorded))
    if not outputs:
        return [None] * len(leaves)
    if has_torch_function((*outputs, *leaves)):
        return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=not last, allow_unused=True)
    keep_graph, create_graph, allow_unused = not last, False, True
    found: tuple[Tensor | None, ...] = ENGINE.run_backward(
        tuple(outputs), tuple(cotangents), keep_graph, create_graph, tuple(leaves), allow_unused, accumulate_grad=False
    )
    return found


def zeros_for_none(grads: Sequence[Tensor | None], primals: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with zeros where the outputs do not depend on a primal."""
    return [torch.zeros_like(p) if g is None else g for g, p in zip(grads, primals, strict=True)]


def put(values: Sequence[T], mask: Iterable[bool], replacements: Iterable[T]) -> list[T]:
    """`values` with those that the mask marks replaced, in order."""
    new = iter(replacements)
    return [next(new) if marked else value for value, marked in zip(values, mask, strict=True)]
