"""Four ways to the gradient of one training step, each as its users would write it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import optree
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg
from pure_loopgrad.demo.config import Config
from pure_loopgrad.demo.model import Params, body, criterion
from pure_loopgrad.demo.problem import Problem

Gradient = Callable[[Params], tuple[Tensor, Params]]


def full_graph(config: Config, problem: Problem) -> Gradient:
    """The plain loop: autograd keeps every iteration."""
    features = body(problem)
    return _by_backward(problem, lambda params: [features(params, x) for x in _each(problem)])


def frozen(config: Config, problem: Problem) -> Gradient:
    """The gradient through one iteration only, the others without: what was tried. It is another direction."""
    features, kept = body(problem), problem.n // 2

    def loop(params: Params) -> list[Tensor]:
        outputs = []
        for i, x in enumerate(_each(problem)):
            with nullcontext() if i == kept else torch.no_grad():
                outputs.append(features(params, x))
        return outputs

    return _by_backward(problem, loop)


def checkpointed(config: Config, problem: Problem) -> Gradient:
    """`torch.utils.checkpoint` around the body."""
    features = body(problem)

    def loop(params: Params) -> list[Tensor]:
        return [checkpoint(features, params, x, use_reentrant=False) for x in _each(problem)]

    return _by_backward(problem, loop)


def ours(config: Config, problem: Problem) -> Gradient:
    """The whole change: body and loss stay, the loop is ours."""
    f = plg.value_and_grad(body(problem), criterion(problem), chunk_size=config.chunk_size)
    return lambda params: f(params, problem.xs)


METHODS: dict[str, Callable[[Config, Problem], Gradient]] = {
    "full graph": full_graph,
    "frozen but one": frozen,
    "torch.utils.checkpoint": checkpointed,
    "pure_loopgrad": ours,
}


def _each(problem: Problem) -> Any:
    return zip(*problem.xs, strict=True)


def _by_backward(problem: Problem, loop: Callable[[Params], list[Tensor]]) -> Gradient:
    """Value and gradient of the criterion on a stack of outputs, by ordinary autograd on copies of the parameters."""
    loss = criterion(problem)

    def gradient(params: Params) -> tuple[Tensor, Params]:
        leaves, spec = leaves_of(params)
        live = [p.detach().requires_grad_() for p in leaves]
        tree: Any = spec.unflatten(live)
        value = loss(tree, torch.stack(loop(tree)))
        return value.detach(), cast(Params, spec.unflatten(torch.autograd.grad(value, live)))

    return gradient


def flat(grads: Params) -> Tensor:
    """A gradient pytree as one vector."""
    return torch.cat([g.flatten() for g in leaves_of(grads)[0]])


def leaves_of(tree: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    """The tensors of a pytree, and its structure."""
    leaves, spec = optree.tree_flatten(tree)
    return cast(list[Tensor], leaves), spec
