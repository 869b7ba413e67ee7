"""A loop with a carry, in the memory of the carries that a schedule keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pure_loopgrad import _effects, _run, _tree
from pure_loopgrad._ambient import as_trained
from pure_loopgrad._eager import eager
from pure_loopgrad._loop import Loop
from pure_loopgrad._schedule import Plan, check_plan
from pure_loopgrad._segment import Segment
from pure_loopgrad._shapes import run_on_fakes
from pure_loopgrad._trace import Trace, first_pass_checked
from pure_loopgrad._tree import PyTree
from pure_loopgrad._user import UserBody
from pure_loopgrad.errors import LoopTypeError, LoopValueError

CarryBody: TypeAlias = Callable[[Any, Any, Any], "tuple[Any, Any]"]


@eager
def scan(
    body: CarryBody,
    params: PyTree,
    init: PyTree,
    xs: PyTree = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    checkpoints: Plan = "sqrt",
    truncate: int | None = None,
    window: int | None = None,
    run: _run.Run | None = None,
) -> tuple[PyTree, PyTree]:
    """Carries a value through `body`, as `jax.lax.scan` with params first; keeps few carries for the backward.

    Denotes::

        carry, ys = init, []
        for x in xs:
            carry, y = body(params, carry, x)
            ys.append(y)
        return carry, torch.stack(ys)

    Args:
        body: a pure function `body(params, carry, x) -> (carry, y)`; y may be None, and any tensor may be returned
            unchanged or twice. Tensors that need a gradient stand in params, init or xs.
        params: any pytree: what all steps share.
        init: any pytree of tensors and numbers; the carry keeps its structure, shapes and dtypes. Leaves of integers
            and bools are carried without a gradient.
        xs: a pytree with a leading axis of length n on its tensors, or None together with `length`.
        length: the number of steps; where xs has tensors it must agree.
        reverse: run from the last x to the first; ys stand where their xs do.
        checkpoints: `"sqrt"` keeps 2 sqrt(n) carries; an int the best choice of that many, the first included;
            `"all"` every one.
        truncate: take the gradient through the last `truncate` steps only: the steps before are constants, and so are
            their ys.
        window: cut the gradient of the carry between windows of that many steps, counted from the end, so that the
            first one may be shorter: each step's carry in is a constant where a window starts. Unlike with `truncate`,
            every step passes gradient to params and xs.
        run: options of the computation; see `Run`.

    Returns:
        The last carry, and ys with a leading axis of length n. With n = 0, init and empty ys.

    Raises:
        LoopTypeError: the carry changes its structure, a shape or a dtype, or body returns no pair.
        LoopValueError: no length, or one that disagrees; `checkpoints`, `truncate` or `window` that cannot be.
        OffloadError: a carry cannot be written to the folder of `Run.offload`.
        CapturedTensorError: see `plg.map`.
        ImpureBodyError: see `plg.map`.

    Memory: inputs, ys, the kept carries, two copies of params, and one step. Time for a gradient: n (2F + B) with
    `"all"`, n (3F + B) with `"sqrt"`, and (n + t) F + n B for k carries, where t = min_m m + t(n - m, k - 1) + t(m, k)
    is the least possible. Forward mode keeps nothing. `Run.offload` moves kept carries elsewhere for n F more.

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> step = lambda a, c, x: (a * c + x, c)
        >>> plg.scan(step, torch.tensor(0.5), torch.tensor(1.0), torch.tensor([1.0, 2.0]))
        (tensor(2.7500), tensor([1.0000, 1.5000]))

    Source: Griewank and Walther, Algorithm 799: revolve, ACM TOMS 26 (2000), for an int.
    """
    plan = check_plan(checkpoints)
    _check_steps("truncate", truncate)
    _check_steps("window", window)
    if truncate is not None:
        options = {"reverse": reverse, "checkpoints": plan, "window": window, "run": run}
        return _truncated(body, params, init, xs, length, truncate, options)
    consts, params_skeleton = _tree.split(params)
    x_tensors, x_skeleton = _tree.split(xs)
    carry, carry_spec = _tree.numbers_to_tensors(init, [*consts, *x_tensors], "init")
    n = _steps(x_tensors, x_skeleton, length)
    everything = [*consts, *carry, *x_tensors]
    skeletons = (params_skeleton, _tree.Skeleton.of_tensors(carry_spec), x_skeleton)
    record = _run.current(run)
    if window is not None:
        record = replace(record, compile=False)  # the number of the step decides what it does
    trace = Trace.begin(everything, skeletons, n, record)
    step = UserBody(_Step(body, carry, carry_spec, trace, window), skeletons, trace)
    if n == 0:
        run_on_fakes(step, [*consts, *carry], x_tensors)
        ys = [meta.with_axis(0, 0).zeros() for meta in trace.shapes[len(carry) :]]
        outs = [*carry, *ys]
    else:
        trace.settled = True  # what runs outside of the primitive runs here and now
        segment = Segment(step, len(consts), len(carry), 0, n, plan, reverse, record.offload)
        # with offload, as one loop of the primitive, which keeps nothing before the backward starts
        whole = segment if record.offload is None else Loop(segment, 1, 1, len(everything), trace)
        running = _effects.running(trace, recomputation=False)
        with first_pass_checked(trace, everything), running, as_trained(trace.trains):
            outs = [*whole(everything, ())[0]]
    assert trace.outputs is not None
    last, stacked = trace.outputs.fill(outs)
    return last, stacked


@dataclass(frozen=True, eq=False)
class _Step:
    """The body, with its first output checked against init; the later ones are compared with the first anyway."""

    body: CarryBody
    init: list[Tensor]
    spec: _tree.TreeSpec
    trace: Trace
    window: int | None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What messages speak of."""
        return self.body

    def __call__(self, params: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        if self.window is not None and (self.trace.n - self.trace.iterations.start) % self.window == 0:
            carry = _constant(carry)
        out = self.body(params, carry, x)
        if self.trace.outputs is None:
            self._check(out)
        new, y = out
        return new, y

    def _check(self, out: Any) -> None:
        if not isinstance(out, tuple) or len(out) != 2:
            raise LoopTypeError(f"the body of a scan returns (carry, y), not a {type(out).__name__}; y may be None")
        leaves, spec = _tree.numbers_to_tensors(out[0], self.init, "carry")
        if spec != self.spec:
            raise LoopTypeError(f"the carry changes its structure: init is {self.spec}, after a step it is {spec}")
        paths = _tree.Skeleton.of_tensors(spec).tensor_paths("carry")
        for path, before, after in zip(paths, self.init, leaves, strict=True):
            if (before.shape, before.dtype) != (after.shape, after.dtype):
                raise LoopTypeError(
                    f"{path} has {_tree.describe(before)} in init, but {_tree.describe(after)} after a step; a carry "
                    f"keeps its shapes and dtypes: convert init, or what the body returns"
                )


def _truncated(
    body: CarryBody, params: PyTree, init: PyTree, xs: PyTree, length: int | None, k: int, options: dict[str, Any]
) -> tuple[PyTree, PyTree]:
    """A scan of constants, and behind it one of the last k steps."""
    x_tensors, x_skeleton = _tree.split(xs)
    n = _steps(x_tensors, x_skeleton, length)
    head = max(0, n - k)
    if head == 0:
        return scan(body, params, init, xs, length=n, **options)
    sizes = [n - head, head] if options["reverse"] else [head, n - head]
    pieces = [x_skeleton.fill(piece) for piece in zip(*(torch.split(x, sizes) for x in x_tensors), strict=True)]
    first, last = (pieces or [xs, xs])[:: -1 if options["reverse"] else 1]
    carry, ys = scan(body, _constant(params), _constant(init), _constant(first), length=head, **options)
    carry, more = scan(body, params, carry, last, length=n - head, **options)
    parts = (more, ys) if options["reverse"] else (ys, more)
    a, b = (_tree.split(part) for part in parts)
    return carry, a[1].fill([torch.cat(pair) for pair in zip(a[0], b[0], strict=True)])


def _constant(tree: PyTree) -> PyTree:
    """The same values, without gradient and without tangent."""
    tensors, skeleton = _tree.split(tree)
    return skeleton.fill([t.detach() for t in tensors])


def _check_steps(name: str, k: int | None) -> None:
    if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise LoopValueError(f"{name}={k!r}: expected a number of steps, at least 1")


def _steps(xs: list[Tensor], skeleton: _tree.Skeleton, length: int | None) -> int:
    if length is not None and (isinstance(length, bool) or not isinstance(length, int)):
        raise LoopTypeError(f"length={length!r}: expected an int")
    if length is not None and length < 0:
        raise LoopValueError(f"length={length}: expected at least 0")
    if not xs:
        if length is None:
            raise LoopValueError("xs has no tensor, so the number of steps is not known: pass length=")
        return length
    n = _tree.leading_axis(xs, skeleton)
    if length is not None and length != n:
        raise LoopValueError(f"length={length}, but the leading axis of xs has {n} entries")
    return n
