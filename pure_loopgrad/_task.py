"""The gradient of one iteration as a body: what to differentiate, and how its leaves go back into trees."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor

from pure_loopgrad import _run, _tree
from pure_loopgrad._body import Randomness
from pure_loopgrad._linearise import Mask, linearise, put, zeros_for_none
from pure_loopgrad._loss import scalar
from pure_loopgrad._map import map as map_
from pure_loopgrad._reduce import Body
from pure_loopgrad._tree import PyTree
from pure_loopgrad._vjp import as_constant, not_frozen
from pure_loopgrad.errors import LoopTypeError


@dataclass(frozen=True)
class Task:
    """What to differentiate: the body, its inputs without graph, and which of them."""

    body: Body
    consts: list[Tensor]
    xs: list[Tensor]
    params: _tree.Skeleton
    x: _tree.Skeleton
    mask: Mask  # over consts, then xs
    n: int

    @classmethod
    def of(cls, body: Body, params: PyTree, xs: PyTree, argnums: tuple[int, ...], wrt: PyTree) -> Task:
        consts, params_skeleton = _tree.split(params)
        x_tensors, x_skeleton = _tree.split(xs)
        chosen = _tree.split_like(wrt, params, "wrt")
        over_params = [
            0 in argnums and bool(c) and marked for c, marked in zip(chosen, not_frozen(consts), strict=True)
        ]
        over_xs = [1 in argnums and _tree.is_differentiable(t) for t in x_tensors]
        n = _tree.leading_axis(x_tensors, x_skeleton)
        _ = params_skeleton.template, x_skeleton.template  # made before dynamo asks for them, which cannot make them
        constants, inputs = [as_constant(t) for t in consts], [as_constant(t) for t in x_tensors]
        return cls(body, constants, inputs, params_skeleton, x_skeleton, (*over_params, *over_xs), n)

    def gradients(
        self, xs: list[Tensor], chunk_size: int | None, randomness: Randomness, run: _run.Run | None
    ) -> list[Tensor]:
        """The stacked gradients of some iterations, for the marked inputs."""
        body = GradBody(self)
        found, _ = map_(body, self.consts, xs, chunk_size=chunk_size, randomness=randomness, run=run)
        return cast("list[Tensor]", found)

    def trees(self, grads: list[Tensor]) -> tuple[PyTree, PyTree]:
        """Gradients of the marked inputs in the structures of params and xs."""
        full = put([None] * len(self.mask), self.mask, grads)
        return self.params.fill_only(full[: len(self.consts)]), self.x.fill_only(full[len(self.consts) :])

    def leaves(self, tree: PyTree) -> list[Tensor]:
        """A gradient in the structure of params, as a transform returns it, as the list of the marked ones.

        Raises:
            LoopTypeError: it is not that.
        """
        leaves, spec = _tree.flatten(tree)
        expected = _tree.flatten(self.trees([torch.empty(0)] * sum(self.mask))[0])[1]
        if spec != expected:
            raise LoopTypeError(
                f"transform returns a gradient of the structure {spec}, but it was given {expected}: it must return "
                f"every leaf in its place (zeros, where it drops one; wrt= leaves one out)"
            )
        for accessor, leaf in zip(spec.accessors(), leaves, strict=True):
            if not isinstance(leaf, Tensor):
                raise LoopTypeError(f"transform returns a {type(leaf).__name__} at {accessor.codify('gradient')}")
        return leaves


@dataclass(frozen=True, eq=False)
class GradBody:
    """The gradient of a body at flat inputs, and its aux, as a body."""

    task: Task
    has_aux: bool = False

    @property
    def __wrapped__(self) -> Body:
        """What messages speak of."""
        return self.task.body

    def __call__(self, consts: list[Tensor], xs: list[Tensor]) -> tuple[list[Tensor], PyTree]:
        task, inputs = self.task, [*consts, *xs]
        spec: _tree.TreeSpec | None = None

        def value(*primals: Tensor) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
            nonlocal spec
            full = put(inputs, task.mask, primals)
            out = task.body(task.params.fill(full[: len(consts)]), task.x.fill(full[len(consts) :]))
            leaves: list[Tensor] = []
            if self.has_aux:
                out, aux = _parted(out)
                leaves, spec = _tree.numbers_to_tensors(aux, inputs, "aux")
            return (scalar(out, "the body's output"),), tuple(leaves)

        primals = list(compress(inputs, task.mask))
        (out,), pullback, aux = linearise(value, primals)
        grads = zeros_for_none(pullback([torch.ones_like(out)], True), primals)
        return grads, None if spec is None else spec.unflatten(aux)


def _parted(out: Any) -> tuple[Any, PyTree]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise LoopTypeError(f"with has_aux, the body returns (scalar, aux), not a {type(out).__name__}")
    return out
