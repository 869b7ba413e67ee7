"""Any loop as a scalar function of one vector, so that transforms apply to it in any order and depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pure_loopgrad._tree import PyTree, is_differentiable, tree_map
from pure_loopgrad.testing.plain import leaves

Scalar: TypeAlias = Callable[[Tensor], Tensor]


def is_continuous(t: object) -> bool:
    """Whether a leaf can have a gradient."""
    return isinstance(t, Tensor) and is_differentiable(t)


@dataclass(frozen=True)
class Flat:
    """The real and complex leaves of a pytree as one real vector; it starts with a zero, so that it is never empty."""

    tree: PyTree

    def start(self) -> Tensor:
        """The vector that holds the tree's own values."""
        parts = [as_real(t).flatten() for t in leaves(self.tree) if is_continuous(t)]
        like = parts[0] if parts else torch.zeros((), dtype=torch.float64)
        return torch.cat([like.new_zeros(1), *parts])

    def unravel(self, v: Tensor) -> PyTree:
        """The tree with the entries of a vector in place of its values."""
        position = 1

        def replace(t: object) -> object:
            nonlocal position
            if not isinstance(t, Tensor) or not is_continuous(t):
                return t
            real = as_real(t)
            position += real.numel()
            part = v[position - real.numel() : position].reshape(real.shape).to(real.dtype)
            return torch.complex(part[..., 0], part[..., 1]) if t.is_complex() else part

        return tree_map(replace, self.tree)


def as_real(t: Tensor) -> Tensor:
    """Real and imaginary parts as a last axis; copied, since a view would ask for an even offset in its backward."""
    return torch.stack([t.real, t.imag], -1) if t.is_complex() else t


def direction(v: Tensor, k: int) -> Tensor:
    """A fixed vector like v, another for each k."""
    return torch.cos(torch.arange(v.shape[0], dtype=v.dtype, device=v.device) * (k + 1.3))


# each makes a scalar function of a vector from one, so that they nest to any depth
TRANSFORMS: dict[str, Callable[[Scalar], Scalar]] = {
    "grad": lambda f: lambda v: torch.func.grad(f)(v) @ direction(v, 0),
    "vjp": lambda f: lambda v: torch.func.vjp(f, v)[1](v.new_ones(()))[0] @ direction(v, 1),
    "jvp": lambda f: lambda v: torch.func.jvp(f, (v,), (direction(v, 2),))[1],
    "vmap": lambda f: lambda v: (torch.func.vmap(f)(torch.stack([v, 0.5 * v, v + 0.1])) * direction(v, 3)[:1]).sum(),
    "jacrev": lambda f: lambda v: torch.func.jacrev(lambda u: torch.stack([f(u), f(u) ** 2]))(v)[1] @ direction(v, 4),
    "jacfwd": lambda f: lambda v: torch.func.jacfwd(f)(v) @ direction(v, 5),
    "hessian": lambda f: lambda v: direction(v, 6) @ torch.func.hessian(f)(v) @ direction(v, 7),
}


def transformed(f: Scalar, stack: tuple[str, ...]) -> Scalar:
    """Applies transforms to a scalar function of a vector, each made a scalar again by a fixed direction.

    Args:
        f: a function from a vector of shape (m,) to a scalar.
        stack: names of `transform_stacks`, the innermost first.

    Returns:
        A function like f.

    Memory and time: those of the transforms; `"hessian"` and `"jacfwd"` run m tangents at once.

    Example:
        >>> f = transformed(lambda v: v.square().sum(), ("grad", "jvp"))
        >>> f(torch.ones(1, dtype=torch.float64))  # the second derivative
        tensor(2., dtype=torch.float64)
    """
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
