"""The assertion that a body does the same thing each time, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._capture import version_of
from pure_loopgrad._reduce import Body
from pure_loopgrad._run import Run
from pure_loopgrad._tree import PyTree, tree_map
from pure_loopgrad._vjp import vjp
from pure_loopgrad.errors import CapturedTensorError, ImpureBodyError
from pure_loopgrad.testing.comparing import differences
from pure_loopgrad.testing.plain import leaves, n_of, take
from pure_loopgrad.testing.transforms import is_continuous

SAME = 1e-7  # two runs of one kernel agree to the last bit, apart from a few that add up in any order


def assert_pure(body: Body, params: PyTree, xs: PyTree) -> None:
    """Fails if `body` is not a pure function of its arguments and torch's random numbers.

    It runs over all iterations twice, from one seed, and must return the same. It must not change its arguments,
    tensors that it captures, or global settings of torch, and not draw from the generators of Python or numpy. No
    tensor that needs a gradient may be captured. Then the library runs it with all of its checks.

    Args:
        body: see `plg.map`; for a loop with a carry, `lambda p, cx: body(p, *cx)` with xs of pairs.
        params: see `plg.map`.
        xs: see `plg.map`. A side effect shows only after as many iterations as it takes.

    Raises:
        AssertionError: what the body did, in which iteration.

    Memory: inputs and all outputs, twice. Time: n (4F + B).

    Example:
        >>> seen = []
        >>> def body(p, x):
        ...     seen.append(x)
        ...     return p * x * len(seen)
        >>> assert_pure(body, torch.tensor(1.0), torch.ones(3))
        Traceback (most recent call last):
        ...
        AssertionError: the body returns other values when it runs again: iteration 0, y: differs by 3.00e+00, ...
    """
    params, xs = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, (params, xs))
    before = [t.clone() for t in leaves((params, xs))]
    first, again = _outputs(body, params, xs), _outputs(body, params, xs)
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        if found := differences(b, a, SAME, "y"):
            raise AssertionError(
                f"the body returns other values when it runs again: iteration {i}, {'; '.join(found)}. It reads "
                f"something that changes: a counter, a list, a generator that is not torch's default one"
            )
    _assert_unchanged(leaves((params, xs)), before)
    _assert_accepted(body, params, xs)


def _outputs(body: Body, params: PyTree, xs: PyTree) -> list[PyTree]:
    """All outputs, from one seed, each iteration watched."""
    settings, outputs = _settings(), []
    given = leaves((params, xs))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for i in range(n_of(xs)):
            versions = [version_of(t) for t in given]
            y = body(params, take(xs, i))
            outputs.append(tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, y))
            changed = [_tree.describe(t) for t, v in zip(given, versions, strict=True) if version_of(t) != v]
            if changed:
                raise AssertionError(f"the body changes an input in place in iteration {i}: {', '.join(changed)}")
            if _settings() != settings:
                raise AssertionError(f"the body changes global settings of torch in iteration {i}")
    return outputs


def _settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(),
        torch.is_autocast_enabled("cpu"), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
    )  # fmt: skip


def _assert_unchanged(now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Also where no version counter tells: through numpy, or `.data`."""
    pairs = zip(now, before, strict=True)
    changed = [_tree.describe(a) for a, b in pairs if not torch.allclose(a, b, 0, 0, equal_nan=True)]
    if changed:
        raise AssertionError(f"the body changes an input in place: {', '.join(changed)}")


def _assert_accepted(body: Body, params: PyTree, xs: PyTree) -> None:
    """What only the library sees: captured tensors, foreign generators, iterations that differ in shape."""
    try:
        ys, pullback = vjp(body, params, xs, run=Run(check="all"))
        pullback(tree_map(lambda y: torch.ones_like(y) if is_continuous(y) else None, ys))
    except (CapturedTensorError, ImpureBodyError) as error:
        raise AssertionError(str(error)) from error
