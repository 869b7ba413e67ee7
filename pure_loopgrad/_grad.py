"""Value and gradient of a loss over a loop: no graph is built for more than one chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal, TypeAlias

from torch import Tensor

from pure_loopgrad import _run, _tree
from pure_loopgrad._body import ChunkSize, Randomness
from pure_loopgrad._eager import eager
from pure_loopgrad._linearise import Mask, put
from pure_loopgrad._loop import pull_back_loop
from pure_loopgrad._loss import Gradients, Loss, pull_back_loss
from pure_loopgrad._onepass import OnePassBody, contract
from pure_loopgrad._reduce import Body, Options, Prepared, Reduce, Weights
from pure_loopgrad._tree import PyTree
from pure_loopgrad._vjp import prepare_without_graph
from pure_loopgrad.errors import LoopTypeError, LoopValueError

Plan = Literal["auto", "one_pass", "two_pass"]
Argnums: TypeAlias = "int | tuple[int, ...]"

# K numbers cost F + K B in one pass against 2F + B in two: with B = 2F, one number pays and two cost 5F against 4F. Two
# are allowed for the sake of (loss_sum, count), where the count does not depend on params and its row costs nothing.
ONE_PASS_LIMIT = 2


def value_and_grad(
    body: Body,
    loss: Loss | None = None,
    *,
    reduce: Reduce = "stack",
    argnums: Argnums = 0,
    weights: Weights = None,
    grad_weights: Weights = None,
    chunk_size: ChunkSize = 1,
    batched: bool = False,
    randomness: Randomness = "error",
    plan: Plan = "auto",
    run: _run.Run | None = None,
) -> Callable[[PyTree, PyTree], tuple[Tensor, PyTree]]:
    """Makes a function that computes a loss over a loop and its gradient; no graph is built for more than one chunk.

    The order (value, gradient) is that of JAX; `torch.func.grad_and_value` has it the other way round. Denotes::

        reduced = reduce([body(params, x) for x in xs])
        value = loss(params, reduced)  # or reduced itself, where there is no loss

    Args:
        body: see `plg.map`.
        loss: `loss(params, reduced) -> scalar`; called exactly once, on tensors without a graph. It may use params
            itself (a head, a temperature), and reduced any number of times; every use counts once in the gradient.
        reduce: `"stack"`, `"sum"` or `"mean"`. Without a loss, a sum or a mean of a scalar body.
        argnums: what to differentiate: 0 for params, 1 for xs, or a tuple, as in `torch.func.grad`.
        weights: of a mean; see `plg.mean`.
        grad_weights: see `plg.map`.
        chunk_size: see `plg.map`.
        batched: see `plg.map`.
        randomness: see `plg.map`.
        plan: `"one_pass"` adds up the jacobian of the summed output in the forward pass, which then is the only one;
            `"two_pass"` runs the loop again for the gradient. `"auto"` takes one pass where that is less work: a
            summed output of at most 2 numbers. `plg.run(report=...)` tells which one ran.
        run: see `plg.map`.

    Returns:
        `f(params, xs) -> (value, gradient)`. The gradient has the structure of params (or xs), with None for leaves
        that have none. Live parameters count as constants, so neither result carries a graph; where some leaf of params
        requires grad, those that do not are frozen and get None. To differentiate again, use a torch.func transform, or
        call it in the body of another loop, which differentiates all that its body computes.

    Raises:
        LoopTypeError: the value is not one real scalar tensor.
        CapturedTensorError: the loss, too, must be given the parameters that it uses.
        LoopGradError: see `plg.map`.

    Memory: inputs, outputs, two copies of params (K more for a one-pass sum of K numbers), one chunk. Time: one pass
    n (F + K B), two passes n (2F + B).

    Example:
        >>> import torch, pure_loopgrad as plg
        >>> score = lambda w, x: torch.tanh(w @ x)
        >>> f = plg.value_and_grad(score, lambda w, z: -torch.nn.functional.logsigmoid(z), reduce="sum")
        >>> f(torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 0.5], [0.0, 2.0]]))
        (tensor(0.9753), tensor([-0.4899, -0.3330]))

    Source: the two-pass rule is the gradient cache of Gao et al., arXiv 2101.06983, for any loss and any loop.
    """
    options = Options(reduce, weights, grad_weights, chunk_size, batched, randomness, run)
    which = check_argnums(argnums)
    check_plan(plan, reduce, loss)

    @eager
    def value_and_gradient(params: PyTree, xs: PyTree) -> tuple[Tensor, PyTree]:
        prepared, wrt = prepare_without_graph(body, params, xs, options, which)
        prepared = prepared.saving(wrt)
        first = first_pass(prepared, wrt, plan)
        pulled = pull_back_loss(loss, prepared, wrt, first.raw)
        if first.is_enough:
            through = contracted(first, prepared.inputs, wrt, pulled.cotangents)
        else:
            first = replace(first, raw=[])  # the loss has seen them
            through = pull_back_loop(prepared.loop, prepared.inputs, wrt, pulled.cotangents)
        _report(_run.current(run), loss, first)
        del first  # its jacobians are as large as the gradient
        grads = prepared.gradient_trees([add(a, b) for a, b in zip(pulled.direct, through, strict=True)])
        return pulled.value, chosen(grads, argnums)

    return value_and_gradient


@dataclass(frozen=True)
class FirstPass:
    """The loop's raw outputs, and the jacobians of the sums where one pass was enough."""

    raw: list[Tensor]
    over_consts: tuple[Tensor, ...] = ()  # jacobians for the marked consts, with the K rows first
    over_xs: tuple[Tensor, ...] = ()  # for the marked xs, with the K rows second, behind the iterations
    n_numbers: int = 0

    @property
    def is_enough(self) -> bool:
        """Whether no second pass is needed."""
        return self.n_numbers > 0


def first_pass(prepared: Prepared, wrt: Mask, plan: Plan) -> FirstPass:
    """Runs the loop forward, with jacobians where that is the better plan."""
    n_consts = prepared.loop.n_consts
    two = plan == "two_pass" or (plan == "auto" and prepared.chunk.grad_weighted)  # where some run no vjp
    if two or prepared.reduce == "stack" or not any(wrt):
        return FirstPass(prepared.run())
    over_xs = any(wrt[n_consts:])  # their jacobians are stacked, so more than one row would outgrow the gradient
    limit = 2**62 if plan == "one_pass" else 1 if over_xs else ONE_PASS_LIMIT
    body = OnePassBody(prepared.chunk, n_consts, wrt, limit)
    sums, stacks = replace(prepared.loop, body=body)(prepared.consts, prepared.xs)
    if plan == "one_pass" and not body.pays:
        raise LoopValueError("plan='one_pass' needs a summed output of real floats; use plan='auto'")
    n = prepared.chunk.n_sums
    return FirstPass([*sums[:n]], sums[n:], stacks, body.n_numbers if body.pays else 0)


def contracted(first: FirstPass, inputs: Sequence[Tensor], wrt: Mask, cotangents: Gradients) -> Gradients:
    """The loss's cotangents times the jacobians: one gradient for each marked input."""
    floats = [(r, c) for r, c in zip(first.raw, cotangents, strict=True) if _tree.is_differentiable(r)]
    jacobians = [*((j, 0) for j in first.over_consts), *((j, 1) for j in first.over_xs)]
    wanted = compress(inputs, wrt)
    grads = [contract(floats, j, like, dim) for (j, dim), like in zip(jacobians, wanted, strict=True)]
    return put([None] * len(inputs), wrt, grads)


def check_argnums(argnums: Argnums) -> tuple[int, ...]:
    """What to differentiate, as a tuple.

    Raises:
        LoopValueError: something else than params and xs.
    """
    which = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not which or any(i not in (0, 1) for i in which):
        raise LoopValueError(f"argnums={argnums!r}: expected 0 (params), 1 (xs) or a tuple of these")
    return which


def chosen(trees: tuple[PyTree, PyTree], argnums: Argnums) -> PyTree:
    """The gradients of params and xs that were asked for: one, or a tuple."""
    return trees[argnums] if isinstance(argnums, int) else tuple(trees[i] for i in argnums)


def check_plan(plan: Plan, reduce: Reduce, loss: Loss | None) -> None:
    """Raises where a plan, a reduction and a loss do not go together."""
    if plan not in ("auto", "one_pass", "two_pass"):
        raise LoopValueError(f"plan={plan!r}: expected 'auto', 'one_pass' or 'two_pass'")
    if plan == "one_pass" and reduce == "stack":
        raise LoopValueError("plan='one_pass' needs reduce='sum' or 'mean': the jacobian of a stack is a stack")
    if loss is None and reduce == "stack":
        raise LoopValueError("a stack is no scalar: give a loss(params, ys), or reduce='sum' or 'mean'")
    if loss is not None and not callable(loss):
        raise LoopTypeError(f"loss is a {type(loss).__name__}; expected a function loss(params, reduced)")


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, of which there may be none."""
    if a is None or b is None:
        return a if b is None else b
    return a + b


def _report(run: _run.Run, loss: Loss | None, first: FirstPass) -> None:
    if run.report is None:
        return
    if not first.is_enough:
        run.report(_run.Report("two passes", 2, "the loss needs all outputs, or they are more than a few numbers"))
    elif loss is None:
        run.report(_run.Report("sum of scalars", 1, "the value is the sum of the body's scalars"))
    else:
        run.report(_run.Report("few summed numbers", 1, f"the loss sees {first.n_numbers} number(s) in all"))
