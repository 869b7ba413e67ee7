"""Assertions that a loop over somebody's own body is the plain Python loop, in values and in derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._grad import value_and_grad
from pure_loopgrad._map import map as loop_map
from pure_loopgrad._map import mean as loop_mean
from pure_loopgrad._map import sum as loop_sum
from pure_loopgrad._reduce import Body, Reduce
from pure_loopgrad._run import Run
from pure_loopgrad._scan import CarryBody, scan
from pure_loopgrad._schedule import Plan
from pure_loopgrad._tree import PyTree, tree_map
from pure_loopgrad.errors import LoopTypeError
from pure_loopgrad.testing.comparing import tolerance_of
from pure_loopgrad.testing.gradients import Loss, Reference, assert_no_difference, cast, coupled, seeded
from pure_loopgrad.testing.plain import leaves, n_of, plain_map, plain_mean, plain_scan, plain_sum, take
from pure_loopgrad.testing.transforms import is_continuous

REDUCTIONS = {"stack": (loop_map, plain_map), "sum": (loop_sum, plain_sum), "mean": (loop_mean, plain_mean)}


def assert_matches_full_graph(
    body: Body,
    params: PyTree,
    xs: PyTree,
    loss: Loss | None = None,
    *,
    reduce: Reduce = "stack",
    chunk_sizes: Sequence[ChunkSize] = (1, 2, 3, None),
    stack: tuple[str, ...] = (),
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float | None = None,
    atol: float = 1e-13,
) -> None:
    """Fails if a loop over `body` is not the plain Python loop: its outputs, the loss, the gradients of params and xs.

    The plain loop runs under ordinary autograd with its full graph. Ours runs as `plg.map`, `plg.sum` or `plg.mean`
    with `.backward()`, and as `plg.value_and_grad`, for each chunk size.

    Args:
        body: see `plg.map`.
        params: see `plg.map`.
        xs: see `plg.map`; few iterations are enough, 5 or 7 leave a remainder in all default chunk sizes.
        loss: `loss(params, reduced) -> scalar`; by default one that depends on every output, coupled with every other.
        reduce: `"stack"`, `"sum"` or `"mean"`.
        chunk_sizes: each is compared. Under vmap random numbers are drawn otherwise: give `(1,)` to bodies that draw.
        stack: transforms around the loss, by name (see `transform_stacks`), whose gradient is then compared.
        batched: see `plg.map`; the plain loop gives such a body one iteration at a time.
        randomness: see `plg.map`.
        run: see `plg.map`.
        dtype: what real leaves of params and xs are cast to; None leaves them as they are.
        rtol: relative to the largest entry of a leaf; by default 1e-9 in float64, and a quarter of the square root of
            a unit in the last place in less.
        atol: what a difference may be where everything cancels; lower it for gradients that are tiny as a whole.

    Raises:
        AssertionError: which leaf of what differs, and by how much; also where the body reads a tensor that requires
            grad and was not given to it.
        LoopTypeError: the body holds tensors of its own that do not go with `dtype`.
        LoopGradError: what the library itself refuses.

    Memory: that of the full graph. Time: that of the plain gradient, and of two of ours for each chunk size.

    Example:
        >>> assert_matches_full_graph(lambda w, x: torch.tanh(w * x), torch.ones(2), torch.randn(5, 2))
    """
    loop, plain_loop = REDUCTIONS[reduce]
    loss = coupled if loss is None else loss
    one = _one_at_a_time(body) if batched else body
    given, (params, xs) = (params, xs), cast((params, xs), dtype)
    options: dict[str, Any] = {"batched": batched, "randomness": randomness, "run": run}

    def plain(inputs: PyTree) -> PyTree:
        return plain_loop(one, *inputs)

    def ours(inputs: PyTree, chunk_size: ChunkSize) -> PyTree:
        return loop(body, *inputs, chunk_size=chunk_size, **options)

    def of_inputs(inputs: PyTree, ys: PyTree) -> Tensor:
        return loss(inputs[0], ys)

    _refuse_half_cast(lambda inputs: one(inputs[0], take(inputs[1], 0)), given, (params, xs))
    _refuse_hidden_graph(one, params, xs)
    rtol = tolerance_of((params, xs)) if rtol is None else rtol
    reference = Reference(plain, (params, xs), of_inputs, stack)
    first = reference if not stack else Reference(plain, (params, xs), of_inputs)
    for chunk_size in chunk_sizes:
        what = f"reduce={reduce!r}, chunk_size={chunk_size}"
        reference.hold(partial(ours, chunk_size=chunk_size), rtol, atol, what)
        f = value_and_grad(body, loss, reduce=reduce, argnums=(0, 1), chunk_size=chunk_size, **options)
        _hold_value_and_grad(first, f, rtol, atol, f"{what}: value_and_grad")


def assert_scan_matches_full_graph(
    body: CarryBody,
    params: PyTree,
    init: PyTree,
    xs: PyTree,
    loss: Loss | None = None,
    *,
    checkpoints: Sequence[Plan] = ("all", "sqrt", 1, 3),
    stack: tuple[str, ...] = (),
    run: Run | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float | None = None,
    atol: float = 1e-13,
) -> None:
    """Fails if `plg.scan` over `body` is not the plain Python loop with a carry, in values and gradients.

    Args:
        body: see `plg.scan`.
        params: see `plg.scan`.
        init: see `plg.scan`.
        xs: see `plg.scan`, with at least one step.
        loss: `loss(params, (carry, ys)) -> scalar`; by default one that depends on every output.
        checkpoints: each is compared.
        stack: see `assert_matches_full_graph`.
        run: see `plg.scan`.
        dtype: see `assert_matches_full_graph`.
        rtol: see `assert_matches_full_graph`.
        atol: see `assert_matches_full_graph`.

    Raises:
        AssertionError: which leaf of what differs, and by how much.
        LoopGradError: what the library itself refuses.

    Memory: that of the full graph. Time: that of the plain gradient, and of one of ours for each schedule.

    Example:
        >>> body = lambda w, c, x: (torch.tanh(w * c + x), c)
        >>> assert_scan_matches_full_graph(body, torch.ones(2), torch.zeros(2), torch.randn(5, 2))
    """
    loss = coupled if loss is None else loss
    given = params, init, xs
    inputs = cast(given, dtype)
    _refuse_half_cast(lambda i: body(i[0], i[1], take(i[2], 0)), given, inputs)
    rtol = tolerance_of(inputs) if rtol is None else rtol
    reference = Reference(lambda i: plain_scan(body, *i), inputs, lambda i, ys: loss(i[0], ys), stack)

    def ours(inputs: PyTree, plan: Plan) -> PyTree:
        return scan(body, *inputs, checkpoints=plan, run=run)

    for plan in checkpoints:
        reference.hold(partial(ours, plan=plan), rtol, atol, f"checkpoints={plan!r}")


def _one_at_a_time(body: Body) -> Body:
    """A body that takes a chunk, as one that takes a single iteration."""

    def one(params: PyTree, x: PyTree) -> PyTree:
        ys = body(params, tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, x))
        return tree_map(lambda y: y[0] if isinstance(y, Tensor) else y, ys)

    return one


def _refuse_half_cast(once: Callable[[PyTree], object], given: PyTree, inputs: PyTree) -> None:
    """Raises LoopTypeError for a body that runs in the dtypes that it was given, and not in those it was cast to."""
    if not n_of(given[-1]):
        return
    try:
        seeded(once, inputs)
    except RuntimeError as error:
        try:
            seeded(once, cast(given, None))
        except Exception:
            raise error from None  # one of its own
        raise LoopTypeError(
            f"the body runs on params and xs as they are, and not cast to dtype=: it holds tensors of another dtype, "
            f"such as the buffers of a module. Use dtype=None, or module.double(). {type(error).__name__}: {error}"
        ) from error


def _refuse_hidden_graph(body: Body, params: PyTree, xs: PyTree) -> None:
    """No input requires grad here, so an output that does comes from a tensor that the body captured."""
    if not n_of(xs):
        return
    ys = seeded(body, params, take(xs, 0))
    hidden = [_tree.describe(y) for y in leaves(ys) if y.requires_grad]
    if hidden:
        raise AssertionError(
            f"the output ({', '.join(hidden)}) requires grad although params and xs do not: the body reads a tensor "
            f"that needs a gradient and was not given to it, so it would get none. Pass it in params"
        )


def _hold_value_and_grad(reference: Reference, f: Callable[..., Any], rtol: float, atol: float, what: str) -> None:
    value, grads = seeded(f, *reference.inputs)
    plain_value, gradient = reference.gradient
    assert_no_difference(value.to(plain_value), plain_value, rtol, f"{what}: value", atol)
    floats = tree_map(lambda t: t if is_continuous(t) else None, gradient)
    # a leaf that no float output depends on gets None from the library, and zeros from the oracle
    grads = tree_map(lambda plain, g: torch.zeros_like(plain) if g is None else g, floats, grads)
    assert_no_difference(grads, floats, rtol, f"{what}: gradient of (params, xs)", atol)
