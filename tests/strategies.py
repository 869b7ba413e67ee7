"""Drawn loops: a body from a small grammar of differentiable operations, its parameters, its inputs, a chunk size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests import oracle

Op = Callable[[Tensor, Any, Any], Tensor]
D = 3  # the width of every hidden vector: small, so that full hessians are cheap

# name -> (shape of the operation's parameter or None, h, p, x -> h). All are smooth, and tame at third order.
OPS: dict[str, tuple[tuple[int, ...] | None, Op]] = {
    "linear": ((D, D), lambda h, p, x: p @ h),
    "shift": ((D,), lambda h, p, x: h + p),
    "scale": ((), lambda h, p, x: h * p),
    "tanh": (None, lambda h, p, x: torch.tanh(h)),
    "silu": (None, lambda h, p, x: F.silu(h)),
    "sin": (None, lambda h, p, x: torch.sin(h)),
    "square": (None, lambda h, p, x: torch.tanh(h) ** 2),
    "softmax": (None, lambda h, p, x: torch.softmax(h, 0)),
    "cumsum": (None, lambda h, p, x: torch.cumsum(h, 0) / D),
    "norm": (None, lambda h, p, x: h / (1 + h.square().sum())),
    "skip": ((D, D), lambda h, p, x: h + torch.tanh(p @ vector(x))),
    "inner": ((D,), lambda h, p, x: h * torch.exp(-(p * h).square().sum())),
    "grad": ((D,), lambda h, p, x: torch.func.grad(lambda v: torch.sin(v * p).sum())(h)),
}


class Pair(NamedTuple):
    v: Any
    i: Any


@dataclass
class Named:
    """A container that optree does not know by itself."""

    v: Any
    tag: str = "tag"


def vector(x: Any) -> Tensor:
    """The float vector in one x, wherever it stands."""
    if isinstance(x, dict):
        return x["v"]
    return x if isinstance(x, Tensor) else x.v


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


@dataclass(frozen=True)
class Body:
    """A drawn body; its repr is the program, for failure messages."""

    ops: tuple[str, ...]
    output: str

    def __call__(self, params: Any, x: Any) -> Any:
        h = vector(x)
        for name, p in zip(self.ops, params["layers"], strict=True):
            h = OPS[name][1](h, p, x)
        return OUTPUTS[self.output](h, params, x)


@dataclass(frozen=True)
class Case:
    """A loop to run: `body(params, x)` for each of `xs`, `chunk_size` at a time."""

    body: Body
    params: Any
    xs: Any
    n: int
    chunk_size: int | None
    seed: int

    def __repr__(self) -> str:
        return f"Case({self.body}, n={self.n}, chunk_size={self.chunk_size}, seed={self.seed}, xs={type(self.xs)})"


SIZES = st.sampled_from([0, 1, 2, 3, 5, 7])
CHUNKS = st.sampled_from([1, 1, 2, 3, 4, 11, None])


@st.composite
def bodies(draw: st.DrawFn, outputs: tuple[str, ...] = tuple(OUTPUTS)) -> Body:
    ops = draw(st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4))
    return Body(tuple(ops), draw(st.sampled_from(outputs)))


@st.composite
def cases(draw: st.DrawFn, outputs: tuple[str, ...] = tuple(OUTPUTS), sizes: st.SearchStrategy[int] = SIZES) -> Case:
    body, n, seed = draw(bodies(outputs)), draw(sizes), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = [OPS[name][0] for name in body.ops]
    layers = [None if shape is None else normal(*shape) for shape in shapes]
    params = {"layers": draw(st.sampled_from([list, tuple]))(layers), "spare": normal(2), **draw(extras())}
    v, i = normal(n, D), torch.arange(n)
    xs = draw(st.sampled_from([v, {"v": v, "i": i, "name": "static"}, Pair(v, i), Named(v)]))
    return Case(body, params, xs, n, draw(CHUNKS), seed)


def extras() -> st.SearchStrategy[dict[str, Any]]:
    """Leaves that no gradient can reach, or that nobody uses."""
    return st.fixed_dictionaries(
        {},
        optional={
            "count": st.just(torch.tensor(3)),
            "flag": st.just(torch.tensor([True, False])),
            "act": st.just("relu"),
            "number": st.just(3.0),
            "nothing": st.none(),
            "unused": st.builds(torch.ones, st.just(2), dtype=st.just(torch.float64)),
            "no entries": st.just(torch.zeros(0, dtype=torch.float64)),
        },
    )


def _squares(ys: list[Tensor]) -> Tensor:
    return sum((torch.tanh(y).square().sum() for y in ys), torch.zeros((), dtype=torch.float64))


def _logsumexp(ys: list[Tensor]) -> Tensor:
    """Couples every output with every other; the added zero keeps it finite where there is no output."""
    return torch.logsumexp(torch.cat([torch.zeros(1, dtype=torch.float64), *(y.flatten() for y in ys)]), 0)


def _pairs(ys: list[Tensor]) -> Tensor:
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), *(torch.tanh(y.flatten()) for y in ys)])
    return torch.sin(flat[:, None] * flat[None, :]).sum()


def _first_only(ys: list[Tensor]) -> Tensor:
    """Leaves the other outputs without a cotangent."""
    return torch.sin(ys[0]).sum()


LOSSES = {"squares": _squares, "logsumexp": _logsumexp, "pairs": _pairs, "first only": _first_only}


@dataclass(frozen=True)
class TreeLoss:
    """A loss on the float leaves of a pytree; with `head`, params enter directly as well."""

    name: str
    head: bool = False

    def __call__(self, params: Any, ys: Any) -> Tensor:
        floats = [y for y in oracle.leaves(ys) if y.is_floating_point()]
        value = LOSSES[self.name](floats)
        return value * torch.cos(params["spare"]).sum() if self.head else value


def losses() -> st.SearchStrategy[TreeLoss]:
    return st.builds(TreeLoss, st.sampled_from(sorted(LOSSES)), st.booleans())


@dataclass(frozen=True)
class Flat:
    """The float leaves of (params, xs) as one vector, so that any transform can be applied to any loop."""

    params: Any
    xs: Any

    def start(self) -> Tensor:
        floats = [t.flatten() for t in oracle.leaves((self.params, self.xs)) if t.is_floating_point()]
        return torch.cat([torch.zeros(1, dtype=torch.float64), *floats])

    def unravel(self, v: Tensor) -> tuple[Any, Any]:
        position = 1

        def replace(t: Any) -> Any:
            nonlocal position
            if not isinstance(t, Tensor) or not t.is_floating_point():
                return t
            position += t.numel()
            return v[position - t.numel() : position].reshape(t.shape)

        return oracle.tree_map(replace, (self.params, self.xs))


Scalar = Callable[[Tensor], Tensor]


def _direction(v: Tensor, k: int) -> Tensor:
    """A fixed vector like v, another for each k."""
    return torch.cos(torch.arange(v.shape[0], dtype=torch.float64) * (k + 1.3))


# each makes a scalar function of a vector from one, so that they nest to any depth
TRANSFORMS: dict[str, Callable[[Scalar], Scalar]] = {
    "grad": lambda f: lambda v: torch.func.grad(f)(v) @ _direction(v, 0),
    "vjp": lambda f: lambda v: torch.func.vjp(f, v)[1](torch.ones((), dtype=v.dtype))[0] @ _direction(v, 1),
    "jvp": lambda f: lambda v: torch.func.jvp(f, (v,), (_direction(v, 2),))[1],
    "vmap": lambda f: lambda v: (torch.func.vmap(f)(torch.stack([v, 0.5 * v, v + 0.1])) * _direction(v, 3)[:1]).sum(),
    "jacrev": lambda f: lambda v: torch.func.jacrev(lambda u: torch.stack([f(u), f(u) ** 2]))(v)[1] @ _direction(v, 4),
    "jacfwd": lambda f: lambda v: torch.func.jacfwd(f)(v) @ _direction(v, 5),
    "hessian": lambda f: lambda v: _direction(v, 6) @ torch.func.hessian(f)(v) @ _direction(v, 7),
}


def transform_stacks(depth: int = 2) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(sorted(TRANSFORMS)), max_size=depth).map(tuple)


def transformed(f: Scalar, stack: tuple[str, ...]) -> Scalar:
    for name in stack:
        f = TRANSFORMS[name](f)
    return f


def gradient_by_backward(f: Scalar, v: Tensor) -> tuple[Tensor, Tensor]:
    """The value and, by ordinary autograd around all transforms, its gradient."""
    v = v.clone().requires_grad_()
    value = f(v)
    if not value.requires_grad:
        return value, torch.zeros_like(v)
    (g,) = torch.autograd.grad(value, v)
    return value.detach(), g


def gradient_by_func(f: Scalar, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch.func, for what is a constant to ordinary autograd around it."""
    g, value = torch.func.grad_and_value(f)(v)
    return value, g
