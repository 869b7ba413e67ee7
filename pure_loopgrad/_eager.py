"""Where torch.compile stops: a loop is run by Python, and what is compiled is its body, or what stands around it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(fn: Callable[P, R]) -> Callable[P, R]:
    """Makes torch.compile break the graph at a call, with everything below it run as it is.

    Torch's own `torch.compiler.disable` does that; but to call it takes a second, as it loads the compiler, so it is
    only called where the compiler is loaded already.
    """

    @functools.wraps(fn)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            return cast(R, _trampoline()(fn, args, kwargs))
        return fn(*args, **kwargs)

    return entry


@functools.cache
def _trampoline() -> Callable[..., Any]:
    call = torch.compiler.disable(lambda fn, args, kwargs: fn(*args, **kwargs))  # type: ignore[no-untyped-call]
    return cast(Callable[..., Any], call)
