"""Independent iterations: `map` stacks their outputs, `sum` and `mean` add them up and never hold the stack."""

from __future__ import annotations

from pure_loopgrad._body import Randomness
from pure_loopgrad._reduce import Body, Options, Weights, prepare
from pure_loopgrad._run import Run
from pure_loopgrad._tree import PyTree


def map(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    chunk_size: int | None = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
) -> PyTree:
    return _reduced(body, params, xs, Options("stack", None, chunk_size, batched, randomness, run))


def sum(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    chunk_size: int | None = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
) -> PyTree:
    return _reduced(body, params, xs, Options("sum", None, chunk_size, batched, randomness, run))


def mean(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    weights: Weights = None,
    chunk_size: int | None = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    run: Run | None = None,
) -> PyTree:
    return _reduced(body, params, xs, Options("mean", weights, chunk_size, batched, randomness, run))


def _reduced(body: Body, params: PyTree, xs: PyTree, options: Options) -> PyTree:
    prepared = prepare(body, params, xs, options)
    return prepared.finish(prepared.run())
