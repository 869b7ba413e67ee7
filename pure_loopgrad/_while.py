"""Loops with a carry and nothing else: `fori_loop` over a range, `while_loop` until a condition fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _effects, _run, _tree
from pure_loopgrad._eager import eager
from pure_loopgrad._levels import is_recorded
from pure_loopgrad._rng import Sources, moved
from pure_loopgrad._scan import scan
from pure_loopgrad._schedule import Plan, check_plan
from pure_loopgrad._trace import unnoticed
from pure_loopgrad._tree import PyTree
from pure_loopgrad.errors import ImpureBodyError, LoopTypeError, LoopValueError


@eager
def fori_loop(
    lower: int,
    upper: int,
    body: Callable[[Any, Tensor, Any], Any],
    params: PyTree,
    init: PyTree,
    *,
    checkpoints: Plan = "sqrt",
    run: _run.Run | None = None,
) -> PyTree:
    """Carries a value from `lower` up to `upper`: `carry = body(params, i, carry)`, as `jax.lax.fori_loop`.

    Args:
        lower: the first i.
        upper: where i stops; if it is not above lower, init comes back.
        body: a pure function `body(params, i, carry) -> carry`; i is an int64 tensor of shape ().
        params: see `scan`.
        init: see `scan`.
        checkpoints: see `scan`.
        run: see `scan`.

    Returns:
        The last carry.

    Raises:
        LoopGradError: see `scan`.

    Memory and time: as `scan`.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> plg.fori_loop(1, 4, lambda w, i, c: c * w + i, torch.tensor(2.0), torch.tensor(0.0))
        tensor(11.)
    """
    xs = torch.arange(lower, max(lower, upper))
    carry, _ = scan(_IndexFirst(body), params, init, xs, checkpoints=checkpoints, run=run)
    return carry


@dataclass(frozen=True, eq=False)
class _IndexFirst:
    """A body of fori_loop as one of scan."""

    body: Callable[[Any, Tensor, Any], Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What messages speak of."""
        return self.body

    def __call__(self, params: Any, carry: Any, i: Tensor) -> tuple[Any, None]:
        return self.body(params, i, carry), None


@eager
def while_loop(
    cond: Callable[[Any, Any], Any],
    body: Callable[[Any, Any], Any],
    params: PyTree,
    init: PyTree,
    *,
    max_steps: int | None = None,
    checkpoints: Plan = 16,
    run: _run.Run | None = None,
) -> PyTree:
    """Carries a value while a condition holds: `while cond(params, carry): carry = body(params, carry)`.

    Differentiable in reverse, unlike `jax.lax.while_loop`. The number of steps n is found by a first run that keeps
    nothing; then the loop is a scan of n steps. Where no backward is recorded, the first run is the only one.

    Args:
        cond: `cond(params, carry) -> bool`, or a tensor of one element. It gets no gradient, and must not be batched.
        body: a pure function `body(params, carry) -> carry`.
        params: see `scan`.
        init: see `scan`.
        max_steps: stop after that many steps, whether or not the condition still holds.
        checkpoints: see `scan`; by default 16 carries.
        run: see `scan`.

    Returns:
        The last carry.

    Raises:
        ImpureBodyError: the condition draws random numbers, or updates a module's buffers, and a gradient is asked for.
        LoopTypeError: the condition is no single bool.
        LoopValueError: the condition depends on what `torch.vmap` batches, so that the number of steps differs.
        LoopGradError: see `scan`.

    Memory: as `scan`. Time: n F more than `scan` with the same carries, which knows n beforehand. That one runs at
    least 2 n - 1 steps forward, so this is at most 1.5 times the least possible with n known; no schedule that decides
    as it goes reaches that least either.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> newton = lambda a, x: (x + a / x) / 2
        >>> root = lambda a: plg.while_loop(lambda a, x: (x * x - a).abs() > 1e-4, newton, a, torch.ones_like(a))
        >>> root(torch.tensor(4.0)), torch.func.grad(root)(torch.tensor(4.0))
        (tensor(2.), tensor(0.2500))
    """
    check_plan(checkpoints)
    if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0):
        raise LoopValueError(f"max_steps={max_steps!r}: expected a number of steps, at least 0, or None")
    tensors, skeleton = _tree.split((params, init))
    if not is_recorded(tensors):
        return _run_while(cond, body, params, init, max_steps)[0]
    sources = Sources.of(tensors, skeleton.static, _run.current(run).generators)
    with unnoticed(sources):  # the second run draws what this one draws
        _, n = _run_while(_pure(cond, sources), body, params, init, max_steps)
    carry, _ = scan(_CarryOnly(body), params, init, None, length=n, checkpoints=checkpoints, run=run)
    return carry


def _pure(cond: Callable[[Any, Any], Any], sources: Sources) -> Callable[[Any, Any], Any]:
    """The condition, which the second run does not ask again, so that the body would draw other numbers there, and find
    other buffers.
    """

    def checked(params: Any, carry: Any) -> Any:
        before = sources.state()
        with _effects.asking(_updating_refused):
            answer = cond(params, carry)
        if moved(before, sources.state()):
            raise ImpureBodyError(
                "the condition of a while_loop draws random numbers, and a recomputation does not ask it again. Draw "
                "in the body, and carry what decides"
            )
        return answer

    return checked


def _updating_refused(name: str) -> ImpureBodyError:
    return ImpureBodyError(
        f"the condition of a while_loop calls a module that updates its buffer {name!r}, and a recomputation does not "
        f"ask the condition again. Use from_module(..., buffers='frozen') or module.eval() in the condition, or call "
        f"the module in the body, and carry what decides"
    )


def _run_while(
    cond: Callable[[Any, Any], Any], body: Callable[[Any, Any], Any], params: Any, carry: Any, max_steps: int | None
) -> tuple[Any, int]:
    n = 0
    while (max_steps is None or n < max_steps) and _asked(cond, params, carry):
        carry = body(params, carry)
        n += 1
    return carry, n


def _asked(cond: Callable[[Any, Any], Any], params: Any, carry: Any) -> bool:
    with _effects.asking():
        return _holds(cond(params, carry))


def _holds(condition: Any) -> bool:
    if isinstance(condition, Tensor):
        if condition.numel() != 1:
            raise LoopTypeError(f"the condition of a while_loop has {_tree.describe(condition)}; expected one bool")
        try:
            return bool(condition)
        except RuntimeError as error:
            raise LoopValueError(
                "the condition of a while_loop depends on what torch.vmap batches, so the number of steps would differ "
                "in the batch. Let the condition hold while it holds for any, as a constant of the batch"
            ) from error
    if str(getattr(condition, "dtype", "")) == "bool" and condition.shape == ():  # of numpy
        return bool(condition)
    if not isinstance(condition, bool):
        raise LoopTypeError(f"the condition of a while_loop is a {type(condition).__name__}; expected one bool")
    return condition


@dataclass(frozen=True, eq=False)
class _CarryOnly:
    """A body of while_loop as one of scan."""

    body: Callable[[Any, Any], Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What messages speak of."""
        return self.body

    def __call__(self, params: Any, carry: Any, _: None) -> tuple[Any, None]:
        return self.body(params, carry), None
