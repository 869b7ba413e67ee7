"""The cache of `torch.nn.utils.parametrize.cached()`, put aside where an iteration must compute its own weights.

A first pass would leave a weight without a graph there, and an iteration one that hangs on the leaves of another: the
next one to read it would get no gradient, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch.nn.utils import parametrize

# Private, as torch has only a way to start such a cache and none to suspend it; tests/test_private_torch.py says so if
# these move.
_torch = cast(Any, parametrize)


@contextmanager
def uncached() -> Iterator[None]:
    """A block that sees no cache of a block around it, and leaves that as it was."""
    outer = _torch._cache_enabled, _torch._cache
    _torch._cache_enabled, _torch._cache = 0, {}
    try:
        yield
    finally:
        _torch._cache_enabled, _torch._cache = outer
