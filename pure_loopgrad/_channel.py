"""What the ranks of a group tell each other in a call: their outputs, sums and gradients, and what went wrong.

A rank that fails takes part in the collective that follows, with a flag, so that nobody waits for it. Everything goes
in one flat buffer a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._levels import below_all_levels
from pure_loopgrad._shapes import Meta
from pure_loopgrad.errors import DistributedError, LoopValueError

R = TypeVar("R")
Outputs: TypeAlias = "tuple[_tree.TreeSpec, list[Meta]]"  # the structure of an output, and its leaves
Communication = Literal["fp32", "bf16"]
LOW = 2**32 - 1
HEADER = 3  # int64 numbers before the bytes of a rank: whether it failed, its rows, its bytes
HEADER_BYTES = 8 * HEADER


@dataclass(eq=False)
class Channel:
    """The ranks of a group and what they have agreed on for one function."""

    group: Any
    communication: Communication = "fp32"
    deterministic: bool = False
    outputs: Outputs | None = None  # of one iteration; known after the first call
    signature: Sequence[str] = ()  # what must be the same on all ranks, a line for each thing
    sent: Sequence[Meta] = ()  # what a rank sends forward; known after the first call
    capacity: int = 0  # bytes that each rank has in a gather; all ranks know the same number

    @property
    def rank(self) -> int:
        """The place of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        """How many processes the group has."""
        return dist.get_world_size(self.group)

    def collective(self, what: str, call: Callable[[], R]) -> R:
        """Runs a collective.

        Raises:
            DistributedError: the others did not take part.
        """
        try:
            return call()
        except RuntimeError as error:  # what torch raises for a lost connection and for a timeout
            raise DistributedError(
                f"rank {self.rank} of {self.world} could not reach the others to {what}: a rank has died, has raised "
                f"outside of a loop, or calls something else. {type(error).__name__}: {error}"
            ) from error

    def _objects(self, what: str, own: Any) -> list[Any]:
        """Everybody's pickled object. Below all transforms, under which the tensors that carry it could not be read."""
        every: list[Any] = [None] * self.world
        with below_all_levels():
            self.collective(what, lambda: dist.all_gather_object(every, own, self.group))
        return every

    def agree(self, signature: Sequence[str], outputs: Outputs | None, error: Exception | None) -> None:
        """The handshake of the first call: everybody does the same thing, on leaves of the same shapes and dtypes.

        Args:
            signature: a line for each thing that must agree, as `"params['w']: shape (3,), torch.float32"`.
            outputs: of one iteration, unless this rank has none and could not find out.
            error: what this rank raised, if it did.

        Raises:
            LoopValueError: ranks disagree; the message names both and the leaf.
            DistributedError: another rank raised.
        """
        own = (list(signature), outputs, None if error is None else _text(error))
        every = self._objects("compare their arguments", own)
        prepared = [(rank, lines) for rank, (lines, _, _) in enumerate(every) if lines]
        for rank, lines in prepared:  # first, since a difference may be why a rank has raised
            self._refuse_difference(rank, prepared[0][1], lines, prepared[0][0])
        raise_first([text for _, _, text in every], error)
        known = [(rank, found) for rank, (_, found, _) in enumerate(every) if found is not None]
        if not known:
            raise LoopValueError("no rank has an iteration, and the outputs' shapes could not be found without data")
        for rank, found in known:
            self._refuse_difference(rank, _lines(known[0][1]), _lines(found), known[0][0])
        self.outputs = known[0][1]

    def _refuse_difference(self, rank: int, first: list[str], lines: list[str], other: int) -> None:
        if lines == first:
            return
        pairs = zip([*first, "nothing"], [*lines, "nothing"], strict=False)
        ours, theirs = next((a, b) for a, b in pairs if a != b)
        raise LoopValueError(f"the ranks do not do the same thing: rank {other} has {ours}, rank {rank} has {theirs}")

    def gather(self, outs: Sequence[Tensor], error: Exception | None) -> list[list[Tensor]]:
        """Everybody's outputs, one list a rank; ranks may have different numbers of rows.

        Raises:
            DistributedError: another rank raised.
        """
        device, n = outs[0].device, outs[0].shape[0]
        own = _as_bytes(outs, device) if error is None else _message(error, device)
        while True:
            headers, parts = self._gather_bytes(own, n, failed=error is not None)
            needed = max(size for _, _, size in headers)
            fits, self.capacity = needed <= self.capacity, _capacity(needed, self.capacity)
            if fits:
                break
        pairs = list(zip(headers, parts, strict=True))
        raise_first([bytes(part[:size].tolist()).decode() if bad else None for (bad, _, size), part in pairs], error)
        return [_from_bytes(part, outs, count) for (_, count, _), part in pairs]

    def _gather_bytes(self, own: Tensor, n: int, failed: bool) -> tuple[list[tuple[int, int, int]], list[Tensor]]:
        """One all_gather: each rank's header and its bytes, as far as the capacity goes."""
        buffer = own.new_zeros(HEADER_BYTES + self.capacity)
        header = torch.tensor([int(failed), n, own.numel()], dtype=torch.int64).view(torch.uint8)
        buffer[:HEADER_BYTES] = header.to(own.device)
        if own.numel() <= self.capacity:
            buffer[HEADER_BYTES : HEADER_BYTES + own.numel()] = own
        every = buffer.new_empty(self.world * buffer.numel())
        self.collective("gather their outputs", lambda: dist.all_gather_single(every, buffer, group=self.group))
        rows = list(every.view(self.world, -1))
        numbers = torch.stack([row[:HEADER_BYTES] for row in rows]).cpu().view(torch.int64).tolist()
        return [(bad, count, size) for bad, count, size in numbers], [row[HEADER_BYTES:] for row in rows]

    def add_up(self, tensors: Sequence[Tensor], error: Exception | None) -> list[Tensor]:
        """The sums of everybody's tensors, which have the same shapes.

        Raises:
            DistributedError: another rank raised.
        """
        flat = _flat(tensors, failed=error is not None)
        total = self.collective("add up", lambda: self._added(flat))
        if total[-1] != 0:
            raise_first(self._objects("tell what went wrong", None if error is None else _text(error)), error)
        return _unflat(total, tensors)

    def fail(
        self, kind: Literal["gather", "add_up"], like: Sequence[Meta] | Sequence[Tensor], error: Exception | None
    ) -> NoReturn:
        """Takes part in the collective that the others are in, with what this rank has raised, and raises it."""
        assert error is not None
        if kind == "gather":
            self.gather([torch.zeros((0, *t.shape[1:]), dtype=t.dtype, device=t.device) for t in like], error)
        else:
            self.add_up([torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in like], error)
        raise error

    def _added(self, flat: Tensor) -> Tensor:
        if self.communication == "bf16" and flat.dtype == torch.float32:
            return self._added_by_halves(flat)
        if not self.deterministic:
            dist.all_reduce(flat, group=self.group)
            return flat
        every = flat.new_empty(self.world * flat.numel())
        dist.all_gather_single(every, flat, group=self.group)
        return _in_order(every.view(self.world, -1))

    def _added_by_halves(self, flat: Tensor) -> Tensor:
        """A reduction that sends bfloat16 and adds in float32: each rank its share, in the order of the ranks."""
        share = -(-flat.numel() // self.world)
        padded = torch.cat([flat, flat.new_zeros(share * self.world - flat.numel())]).bfloat16()
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self.group)
        own = _in_order(received.view(self.world, share).float()).bfloat16()
        every = own.new_empty(share * self.world)
        dist.all_gather_single(every, own, group=self.group)
        return every[: flat.numel()].float()


def _lines(outputs: Outputs) -> list[str]:
    spec, metas = outputs
    paths = _tree.Skeleton.of_tensors(spec).tensor_paths("output")
    return [f"{path}: {_tree.describe(meta)}" for path, meta in zip(paths, metas, strict=True)]


def raise_first(texts: Sequence[str | None], own: Exception | None) -> None:
    """Raises this rank's own error, else what the first rank that failed has to say."""
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text is not None:
            raise DistributedError(f"rank {rank} raised {text}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _message(error: Exception, device: torch.device) -> Tensor:
    return torch.tensor(list(_text(error).encode()), dtype=torch.uint8, device=device)


def _capacity(needed: int, capacity: int) -> int:
    """What the next gather has room for: as much as this one needed, unless it needed a little less."""
    return needed if needed > capacity or 2 * needed < capacity else capacity


def _as_bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=device)


def _from_bytes(data: Tensor, like: Sequence[Tensor], n: int) -> list[Tensor]:
    outs, start = [], 0
    for t in like:
        shape = (n, *t.shape[1:])
        size = torch.Size(shape).numel() * t.dtype.itemsize
        # a clone, since the bytes of an entry must lie at a multiple of its size
        outs.append(data[start : start + size].clone().view(t.dtype).reshape(shape))
        start += size
    return outs


def _flat(tensors: Sequence[Tensor], failed: bool) -> Tensor:
    """All entries and a flag, in one dtype that holds them all: float32, or float64 where there is need."""
    reals = [_as_reals(t) for t in tensors]
    dtype = torch.float32
    for t in reals:
        dtype = torch.promote_types(dtype, t.dtype)
    flag = torch.tensor([float(failed)], dtype=dtype, device=reals[0].device if reals else None)
    return torch.cat([*(t.to(dtype) for t in reals), flag])


def _as_reals(t: Tensor) -> Tensor:
    """One or two real numbers an entry, whose sums over ranks are exact for integers: halves of 32 bits in float64."""
    t = t.to_dense() if t.is_sparse else t  # each rank has entries at other places
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj()).reshape(-1)
    if t.is_floating_point():
        return t.reshape(-1)
    whole = t.reshape(-1).to(torch.int64)
    return torch.stack([whole & LOW, whole >> 32], -1).reshape(-1).double()


def _unflat(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    outs, start = [], 0
    for t in like:
        size = t.numel() * (1 if t.is_floating_point() else 2)
        outs.append(_from_reals(flat[start : start + size], t))
        start += size
    return outs


def _from_reals(part: Tensor, like: Tensor) -> Tensor:
    if like.is_floating_point():
        return part.reshape(like.shape).to(like.dtype)
    pairs = part.reshape(*like.shape, 2)
    if like.is_complex():
        return torch.view_as_complex(pairs.clone()).to(like.dtype)  # a copy, which starts at an even place
    low, high = pairs.to(torch.int64).unbind(-1)
    return (low + (high << 32)).to(like.dtype)


def _in_order(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
