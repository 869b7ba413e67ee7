"""Where the outputs of a loop's chunks go: sums are added up in place, stacks are written into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pure_loopgrad._body import accumulation_dtype
from pure_loopgrad._levels import active_levels, is_wrapped
from pure_loopgrad._shapes import address, is_fake
from pure_loopgrad._tracing import is_traced
from pure_loopgrad._user import Tensors, Terms


class Consumer(Protocol):
    """What takes a loop's chunks, in order."""

    def add(self, iterations: range, sums: Terms, stacks: Terms) -> None:
        """One chunk."""

    def leave_out(self, iterations: range) -> None:
        """A chunk whose terms are zero."""

    def totals(self) -> list[Tensor]:
        """The sums so far."""


@dataclass
class Outputs:
    """Takes the chunks' outputs in order. Runs with grad mode off, on plain tensors."""

    n: int
    sums: list[Sum] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)
    started: bool = False
    left_out: list[range] = field(default_factory=list)

    def add(self, iterations: range, sums: Terms, stacks: Terms) -> None:
        """Adds one chunk; nothing of it is kept but what is copied, unless it is the only one, so that the later ones
        need not be plain.
        """
        if not self.started:
            only, in_place = len(iterations) == self.n, may_grow_in_place()
            self.sums = [Sum(only, in_place) for _ in sums]
            self.stacks = [Stack(self.n, in_place) for _ in stacks]
            self.started = True
        for total, term in zip(self.sums, sums, strict=True):
            if term is not None:
                total.add(plain(term) if total.total is None else term)
        for stack, part in zip(self.stacks, stacks, strict=True):
            stack.add(iterations, part if part is None or stack.started else plain(part))

    def leave_out(self, iterations: range) -> None:
        """Notes a chunk whose terms are zero."""
        self.left_out.append(iterations)

    def totals(self) -> list[Tensor]:
        """The sums so far, rounded to the dtype of their terms."""
        return [s.value() for s in self.sums]

    def finish(self, inputs: Tensors, foreign: Iterable[int] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """The results, none of which shares memory with an input, with what is at a `foreign` address, or with another
        result.
        """
        for stack in self.stacks:
            stack.gaps.extend(self.left_out)
        taken = {*map(address, inputs), *foreign}
        results = own([*(s.value() for s in self.sums), *(s.value() for s in self.stacks)], taken)
        return results[: len(self.sums)], results[len(self.sums) :]


@dataclass
class Sum:
    """A running sum. The first term may be an input, or a tensor that the body keeps: it is copied before it grows."""

    only: bool = False  # there will be no second term
    in_place: bool = True  # see may_grow_in_place
    total: Tensor | None = None
    dtype: torch.dtype | None = None
    entries: int = 0  # of a sparse total, when its doubles were last put together

    def add(self, term: Tensor) -> None:
        """Adds a term, in the wide dtype."""
        if self.total is None:
            self.dtype = term.dtype
            copy = self.in_place and not self.only
            wide = term.to(accumulation_dtype(term.dtype), copy=True) if copy else term
            self.total = wide.contiguous() if copy and not wide.is_sparse else wide
        elif self.total.is_sparse:
            self.total = self._together(self.total.to(accumulation_dtype(term.dtype)), term)
        elif self.in_place:
            self.total.add_(term)
        else:
            self.total = self.total.to(accumulation_dtype(term.dtype)) + term

    def _together(self, total: Tensor, term: Tensor) -> Tensor:
        """A sparse total and a term of either kind; entries at one place are added before they have doubled in number,
        so that there are never many more than rows that are used.
        """
        if not term.is_sparse:
            return term + total
        total = total + term
        if total._nnz() <= 2 * self.entries:
            return total
        total = total.coalesce()
        self.entries = total._nnz()
        return total

    def value(self) -> Tensor:
        """The sum, rounded once to the dtype of its terms."""
        assert self.total is not None
        return self.total.to(self.dtype)


@dataclass
class Stack:
    """n entries in one buffer, allocated with the first chunk; a chunk that is all of them is taken as it is."""

    n: int
    in_place: bool = True
    buffer: Tensor | None = None
    parts: dict[int, Tensor] = field(default_factory=dict)
    gaps: list[range] = field(default_factory=list)  # where the value is zero, as nothing is added

    @property
    def started(self) -> bool:
        """Whether something was added."""
        return self.buffer is not None or bool(self.parts)

    def add(self, iterations: range, part: Tensor | None) -> None:
        """Takes some entries, in any order; None is zero."""
        if part is None:
            self.gaps.append(iterations)
            return
        if not self.in_place:
            self.parts[iterations.start] = part
            return
        if len(iterations) == self.n:
            self.buffer = part
            return
        if self.buffer is None:
            self.buffer = part.new_empty((self.n, *part.shape[1:]))
        self.buffer[iterations.start : iterations.stop] = part

    def value(self) -> Tensor:
        """All entries, of which some were added."""
        if self.parts:
            like = next(iter(self.parts.values()))
            zeros = {gap.start: like.new_zeros((len(gap), *like.shape[1:])) for gap in self.gaps}
            return torch.cat([part for _, part in sorted({**self.parts, **zeros}.items())])
        assert self.buffer is not None
        for gap in self.gaps:
            self.buffer[gap.start : gap.stop] = 0
        return self.buffer


def may_grow_in_place() -> bool:
    """Whether sums and stacks may: not where a transform owns the terms and not what they are added to, nor where a
    graph records it all.
    """
    return active_levels() == 0 and not is_traced()


def own(tensors: Sequence[Tensor], taken: set[int]) -> list[Tensor]:
    """Copies each tensor whose storage is at a `taken` address or that of one before it, or whose entries share memory,
    or which is a part of something larger.

    An autograd.Function must not return such a tensor, forward mode writes into what it gets, and a caller who changes
    one in place expects no other to move.
    """
    result = []
    for t in tensors:
        pointer = address(t)
        shared = pointer in taken and pointer != 0
        result.append(t.clone() if shared or _is_expanded(t) else _whole(t))
        taken.add(pointer)
    return result


def _whole(t: Tensor) -> Tensor:
    """The tensor as one that is no view, so that a caller may change what an autograd.Function returns in place."""
    if is_fake(t) or t.layout is not torch.strided or not t._is_view():
        return t
    if t.is_conj() or t.is_neg() or t.untyped_storage().nbytes() > t.numel() * t.element_size():
        return t.resolve_conj().resolve_neg().clone()  # of a part, so that the rest is not kept with it
    return same_memory(t)


def same_memory(t: Tensor) -> Tensor:
    """Another tensor with the same data, and no view of it for autograd; a copy where a graph could not record that."""
    if is_traced():
        return t.clone()
    return t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _is_expanded(t: Tensor) -> bool:
    return t.layout is torch.strided and any(
        stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)
    )


def plain(t: Tensor) -> Tensor:
    """A chunk's output as an ordinary tensor without a graph."""
    return with_storage(t.detach() if t.requires_grad else t)


def with_storage(t: Tensor) -> Tensor:
    """A tangent that torch knows to be zero has no storage (and no public name): it becomes an ordinary tensor."""
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t


def recordable(t: Tensor) -> Tensor:
    """A tensor that was made in inference mode as one of which a graph may be recorded, with the same data."""
    if not t.is_inference() or torch.is_inference_mode_enabled() or is_wrapped(t):
        return t
    return same_memory(t) if t.layout is torch.strided and not (t.is_conj() or t.is_neg()) else t.clone()
