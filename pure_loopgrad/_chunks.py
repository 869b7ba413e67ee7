"""How n iterations are cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch

from pure_loopgrad._user import Tensors

AT_A_TIME = 64  # chunks whose slices are made together


def chunks(n: int, size: int) -> Iterator[range]:
    """Cuts n iterations into ranges of `size`; the last one holds the remainder."""
    return (range(start, min(start + size, n)) for start in range(0, n, size))


def slices(xs: Tensors, n: int, size: int) -> Iterator[Tensors]:
    """The chunks of xs, some at a time: a split of many costs a fifth of as many slices."""
    block = AT_A_TIME * size
    for start in range(0, n, block):
        length = min(block, n - start)
        parts = [torch.split(x.narrow(0, start, length), size) for x in xs]
        yield from zip(*parts, strict=True) if xs else repeat((), -(-length // size))
