"""Strategies for hypothesis: pytrees, parameters, bodies, whole loops, chunk sizes, schedules, transform stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pure_loopgrad.testing needs hypothesis: pip install 'pure_loopgrad[test]'", name="hypothesis"
    ) from error

from pure_loopgrad._schedule import Plan
from pure_loopgrad._tree import PyTree
from pure_loopgrad.testing.grammar import LOSSES, OPS, OUTPUTS, WIDTH, DrawnBody, DrawnLoss, Named, Pair
from pure_loopgrad.testing.transforms import TRANSFORMS

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7])
SEEDS = st.integers(0, 2**16)
CONTINUOUS = [torch.float64, torch.float32, torch.complex128]
DISCRETE = [torch.int64, torch.bool]


def generator_of(seed: int) -> torch.Generator:
    """A generator of its own for each draw, so that examples repeat."""
    return torch.Generator().manual_seed(seed)


@st.composite
def tensors(draw: st.DrawFn, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Normal tensors of up to two axes, some of them empty; of small integers or bools for such dtypes."""
    shape, dtype = draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.sampled_from(dtypes))
    normal = torch.randn(shape, generator=generator_of(draw(SEEDS)), dtype=torch.float64)
    return (3 * normal).to(dtype) if dtype in DISCRETE else normal.to(dtype)


def pytrees(leaves: st.SearchStrategy[Any] | None = None, max_leaves: int = 5) -> st.SearchStrategy[PyTree]:
    """Draws pytrees: dicts, lists, tuples, named tuples and dataclasses, nested, some of them empty.

    Args:
        leaves: draws a leaf; by default tensors of float, complex, integer and bool dtypes, numbers, strings and None.
        max_leaves: about how many leaves a tree has at most.

    Returns:
        A strategy for pytrees.

    Memory and time: those of a few small tensors.

    Example:
        >>> from hypothesis import given
        >>> import pure_loopgrad as plg
        >>> @given(pytrees())
        ... def test(params):  # whatever they are, a loop takes them
        ...     assert plg.map(lambda p, x: x, params, torch.arange(2.0)).tolist() == [0.0, 1.0]
        >>> test()
    """
    if leaves is None:
        leaves = st.one_of(tensors([*CONTINUOUS, *DISCRETE]), st.sampled_from([3, 0.5, "relu", None, True]))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from(["w", "b", "a b", "0"]), inner, max_size=3),
            st.builds(Pair, inner, inner),
            st.builds(Named, inner, st.just("tag")),
        ),
        max_leaves=max_leaves,
    )


@st.composite
def params(draw: st.DrawFn, body: DrawnBody | None = None) -> PyTree:
    """Draws parameters: those of a drawn body, among others that no gradient can reach or that nobody uses.

    Args:
        draw: given by hypothesis.
        body: a body of `bodies()`; None for any pytree with at least one float64 leaf.

    Returns:
        A strategy for pytrees; for a body, dicts with its `"layers"`.

    Memory and time: those of a few small tensors.

    Example:
        >>> from hypothesis import given, strategies as st
        >>> @given(bodies().flatmap(params))
        ... def test(p):
        ...     assert "layers" in p
        >>> test()
    """
    if body is None:
        return {"weight": draw(tensors([torch.float64])), "rest": draw(pytrees())}
    mine = body.parameters(generator_of(draw(SEEDS)))
    mine["layers"] = draw(st.sampled_from([list, tuple]))(mine["layers"])
    return {**mine, **draw(_unreached())}


def _unreached() -> st.SearchStrategy[dict[str, Any]]:
    float64 = torch.float64
    return st.fixed_dictionaries(
        {},
        optional={
            "count": st.just(torch.tensor(3)),
            "flag": st.just(torch.tensor([True, False])),
            "act": st.just("relu"),
            "number": st.just(3.0),
            "nothing": st.none(),
            "unused": pytrees(st.one_of(tensors([float64, torch.int64]), st.none()), 3),
            "no entries": st.just(torch.zeros(0, dtype=float64)),
        },
    )


@st.composite
def bodies(draw: st.DrawFn, outputs: Sequence[str] = tuple(OUTPUTS)) -> DrawnBody:
    """Draws bodies from a grammar of smooth operations; what they return is any pytree, also of integers or nothing.

    Args:
        draw: given by hypothesis.
        outputs: what they may return: names of `pure_loopgrad.testing.grammar.OUTPUTS`.

    Returns:
        A strategy for bodies `body(params, x)`, with `params(body)` as their parameters and the xs of `loops()`.

    Memory and time: nothing.

    Example:
        >>> from hypothesis import given
        >>> @given(bodies(outputs=["scalar"]))
        ... def test(body):
        ...     assert body.output == "scalar"
        >>> test()
    """
    ops = draw(st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=4))
    return DrawnBody(tuple(ops), draw(st.sampled_from(list(outputs))))


@dataclass(frozen=True)
class DrawnLoop:
    """A loop to run: `body(params, x)` for each of `xs`, `chunk_size` at a time.

    Attributes:
        body: of the grammar.
        params: what fits the body.
        xs: n iterations.
        n: the number of iterations.
        chunk_size: 1, a few, all (None), or more than there are.
    """

    body: DrawnBody
    params: Any
    xs: Any
    n: int
    chunk_size: int | None

    def __repr__(self) -> str:
        """The program, without the numbers, which hypothesis's blob reproduces."""
        return f"DrawnLoop({self.body}, n={self.n}, chunk_size={self.chunk_size}, xs={type(self.xs).__name__})"


@st.composite
def loops(draw: st.DrawFn, outputs: Sequence[str] = tuple(OUTPUTS), sizes: st.SearchStrategy[int] = SIZES) -> DrawnLoop:
    """Draws loops: body, params, xs, n and chunk size, which fit each other.

    Args:
        draw: given by hypothesis.
        outputs: see `bodies`.
        sizes: draws the number of iterations; by default 0, 1 and small primes.

    Returns:
        A strategy for `DrawnLoop`; all floats that its body reads are float64.

    Memory and time: those of a few small tensors.

    Example:
        >>> from hypothesis import given
        >>> import pure_loopgrad as plg
        >>> from pure_loopgrad.testing import assert_close, plain_map
        >>> @given(loops())
        ... def test(loop):
        ...     ys = plg.map(loop.body, loop.params, loop.xs, chunk_size=loop.chunk_size)
        ...     assert_close(ys, plain_map(loop.body, loop.params, loop.xs))
        >>> test()
    """
    body, n = draw(bodies(outputs)), draw(sizes)
    v = torch.randn(n, WIDTH, generator=generator_of(draw(SEEDS)), dtype=torch.float64)
    i = torch.arange(n)
    xs = draw(st.sampled_from([v, {"v": v, "i": i, "name": "static"}, Pair(v, i), Named(v)]))
    return DrawnLoop(body, draw(params(body)), xs, n, draw(chunk_sizes()))


def chunk_sizes() -> st.SearchStrategy[int | None]:
    """Draws chunk sizes: 1 most often, sizes that leave a remainder, more than any drawn loop has, and None for all.

    Returns:
        A strategy for `chunk_size=`.

    Memory and time: nothing.

    Example:
        >>> from hypothesis import given
        >>> @given(chunk_sizes())
        ... def test(c):
        ...     assert c is None or c >= 1
        >>> test()
    """
    return st.sampled_from([1, 1, 2, 3, 4, 11, None])


def schedules(max_carries: int = 8) -> st.SearchStrategy[Plan]:
    """Draws which carries a scan keeps.

    Args:
        max_carries: the largest number of them.

    Returns:
        A strategy for `checkpoints=`: "all", "sqrt", or a number of carries.

    Memory and time: nothing.

    Example:
        >>> from hypothesis import given
        >>> @given(schedules(2))
        ... def test(checkpoints):
        ...     assert checkpoints in ("all", "sqrt", 1, 2)
        >>> test()
    """
    return st.one_of(st.sampled_from(["all", "sqrt"]), st.integers(1, max_carries))


def transform_stacks(depth: int = 2) -> st.SearchStrategy[tuple[str, ...]]:
    """Draws stacks of torch.func transforms: grad, vjp, jvp, vmap, jacrev, jacfwd, hessian.

    Args:
        depth: how many are nested at most.

    Returns:
        A strategy for tuples of names, the innermost first, for `stack=` of the assertions and for `transformed`.

    Memory and time: nothing.

    Example:
        >>> from hypothesis import given
        >>> @given(transform_stacks())
        ... def test(stack):
        ...     assert len(stack) <= 2
        >>> test()
    """
    return st.lists(st.sampled_from(sorted(TRANSFORMS)), max_size=depth).map(tuple)


def losses() -> st.SearchStrategy[DrawnLoss]:
    """Draws losses that couple all outputs, use one of them, or use params too; for the loops of `loops()`.

    Returns:
        A strategy for `loss(params, ys) -> scalar`.

    Memory and time: nothing.

    Example:
        >>> from hypothesis import given
        >>> @given(losses())
        ... def test(loss):
        ...     assert loss({"spare": torch.ones(2)}, [torch.ones(3, dtype=torch.float64)]).shape == ()
        >>> test()
    """
    return st.builds(DrawnLoss, st.sampled_from(sorted(LOSSES)), st.booleans())
