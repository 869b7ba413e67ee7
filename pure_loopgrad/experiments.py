"""Gradients of single iterations: stacked, or folded into statistics without being stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import optree
import torch
from torch import Tensor

from pure_loopgrad import _effects, _run, _tree
from pure_loopgrad._body import Randomness, check_chunk_size
from pure_loopgrad._chunks import chunks
from pure_loopgrad._grad import Argnums, check_argnums, chosen
from pure_loopgrad._levels import is_transformed
from pure_loopgrad._map import map as map_
from pure_loopgrad._moments import NoiseScale, moments, noise_scale_of
from pure_loopgrad._reduce import Body, Options, Prepared, prepare
from pure_loopgrad._stream import stream
from pure_loopgrad._task import GradBody, Task
from pure_loopgrad._trace import first_pass_checked
from pure_loopgrad._tree import PyTree
from pure_loopgrad._user import Terms
from pure_loopgrad.errors import LoopTypeError, LoopValueError
from pure_loopgrad.folds import Fold, norms

Transform: TypeAlias = "Callable[[Any], Any]"


def per_iteration_grads(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    argnums: Argnums = 0,
    has_aux: bool = False,
    wrt: PyTree = True,
    chunk_size: int | None = 1,
    randomness: Randomness = "error",
    run: _run.Run | None = None,
) -> PyTree:
    """The gradient of each iteration's scalar, stacked: `vmap(grad(body), (None, 0))(params, xs)`, a chunk at a time.

    Args:
        body: `body(params, x) -> scalar`, one iteration's loss; see `plg.map`.
        params: any pytree. Live parameters count as constants; where some leaf requires grad, those that do not are
            frozen.
        xs: a pytree with a leading axis of length n.
        argnums: 0 for params, 1 for xs, or a tuple, as in `torch.func.grad`.
        has_aux: the body returns `(scalar, aux)`, with any pytree of tensors and numbers as aux, as in
            `torch.func.grad`.
        wrt: which leaves of params: a pytree of bools of the same structure, or of the upper part of it.
        chunk_size: how many iterations run at once, under `torch.vmap`; None for all.
        randomness: of vmapped chunks, as in `torch.func.vmap`.
        run: options of the computation; see `Run`.

    Returns:
        The structure of params (or xs, or a tuple of both), every leaf with a leading axis of length n; None for leaves
        that have no gradient. With `has_aux`, a pair of that and the stacked aux.

    Raises:
        LoopTypeError: the body returns no real scalar.
        LoopGradError: see `plg.map`.

    Memory: n gradients, and one chunk; the chunks are written into one buffer. Time: n (F + B).

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> loss = lambda w, x: (w - x) ** 2 / 2
        >>> plg.per_iteration_grads(loss, torch.tensor(0.0), torch.tensor([0.0, 2.0, 4.0, 6.0]))
        tensor([ 0., -2., -4., -6.])
    """
    task = Task.of(body, params, xs, check_argnums(argnums), wrt)
    body_of_grads = GradBody(task, has_aux)
    stacked, aux = map_(body_of_grads, task.consts, task.xs, chunk_size=chunk_size, randomness=randomness, run=run)
    grads = chosen(task.trees(stacked), argnums)
    return (grads, aux) if has_aux else grads


def fold_grads(
    body: Body,
    params: PyTree,
    xs: PyTree,
    fold: Any,
    *,
    transform: Transform | None = None,
    wrt: PyTree = True,
    chunk_size: int | None = 1,
    randomness: Randomness = "error",
    run: _run.Run | None = None,
) -> Any:
    """Folds the gradients of single iterations into statistics, without storing them.

    Args:
        body: `body(params, x) -> scalar`, one iteration's loss; see `plg.map`.
        params: see `per_iteration_grads`.
        xs: see `per_iteration_grads`.
        fold: a `Fold`, or any pytree of them, of `plg.folds` or of your own; all are computed in the same pass.
        transform: applied to the gradient of each iteration first: `plg.folds.clip_norm(1.0)`, for instance.
        wrt: see `per_iteration_grads`.
        chunk_size: see `per_iteration_grads`.
        randomness: see `per_iteration_grads`.
        run: see `per_iteration_grads`.

    Returns:
        The structure of `fold`, with each fold's result in its place.

    Raises:
        LoopTypeError: the body returns no real scalar, a leaf of fold is no Fold, or the transform changes the
            structure.
        LoopValueError: there are no iterations.
        LoopGradError: see `plg.map`.

    Memory: one chunk's gradients, c copies of params, and what the folds keep. Time: n (F + B), and once more for a
    fold with a second pass (`cosine_to_mean`).

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> loss = lambda w, x: (w - x) ** 2 / 2
        >>> xs = torch.tensor([0.0, 2.0, 4.0, 6.0])
        >>> plg.fold_grads(loss, torch.tensor(0.0), xs, {"mean": plg.folds.mean(), "norms": plg.folds.norms()})
        {'mean': tensor(-3.), 'norms': tensor([0., 2., 4., 6.])}
    """
    task = Task.of(body, params, xs, (0,), wrt)
    folds, spec = optree.tree_flatten(fold)  # a Fold is a dataclass, and a leaf here
    for path, leaf in zip(spec.paths(), folds, strict=True):
        if not isinstance(leaf, Fold):
            raise LoopTypeError(f"fold{list(path)} is a {type(leaf).__name__}; expected a Fold, as of plg.folds")
    if task.n == 0:
        raise LoopValueError("xs has a leading axis of 0, so there is no gradient to fold")
    options = Options(chunk_size=check_chunk_size(chunk_size, task.n), randomness=randomness, run=run)
    prepared = prepare(GradBody(task), task.consts, task.xs, options)
    results = _fold_once(prepared, _Folding(task, folds, transform, randomness, run))
    more = {i: f.then(r) for i, (f, r) in enumerate(zip(folds, results, strict=True)) if f.then is not None}
    if more:
        repeated = replace(prepared, loop=replace(prepared.loop, first_pass=False))
        again = _fold_once(repeated, _Folding(task, list(more.values()), transform, randomness, run))
        for i, result in zip(more, again, strict=True):
            results[i] = result
    return spec.unflatten(results)


@dataclass(frozen=True)
class GradStats:
    """Statistics of single gradients.

    Attributes:
        mean: the mean gradient, in its structure.
        variance: of each entry, by n - 1.
        norms: shape (n,).
        noise_scale: see `plg.folds.noise_scale`.
    """

    mean: PyTree
    variance: PyTree
    norms: Tensor
    noise_scale: NoiseScale


def grad_stats(
    body: Body,
    params: PyTree,
    xs: PyTree,
    *,
    transform: Transform | None = None,
    wrt: PyTree = True,
    chunk_size: int | None = 1,
    randomness: Randomness = "error",
    run: _run.Run | None = None,
) -> GradStats:
    """The usual statistics of single gradients, in one pass and without storing them.

    Args:
        body: see `fold_grads`.
        params: see `fold_grads`.
        xs: see `fold_grads`.
        transform: see `fold_grads`.
        wrt: see `fold_grads`.
        chunk_size: see `fold_grads`.
        randomness: see `fold_grads`.
        run: see `fold_grads`.

    Returns:
        A `GradStats`.

    Raises:
        LoopGradError: see `fold_grads`.

    Memory: one chunk's gradients, three copies of params, n numbers. Time: n (F + B).

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> loss = lambda w, x: (w - x) ** 2 / 2
        >>> stats = plg.grad_stats(loss, torch.tensor(0.0), torch.tensor([0.0, 2.0, 4.0, 6.0]))
        >>> stats.mean, stats.variance
        (tensor(-3.), tensor(6.6667))
    """
    folds = moments(), norms()
    options = {"transform": transform, "wrt": wrt, "chunk_size": chunk_size, "randomness": randomness, "run": run}
    (centre, spread), lengths = fold_grads(body, params, xs, folds, **options)
    trace = torch.stack([v.double().sum() for v in _tree.leaves_of(spread)]).sum()
    return GradStats(centre, spread, lengths, noise_scale_of(_tree.leaves_of(centre), trace, lengths.shape[0]))


def _fold_once(prepared: Prepared, folding: _Folding) -> list[Any]:
    """One pass; one that is not the first sees what the first one saw, random numbers and buffers."""
    loop = prepared.loop
    if is_transformed(prepared.inputs):
        _fold_by_chunks(prepared, folding)
        return folding.finish()
    checked = first_pass_checked(loop.trace, prepared.inputs) if loop.first_pass else nullcontext()
    with torch.no_grad(), checked:
        stream(loop, prepared.consts, prepared.xs, folding)
        return folding.finish()


def _fold_by_chunks(prepared: Prepared, folding: _Folding) -> None:
    """Under transforms: one loop a chunk, whose derivative is a loop again. The passes are those of the whole loop."""
    loop, trace, task = prepared.loop, prepared.loop.trace, folding.task
    random_numbers = loop.tape.recording if loop.first_pass else loop.tape.replaying
    with _effects.running(trace, recomputation=not loop.first_pass), random_numbers(trace.sources) as rng:
        for i, its in enumerate(chunks(task.n, loop.chunk_size)):
            trace.iterations, trace.effects.cursor = its, 0
            rng.start(i)
            xs = [x.narrow(0, its.start, len(its)) for x in task.xs]
            folding.add(its, (), task.gradients(xs, len(its), folding.randomness, folding.run))
            rng.finish(i)


@dataclass
class _Folding:
    """Takes the chunks of a loop over gradients; holds the folds' states."""

    task: Task
    folds: list[Fold]
    transform: Transform | None
    randomness: Randomness
    run: _run.Run | None
    states: list[Any] = field(default_factory=list)

    def add(self, iterations: range, sums: Terms, stacks: Terms) -> None:
        """Updates every fold by one chunk."""
        task, transform = self.task, self.transform
        grads = cast("list[Tensor]", list(stacks))  # of GradBody, which leaves no zero out
        if transform is not None:
            one = lambda leaves: task.leaves(transform(task.trees(leaves)[0]))  # noqa: E731  # for vmap alone
            grads = torch.func.vmap(one, randomness=self.randomness)(grads)
        tree = task.trees(grads)[0]
        states = self.states or [f.init(_tree.tree_map(lambda g: g[0], tree), task.n) for f in self.folds]
        self.states = [f.update(s, tree, iterations) for f, s in zip(self.folds, states, strict=True)]

    def leave_out(self, iterations: range) -> None:
        """Never asked: nothing weighs these gradients."""

    def totals(self) -> list[Tensor]:
        """Nothing is added up here."""
        return []

    def finish(self) -> list[Any]:
        """The results."""
        return [f.finish(s) for f, s in zip(self.folds, self.states, strict=True)]
