"""How a loop is run, apart from what it computes: one frozen record, for a call or for a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pure_loopgrad._offload import Offload, check_offload
from pure_loopgrad._progress import Progress, reporter
from pure_loopgrad._rng import source_of
from pure_loopgrad.errors import LoopTypeError, LoopValueError

Save: TypeAlias = "int | Literal['nothing', 'everything']"
Check = Literal["off", "first", "all"]
Compile: TypeAlias = "bool | Callable[[Callable[..., Any]], Callable[..., Any]]"


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
        check: which iterations are checked, `"first"` (the first chunk of each call), `"all"`, or `"off"`. Checked
            is that the body reads no tensor that needs a gradient and was not given to it, changes nothing in place,
            draws from no generator that is not replayed, and returns the same values in each recomputation. Structure,
            shapes and dtypes are compared always.
        report: called with a `Report` by `value_and_grad`, once a call.
        offload: where `scan`, `fori_loop` and `while_loop` keep carries during a backward: None beside everything else,
            `"cpu"` in CPU memory while the loop runs on another device, or a folder for files that are deleted as they
            are used. The loop is then run forward once more, since nothing is kept before the backward starts.
            Derivatives of higher order keep their carries in memory.
        generators: random generators beyond the default ones of torch to be replayed in recomputations: a
            torch.Generator (those in params and xs are replayed anyway), a numpy Generator or RandomState, a
            random.Random, or the modules `random` and `numpy.random` for their global ones.
        nonfinite: see `debug_nonfinite`.
        memory_budget: bytes that a loop with `chunk_size="auto"` may take beyond its inputs; by default half of the
            memory that is free.
        save: what a loop over independent iterations keeps of its first pass for the backward: `"nothing"`,
            `"everything"`, or as many of its last chunks as fit into a number of bytes. These are not run again, so
            that time goes from n (2F + B) to n (F + B) as memory is given. Each is used once, by `.backward()`,
            `value_and_grad` or `vjp`; under torch.func transforms nothing is kept.
        compile: True to run chunks, steps, their derivatives and the loss through `torch.compile`, or a function that
            compiles another one (`functools.partial(torch.compile, mode="max-autotune")`; the same object each time,
            as what it compiled is found by it). Each is compiled at its first use, which takes seconds, and is found
            again by the code of the body, also by closures that are made anew. The chunks that `check` names run as
            they are, as do the first chunk of a call, a shorter last one, bodies that draw random numbers or update
            buffers, a scan with a `window`, and, with one warning, what cannot be compiled.
        progress: True for bars (with the extra `progress`), or a function that is called as `(done, n, what)` after
            each chunk or step, `what` being `"forward pass"`, `"vjp"` or `"jvp"`.

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
    generators: tuple[Any, ...] = ()
    nonfinite: Literal["ignore", "raise"] = "ignore"
    memory_budget: int | None = None
    save: Save = "nothing"
    compile: Compile = False
    progress: bool | Progress = False

    def __post_init__(self) -> None:
        if self.check not in ("off", "first", "all"):
            raise LoopValueError(f"check={self.check!r}: expected 'off', 'first' or 'all'")
        if self.nonfinite not in ("ignore", "raise"):
            raise LoopValueError(f"nonfinite={self.nonfinite!r}: expected 'ignore' or 'raise'")
        if self.save not in ("nothing", "everything") and not _is_count(self.save):
            raise LoopValueError(f"save={self.save!r}: expected 'nothing', 'everything' or a number of bytes")
        for name, value in (("compile", self.compile), ("progress", self.progress)):
            if not isinstance(value, bool) and not callable(value):
                raise LoopTypeError(f"{name}={value!r}: expected True, False or a function")
        if self.report is not None and not callable(self.report):
            raise LoopTypeError(f"report={self.report!r}: expected None or a function of a Report")
        check_offload(self.offload)
        if not isinstance(self.generators, (tuple, list)):
            raise LoopTypeError(f"generators={self.generators!r}: expected a tuple of generators")
        for generator in self.generators:
            source_of(generator)
        if self.memory_budget is not None and not _is_count(self.memory_budget):
            raise LoopValueError(f"memory_budget={self.memory_budget!r}: expected a number of bytes")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_current: ContextVar[Run] = ContextVar("pure_loopgrad_run", default=Run())  # noqa: B039  # it is frozen


def reports_of(run: Run) -> Progress | None:
    """Where a call reports its progress."""
    return reporter() if run.progress is True else run.progress or None


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


@contextmanager
def debug_nonfinite() -> Iterator[None]:
    """Raises at the first value that is not finite, in every loop that is called inside a block.

    The outputs of each iteration are looked at, its derivatives, and the sums over iterations; also in a backward that
    follows after the block.

    Yields:
        Nothing.

    Raises:
        NonFiniteError: its `record` names the iteration (inside a chunk, too), the phase, the leaf, how many entries
            are NaN and infinite, and holds the inputs that reproduce it; `record.save(path)` writes them.

    Time: one look at each output and derivative; nothing outside of the block.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> with plg.debug_nonfinite():
        ...     plg.map(lambda p, x: torch.log(x), None, torch.tensor([1.0, 0.0]))
        Traceback (most recent call last):
        ...
        pure_loopgrad.errors.NonFiniteError: output has 0 NaN and 1 inf in iteration 1 (forward); ...
    """
    with run(nonfinite="raise"):
        yield
