"""How a loop is run, apart from what it computes: one frozen record, for a call or for a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

from pure_loopgrad._offload import Offload, check_offload
from pure_loopgrad.errors import LoopValueError

Check = Literal["off", "first", "all"]


@dataclass(frozen=True)
class Report:
    """What a gradient transform did: `rule` names the plan, `passes` how often each iteration ran forward."""

    rule: Literal["sum of scalars", "few summed numbers", "two passes"]
    passes: int
    why: str


@dataclass(frozen=True)
class Run:
    """Options that change how a loop is computed, never what.

    Attributes:
        check: which iterations are watched for tensors that the body reads without being given them:
            `"first"` (the first chunk of each call), `"all"`, or `"off"`. A watched iteration costs some 25 us more
            for a small body and 150 us for a CNN of five layers.
        report: called with a `Report` by `value_and_grad`, once a call.
        offload: where `scan`, `fori_loop` and `while_loop` keep carries during a backward: None beside everything else,
            `"cpu"` in CPU memory while the loop runs on another device, or a folder for files that are deleted as they
            are used. The loop is then run forward once more, since nothing is kept before the backward starts.
            Derivatives of higher order keep their carries in memory.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> rules = []
        >>> f = plg.value_and_grad(lambda w, x: (w * x) ** 2, reduce="sum")
        >>> with plg.run(report=lambda r: rules.append(r.rule)):
        ...     _ = f(torch.tensor(1.0), torch.arange(3.0))
        >>> rules
        ['sum of scalars']
    """

    check: Check = "first"
    report: Callable[[Report], None] | None = None
    offload: Offload = None

    def __post_init__(self) -> None:
        if self.check not in ("off", "first", "all"):
            raise LoopValueError(f"check={self.check!r}: expected 'off', 'first' or 'all'")
        check_offload(self.offload)


_current: ContextVar[Run] = ContextVar("pure_loopgrad_run", default=Run())  # noqa: B039  # it is frozen


def current(given: Run | None) -> Run:
    """The record for one call: the one given, else that of the innermost `run` block."""
    return _current.get() if given is None else given


@contextmanager
def run(**options: Any) -> Iterator[Run]:
    """Sets options for every call inside a block; those not named keep their value.

    Args:
        **options: fields of `Run` by name.

    Yields:
        The record in force inside the block.

    Raises:
        TypeError: an option that `Run` does not have.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> with plg.run(check="off"):
        ...     ys = plg.map(lambda p, x: p * x, torch.tensor(2.0), torch.arange(3.0))
        >>> ys
        tensor([0., 2., 4.])
    """
    record = replace(_current.get(), **options)
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)
