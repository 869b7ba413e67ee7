"""Holding one function of a pytree against another: values, and the gradient of any transform of a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad._tree import PyTree, tree_map
from pure_loopgrad.testing.comparing import differences, tolerance_of
from pure_loopgrad.testing.transforms import Flat, gradient_by_backward, transformed

Loss: TypeAlias = Callable[[Any, Any], Tensor]


def assert_same_gradient(
    ours: Callable[[PyTree], PyTree],
    plain: Callable[[PyTree], PyTree],
    inputs: PyTree,
    loss: Loss | None = None,
    *,
    stack: tuple[str, ...] = (),
    dtype: torch.dtype | None = torch.float64,
    rtol: float | None = None,
    atol: float = 1e-13,
    what: str = "ours",
) -> None:
    """Fails if two functions of a pytree differ, in values or in the gradient of a loss: for a loop of one's own.

    Args:
        ours: `ours(inputs) -> outputs`, to be held against `plain`.
        plain: the same, written plainly; it runs under ordinary autograd.
        inputs: any pytree; its float and complex leaves are differentiated.
        loss: `loss(inputs, outputs) -> scalar`; by default one that depends on every output.
        stack: see `assert_matches_full_graph`.
        dtype: see `assert_matches_full_graph`.
        rtol: see `assert_matches_full_graph`.
        atol: see `assert_matches_full_graph`.
        what: for the message.

    Raises:
        AssertionError: which leaf of what differs, and by how much.

    Memory and time: those of both functions and their gradients.

    Example:
        >>> def in_pairs(xs):  # forgets the last one of an odd number
        ...     return sum(a * b for a, b in zip(xs[::2], xs[1::2]))
        >>> assert_same_gradient(in_pairs, lambda xs: xs[0] * xs[1] + xs[2], torch.ones(3))
        Traceback (most recent call last):
        ...
        AssertionError: ours: outputs: differs by 1.00e+00, where the plain loop has up to 2.00e+00 ...
    """
    inputs = cast(inputs, dtype)
    rtol = tolerance_of(inputs) if rtol is None else rtol
    Reference(plain, inputs, coupled if loss is None else loss, stack).hold(ours, rtol, atol, what)


@dataclass(frozen=True)
class Reference:
    """A plain function with what it gives, each computed once: its outputs, a transformed loss, the loss's gradient."""

    plain: Callable[[PyTree], PyTree]
    inputs: PyTree
    loss: Loss
    stack: tuple[str, ...] = ()

    @cached_property
    def outputs(self) -> PyTree:
        """What the function returns."""
        with torch.no_grad():
            return seeded(self.plain, self.inputs)

    @cached_property
    def gradient(self) -> tuple[Tensor, PyTree]:
        """The loss, and its gradient in the structure of the inputs."""
        return self._gradient_of(self.plain)

    def hold(self, ours: Callable[[PyTree], PyTree], rtol: float, atol: float, what: str) -> None:
        """Fails if another function gives something else."""
        with torch.no_grad():
            assert_no_difference(seeded(ours, self.inputs), self.outputs, rtol, f"{what}: outputs", atol)
        (value, gradient), (plain_value, plain_gradient) = self._gradient_of(ours), self.gradient
        name = " of ".join([*reversed(self.stack), "loss"])
        assert_no_difference(value, plain_value, rtol, f"{what}: {name}", atol)
        assert_no_difference(gradient, plain_gradient, rtol, f"{what}: gradient of {name}: inputs", atol)

    def _gradient_of(self, f: Callable[[PyTree], PyTree]) -> tuple[Tensor, PyTree]:
        flat = Flat(self.inputs)

        def of_vector(v: Tensor) -> Tensor:
            filled = flat.unravel(v)
            return self.loss(filled, f(filled))

        value, gradient = seeded(gradient_by_backward, transformed(of_vector, self.stack), flat.start())
        return value, flat.unravel(gradient)


def coupled(_: PyTree, ys: PyTree) -> Tensor:
    """A scalar whose derivative at every entry is never zero and depends on all others: v + sin(v)/2, v = a . y.

    Entries that are not finite stay out, as one of them would make every derivative NaN, right or wrong.
    """
    entries = Flat(ys).start()
    entries = torch.where(torch.isfinite(entries), entries, 0)
    along = entries @ torch.cos(torch.arange(len(entries), dtype=entries.dtype, device=entries.device))
    return along + 0.5 * torch.sin(along)


def cast(tree: PyTree, dtype: torch.dtype | None) -> PyTree:
    """The tree without its graph, its real floats in another dtype."""

    def cast(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.detach().to(dtype) if dtype is not None and t.is_floating_point() else t.detach()

    return tree_map(cast, tree)


def seeded(f: Callable[..., Any], *args: Any) -> Any:
    """Calls a function from one state of torch's generators, and leaves them as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return f(*args)


def assert_no_difference(ours: PyTree, plain: PyTree, rtol: float, what: str, atol: float) -> None:
    """Raises an AssertionError that names what differs."""
    if found := differences(ours, plain, rtol, what, atol):
        raise AssertionError("; ".join(found))
