"""Tensors that a body reads and that were made inside a transform around the loop: a range, a mask, a detached value.

torch.func wraps whatever is made inside a transform. A loop runs below all of them, where such a tensor is foreign; so
wherever the body passes one to torch, what it wraps stands in. That is right for those of which no transform asks
anything, and only for these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pure_loopgrad._dual_level import has_tangent, in_dual_level
from pure_loopgrad._levels import active_levels, batched_like, is_batched_here, is_constant, is_wrapped
from pure_loopgrad._names import MORE, reachable

NEAR = 200  # steps of the search that every call makes, modules apart
FAR = 10_000  # the same inside a transform


@dataclass
class Constants:
    """What a call's body can reach of the transforms around the loop: the wrapped constants, by id, each with what it
    wraps; and the strangers, of which a transform asks something.
    """

    wrapped: list[Tensor] = field(default_factory=list)  # so that no id is used again
    plain: dict[int, Tensor] = field(default_factory=dict)
    strangers: dict[int, Tensor] = field(default_factory=dict)
    inside: bool = False  # whether there is a transform around the loop, which may ask for more than autograd does
    all_known: bool = True  # whether the search came to its end

    def find(self, body: Callable[..., Any]) -> None:
        """Notes what a body leads to. Called above all levels, as only there a transform can be asked."""
        dual = in_dual_level()
        if active_levels() == 0 and not dual:
            return
        self.inside = True
        for _, t in reachable(inspect.unwrap(body), (Tensor,), FAR):
            self.all_known = self.all_known and t is not MORE
            if not isinstance(t, Tensor) or id(t) in self.plain or id(t) in self.strangers:
                continue
            if not is_wrapped(t):
                if dual and has_tangent(t):
                    self.strangers[id(t)] = t
            elif is_constant(t):
                self.wrapped.append(t)
                self.plain[id(t)] = torch.func.debug_unwrap(t)
            else:
                self.strangers[id(t)] = t

    @property
    def lacks_nothing(self) -> bool:
        """Whether the body is known to reach no tensor whose derivative would be lost below its transform."""
        return self.all_known and not self.strangers

    def inherit(self, outer: Constants) -> None:
        """Takes over those of a loop around, below whose levels nobody can be asked."""
        self.wrapped.extend(outer.wrapped)
        self.plain.update(outer.plain)
        self.strangers.update(outer.strangers)

    def unwrapped(self, value: Any) -> Any:
        """A value with the constants in it as plain tensors; it is nested in plain containers only."""
        if isinstance(value, Tensor):
            return self._plain(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.unwrapped, value))
        if type(value) is slice:
            return slice(*map(self.unwrapped, (value.start, value.stop, value.step)))
        return {k: self.unwrapped(v) for k, v in value.items()} if type(value) is dict else value

    def _plain(self, t: Tensor) -> Tensor:
        """Also what a vmap inside the body has made of a constant that it was given."""
        if (found := self.plain.get(id(t))) is not None or not is_batched_here(t):
            return t if found is None else found
        inner = torch.func.debug_unwrap(t, recurse=False)
        found = self._plain(inner)
        return t if found is inner else batched_like(t, found)


class Unwrapping(TorchFunctionMode):
    """Inside it, torch's functions get plain tensors for the constants."""

    def __init__(self, constants: Constants) -> None:
        super().__init__()
        self.constants = constants

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self.constants.unwrapped(args), **self.constants.unwrapped(kwargs or {}))


def reaches_generator(body: Callable[..., Any], harmless: set[int]) -> bool:
    """Whether a body can reach a generator whose id is not among the `harmless`; a draw from it shows in no output."""
    visited: set[int] = set()
    for _, value in reachable(inspect.unwrap(body), (torch.nn.Module, Tensor), NEAR):
        found = _generators_of(value, visited) if isinstance(value, torch.nn.Module) else [value]
        if any(isinstance(v, torch.Generator) and id(v) not in harmless for v in found):
            return True
    return False


def _generators_of(module: torch.nn.Module, visited: set[int]) -> Iterator[torch.Generator]:
    """Those among the attributes of a module and its layers; every call asks, so it is fast also for a large net."""
    layers = [module]
    for layer in layers:
        if id(layer) not in visited:
            visited.add(id(layer))
            values = vars(layer).values()
            if torch.Generator in map(type, values):
                yield from (v for v in values if isinstance(v, torch.Generator))
            layers.extend(m for m in layer._modules.values() if m is not None)
