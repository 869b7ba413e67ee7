"""What a loop takes, by counting: bytes that autograd saves, bytes that live at the peak, calls of a body."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._counting import LiveBytes
from pure_loopgrad._grad import value_and_grad
from pure_loopgrad._reduce import Body, Reduce
from pure_loopgrad._run import Run
from pure_loopgrad._tree import PyTree, tree_map
from pure_loopgrad.testing.plain import leaves, n_of


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that lived at once in tensors made while `run` ran; what existed before does not count.

    Sparse tensors have no storage and do not count. Functions that are compiled run as they were written.

    Args:
        run: a function without arguments.

    Returns:
        Bytes, on all devices together.

    Memory: some 200 bytes a living tensor. Time: some 20 us an operation more.

    Example:
        >>> peak_bytes(lambda: torch.zeros(100) + torch.ones(100))
        1200
    """
    with LiveBytes() as live:
        run()
    return int(live.peak)


def saved_bytes(run: Callable[[], object]) -> int:
    """The bytes that ordinary autograd keeps for the backward of what `run` returns, each storage once.

    Sparse tensors have no storage and do not count.

    Args:
        run: a function without arguments that returns something with a graph.

    Returns:
        Bytes.

    Memory: nothing beyond what is counted. Time: that of `run`.

    Example:
        >>> w = torch.ones(10, requires_grad=True)
        >>> saved_bytes(lambda: torch.tanh(w).sum())  # what tanh returned
        40
    """
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.layout is torch.strided:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    del result  # the graph lived until here, so that no storage was counted in another's place
    return sum(storages.values())


class CountedCalls:
    """A function that counts how often it is called.

    Attributes:
        calls: the number of calls so far.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        self.calls += 1
        return self._fn(*args, **kwargs)


def count_calls(fn: Callable[..., Any]) -> CountedCalls:
    """Wraps a body so that its calls are counted: one an iteration and pass, or one a chunk and pass.

    Args:
        fn: a body, or any other function.

    Returns:
        A function like `fn`, with the attribute `calls`.

    Memory and time: nothing.

    Example:
        >>> import pure_loopgrad as plg
        >>> body = count_calls(lambda p, x: torch.sin(p * x))
        >>> _ = plg.value_and_grad(body, lambda p, ys: ys.prod())(torch.tensor(1.0), torch.arange(5.0))
        >>> body.calls  # two passes
        10
    """
    return CountedCalls(fn)


def assert_memory_independent_of_n(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    reduce: Reduce = "stack",
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
    slack: float = 0.05,
) -> None:
    """Fails if the gradient of a loop over `body` takes more memory for n iterations than for a quarter of them.

    A stack of outputs may grow with n, by a quarter more than its size; nothing else may. A body that keeps what it
    computes, in a list or a cache, is found so; most sharply with `reduce="sum"`.

    Args:
        body: see `plg.map`.
        params: see `plg.map`.
        xs: n iterations, at least 4 and of at least 4 chunks.
        reduce: see `plg.value_and_grad`.
        chunk_size: see `plg.map`.
        batched: see `plg.map`.
        randomness: see `plg.map`.
        run: see `plg.map`.
        slack: how much more n iterations may take, relative to the peak of a quarter of them.

    Raises:
        AssertionError: memory grows, with both peaks and the bytes that each iteration adds.
        ValueError: too few iterations to tell.

    Memory and time: those of the gradient of 5n/4 iterations, each twice.

    Example:
        >>> kept = []
        >>> def body(p, x):
        ...     kept.append(torch.sin(p * x))
        ...     return kept[-1]
        >>> assert_memory_independent_of_n(body, torch.tensor(1.0), torch.ones(8, 10), reduce="sum")
        Traceback (most recent call last):
        ...
        AssertionError: 8 iterations take ... bytes, 2 of them ...
    """
    n, few = n_of(xs), n_of(xs) // 4
    if few < 1 or (isinstance(chunk_size, int) and few < chunk_size):
        raise ValueError(f"xs has {n} iterations; to tell, at least 4 chunks are needed")
    options: dict[str, Any] = {
        "chunk_size": chunk_size, "batched": batched, "randomness": randomness, "run": run
    }  # fmt: skip
    gradient = value_and_grad(body, _added_up, reduce=reduce, **options)
    outputs: list[int] = []

    def with_n(m: int) -> int:
        part = tree_map(lambda t: t[:m] if isinstance(t, Tensor) else t, xs)
        noting = value_and_grad(body, lambda p, ys: _added_up(p, ys, outputs), reduce=reduce, **options)
        noting(params, part)  # what loads or is cached at a first use does so here
        return peak_bytes(lambda: gradient(params, part))

    peak_of_few, peak = with_n(few), with_n(n)
    stack = outputs[1] - outputs[0]  # its cotangent is there when it is gone
    allowed = 1.25 * stack + slack * peak_of_few
    added = (peak - peak_of_few - stack) / (n - few)
    if peak - peak_of_few > allowed:
        raise AssertionError(
            f"{n} iterations take {peak:,} bytes, {few} of them {peak_of_few:,}: beyond outputs, "
            f"each iteration adds {added:,.0f} bytes. The body, or something that it calls, keeps tensors: a list, a "
            f"cache, an attribute; or run= asks to keep graphs (save=)"
        )


def _added_up(_: PyTree, ys: PyTree, sizes: list[int] | None = None) -> Tensor:
    """A loss that keeps nothing; notes the size of what it is given."""
    tensors = leaves(ys)
    if sizes is not None:
        # a complex one has its cotangent beside it: the derivative of its real view is no view
        sizes.append(sum(t.numel() * t.element_size() * (2 if t.is_complex() else 1) for t in tensors))
    floats = [
        torch.view_as_real(t) if t.is_complex() else t for t in tensors if t.is_floating_point() or t.is_complex()
    ]
    total = torch.zeros((), dtype=torch.float64)
    return sum((t.sum().to(total) for t in floats), total)


@dataclass(frozen=True)
class Comparison:
    """Two ways to one gradient; printed as a line.

    Attributes:
        error: of our gradient relative to the plain one, in the 2-norm over all leaves.
        ours: peak bytes of ours.
        plain: peak bytes of the plain way.
    """

    error: float
    ours: int
    plain: int

    def __str__(self) -> str:
        """Error and memory, for people."""
        mib = 2**20
        return (
            f"gradient {self.error:.1e} from the full graph's; peak memory {self.ours / mib:.2f} MiB, that of the full "
            f"graph {self.plain / mib:.2f} MiB ({self.plain / self.ours:.1f} times as much)"
        )


def compare(ours: Callable[[], PyTree], plain: Callable[[], PyTree]) -> Comparison:
    """Compares two ways to one gradient, in error and in memory, each run once.

    Args:
        ours: returns a gradient, any pytree.
        plain: returns the same, by the full graph.

    Returns:
        A `Comparison`.

    Memory and time: those of both, and what `peak_bytes` adds.

    Example:
        >>> w = torch.ones(3, requires_grad=True)
        >>> compare(lambda: torch.ones(3), lambda: torch.autograd.grad(w.sum(), w)[0]).error
        0.0
    """
    gradients: list[list[Tensor]] = []
    peaks = [peak_bytes(lambda f=f: gradients.append(leaves(f()))) for f in (ours, plain)]  # type: ignore[misc]
    found, expected = ([g.detach().double().flatten() for g in grads] for grads in gradients)
    error = torch.cat(found).sub(torch.cat(expected)).norm() / torch.cat(expected).norm()
    return Comparison(float(error), *peaks)
