"""Rematerialisation: a loop of one iteration, whose outputs are a sum of one term."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

from pure_loopgrad import _run, _tree
from pure_loopgrad._body import Once
from pure_loopgrad._eager import eager
from pure_loopgrad._loop import Loop
from pure_loopgrad._trace import Trace, first_pass_checked
from pure_loopgrad._user import UserBody

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(fn: Callable[P, R]) -> Callable[P, R]:
    """Makes a function keep only its inputs for the backward, and recompute the rest; composes with every transform.

    Like `jax.checkpoint`, and unlike `torch.utils.checkpoint`, the result works under `torch.func.grad`, `vjp`, `jvp`,
    `vmap`, `jacrev`, `jacfwd`, `hessian` and their nestings, as well as with `.backward()`.

    Args:
        fn: a pure function of pytrees. Tensors that need a gradient are arguments, not captured.

    Returns:
        A function with the same arguments and results as `fn`: any pytree of tensors and numbers. Numbers come back as
        tensors.

    Raises:
        CapturedTensorError: `fn` reads a tensor that needs a gradient and is no argument.
        ImpureBodyError: the recomputation returns another structure, shape or dtype than the first pass.

    Memory: the arguments, until the backward; then what `fn` itself needs. Time: 2F + B.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> f = plg.checkpoint(lambda x: x.sin().sin())
        >>> torch.func.grad(torch.func.grad(f))(torch.tensor(0.7))
        tensor(-0.8664)

    Source: Griewank and Walther, Evaluating Derivatives (2008), chapter 12, for trading time against memory.
    """

    @eager
    @functools.wraps(fn)
    def rematerialised(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors, skeleton = _tree.split((args, kwargs))
        trace = Trace.begin(tensors, [skeleton], 1, _run.current(None))
        body = Once(UserBody(_Applied(fn), (skeleton,), trace))
        with first_pass_checked(trace, tensors):
            sums, _ = Loop(body, 1, 1, len(tensors), trace)(tensors, ())
        assert trace.outputs is not None
        return cast(R, trace.outputs.fill(sums))

    return rematerialised


@dataclass(frozen=True, eq=False)
class _Applied:
    """`fn` as a function of the one pytree (args, kwargs)."""

    fn: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What messages speak of."""
        return self.fn

    def __call__(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = arguments
        return self.fn(*args, **kwargs)
