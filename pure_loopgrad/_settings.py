"""What decides which code a function runs: the modes of the modules that it reaches, and its switches.

A part of the key under which something measured is kept for a function that may be made anew: a body with dropout in
train mode, or with `use_noise` set, is not the body that it was in eval mode, or without.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from pure_loopgrad._names import children
from pure_loopgrad._stateful import ModuleBody
from pure_loopgrad._training import flags_of

MAX_VISITED = 200  # bounds on the search, so that a function that reaches the whole program stays cheap
MAX_ENTRIES = 32


def settings_of(fn: Any) -> tuple[Hashable, ...]:
    """Of a function, in the order in which they are reached: the training flags of each module, and of each number or
    string whether it is something or nothing. Never the numbers themselves: one that counts steps is no other function.
    """
    found: list[Hashable] = []
    visited: set[int] = set()
    queue: list[Any] = [fn]
    for value in queue:
        if isinstance(value, (bool, int, float, str, type(None))):
            found.append(bool(value))
        elif isinstance(value, ModuleBody):
            found.append(value.mode)
        elif isinstance(value, nn.Module):
            found.append(flags_of(tuple(value.modules())))
        elif _leads_on(value) and id(value) not in visited and len(visited) < MAX_VISITED:
            visited.add(id(value))
            queue.extend(child for _, child in children("", value))
    return tuple(found)


def _leads_on(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return len(value) <= MAX_ENTRIES
    return not isinstance(value, (Tensor, ModuleType, type))
