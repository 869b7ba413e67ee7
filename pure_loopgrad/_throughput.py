"""`chunk_size="auto"`: the chunk with which a loop was fastest, of those that fit the memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pure_loopgrad import _tree
from pure_loopgrad._body import check_chunk_size
from pure_loopgrad._identity import identity_of
from pure_loopgrad._levels import active_levels, without_graph
from pure_loopgrad._measure import QUIET, Subject, chunk_size_for, default_budget, gradient_once
from pure_loopgrad._reduce import Body, Options
from pure_loopgrad._rng import Sources
from pure_loopgrad._run import current
from pure_loopgrad._settings import settings_of
from pure_loopgrad._shapes import is_fake
from pure_loopgrad._trace import unnoticed
from pure_loopgrad._tree import PyTree

ENOUGH = 0.05  # a larger chunk has to be faster by this fraction
PATIENCE = 2  # how many larger chunks in a row may be no faster
LONG = 0.1  # seconds after which one run says enough
FEW = 4  # iterations that a run has at least
# sizes that a body got before, by its code and what it was given: they take some time to find
_found: WeakKeyDictionary[Any, dict[tuple[Any, ...], int]] = WeakKeyDictionary()


def resolved(body: Body, params: PyTree, xs: PyTree, options: Options) -> Options:
    """The options with `chunk_size="auto"` replaced by a number; it is found once for the shapes of params and xs."""
    if options.chunk_size != "auto":
        check_chunk_size(options.chunk_size, 1)
        return options
    tensors, skeleton = _tree.split(xs)
    n, device = _tree.leading_axis(tensors, skeleton), tensors[0].device
    everything = [*_tree.split(params)[0], *tensors]
    given = current(options.run).memory_budget
    measurable = active_levels() == 0 and not any(map(is_fake, everything))
    way = (options.reduce, options.batched, options.randomness, given, measurable, settings_of(body))
    key = (*way, *((t.shape, t.dtype, t.device) for t in everything))
    known = _found.setdefault(identity_of(body), {})
    if key not in known:
        budget = default_budget(device) if given is None else given
        largest = chunk_size_for(Subject(body, params, xs, options), n, budget, device)
        known[key] = fastest(_runner(body, params, xs, options), largest) if measurable else largest
    return replace(options, chunk_size=known[key])


def fastest(seconds: Callable[[int], float], largest: int) -> int:
    """The chunk size with the least time an iteration, of 1, 2, 4, ... and `largest`; smaller ones where it is a draw.

    Args:
        seconds: the time an iteration takes with a chunk size.
        largest: the largest one that may be taken.
    """
    if largest == 1:
        return 1
    best, least, misses, size = 1, seconds(1), 0, 2
    while misses < PATIENCE:
        size = min(size, largest)
        found = seconds(size)
        if found < (1 - ENOUGH) * least:
            best, least, misses = size, found, 0
        else:
            misses += 1
        if size == largest:
            break
        size *= 2
    return best


def _runner(body: Body, params: PyTree, xs: PyTree, options: Options) -> Callable[[int], float]:
    """Times the gradient of the first few iterations, on the data themselves."""
    tensors, skeleton = _tree.split(params)
    x_tensors, x_skeleton = _tree.split(xs)
    constants = skeleton.fill([without_graph(t) for t in tensors])
    sources = Sources.of(
        [*tensors, *x_tensors], (*skeleton.static, *x_skeleton.static), current(options.run).generators
    )
    n = x_tensors[0].shape[0]

    def seconds(size: int) -> float:
        m = min(n, max(size, FEW))
        few = x_skeleton.fill([without_graph(x.narrow(0, 0, m)) for x in x_tensors])
        quiet = replace(options, chunk_size=size, weights=None, grad_weights=None, run=QUIET)
        with unnoticed(sources):
            return _least_of(lambda: gradient_once(body, constants, few, quiet), tensors + x_tensors) / m

    return seconds


def _least_of(run: Callable[[], object], on: list[Tensor]) -> float:
    """The least time of three runs, or of fewer if they are long; the first one also warms up."""
    device = on[0].device
    least = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        least = min(least, time.perf_counter() - start)
        if least > LONG:
            break
    return least
