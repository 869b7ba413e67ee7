"""A small grammar of bodies: smooth operations on one float vector, and ways to return it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from pure_loopgrad.testing.plain import leaves
from pure_loopgrad.testing.transforms import is_continuous

WIDTH = 3  # of every hidden vector: small, so that full hessians are cheap
Op: TypeAlias = Callable[[Tensor, Any, Any], Tensor]


class Pair(NamedTuple):
    """An x of a vector and an index."""

    v: Any
    i: Any


@dataclass
class Named:
    """An x in a container that optree does not know by itself."""

    v: Any
    tag: str = "tag"


def vector(x: Any) -> Tensor:
    """The float vector in one x, wherever it stands."""
    found: Tensor = x["v"] if isinstance(x, dict) else x if isinstance(x, Tensor) else x.v
    return found


# name -> (shape of the operation's parameter or None, h, p, x -> h). All are smooth, and tame at third order.
OPS: dict[str, tuple[tuple[int, ...] | None, Op]] = {
    "linear": ((WIDTH, WIDTH), lambda h, p, x: p @ h),
    "shift": ((WIDTH,), lambda h, p, x: h + p),
    "scale": ((), lambda h, p, x: h * p),
    "tanh": (None, lambda h, p, x: torch.tanh(h)),
    "silu": (None, lambda h, p, x: F.silu(h)),
    "sin": (None, lambda h, p, x: torch.sin(h)),
    "square": (None, lambda h, p, x: torch.tanh(h) ** 2),
    "softmax": (None, lambda h, p, x: torch.softmax(h, 0)),
    "cumsum": (None, lambda h, p, x: torch.cumsum(h, 0) / WIDTH),
    "norm": (None, lambda h, p, x: h / (1 + h.square().sum())),
    "skip": ((WIDTH, WIDTH), lambda h, p, x: h + torch.tanh(p @ vector(x))),
    "inner": ((WIDTH,), lambda h, p, x: h * torch.exp(-(p * h).square().sum())),
    "grad": ((WIDTH,), lambda h, p, x: torch.func.grad(lambda v: torch.sin(v * p).sum())(h)),
}

OUTPUTS: dict[str, Callable[[Tensor, Any, Any], Any]] = {
    "vector": lambda h, p, x: h,
    "scalar": lambda h, p, x: h.sum(),
    "matrix": lambda h, p, x: torch.outer(h, h),
    "tuple": lambda h, p, x: (h, h.sum()),
    "dict": lambda h, p, x: {"h": h, "nothing": None, "deep": [h.prod(), {"again": h * 2}]},
    "twice": lambda h, p, x: (h, h),
    "the input": lambda h, p, x: (h, vector(x)),
    "constant": lambda h, p, x: (h, torch.ones(2, dtype=torch.float64)),
    "integer": lambda h, p, x: (h, (h > 0).sum()),
    "number": lambda h, p, x: (h, 3),
    "empty": lambda h, p, x: (h, h[:0]),
    "parameter": lambda h, p, x: {"h": h, "p": p["spare"] * 1},
}
FLOAT_OUTPUTS = tuple(k for k in OUTPUTS if k not in ("integer", "number", "empty"))  # those that have a mean


@dataclass(frozen=True)
class DrawnBody:
    """A body of the grammar; its repr is the program, for failure messages.

    Attributes:
        ops: names of operations, applied one after the other.
        output: the name of what is returned.
    """

    ops: tuple[str, ...]
    output: str

    def __call__(self, params: Any, x: Any) -> Any:
        """One iteration: `params["layers"]` has one entry an operation, None where it takes no parameter."""
        h = vector(x)
        for name, p in zip(self.ops, params["layers"], strict=True):
            h = OPS[name][1](h, p, x)
        return OUTPUTS[self.output](h, params, x)

    def parameters(self, generator: torch.Generator) -> dict[str, Any]:
        """Parameters that fit, normal and in float64."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        shapes = [OPS[name][0] for name in self.ops]
        return {"layers": [None if shape is None else normal(*shape) for shape in shapes], "spare": normal(2)}


def _floats(ys: list[Tensor]) -> Tensor:
    """All outputs in one vector, with a zero so that it is never empty."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), *(y.flatten() for y in ys)])


def _pairs(ys: list[Tensor]) -> Tensor:
    flat = torch.tanh(_floats(ys))
    return torch.sin(flat[:, None] * flat[None, :]).sum()


LOSSES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "squares": lambda ys: torch.tanh(_floats(ys)).square().sum(),
    "logsumexp": lambda ys: torch.logsumexp(_floats(ys), 0),
    "pairs": _pairs,
    "first only": lambda ys: torch.sin(ys[0]).sum(),  # leaves the other outputs without a cotangent
}


@dataclass(frozen=True)
class DrawnLoss:
    """A loss on the float leaves of a pytree.

    Attributes:
        name: of `LOSSES`.
        head: whether params enter directly as well.
    """

    name: str
    head: bool = False

    def __call__(self, params: Any, ys: Any) -> Tensor:
        """A scalar."""
        value = LOSSES[self.name]([y for y in leaves(ys) if is_continuous(y)])
        return value * torch.cos(params["spare"]).sum() if self.head else value
