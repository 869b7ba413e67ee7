"""Every public loop equals the plain Python loop under full-graph autograd, in float64, under any two transforms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close, loops, losses, transform_stacks, transformed
from pure_loopgrad.testing import plain as oracle
from pure_loopgrad.testing.grammar import FLOAT_OUTPUTS
from pure_loopgrad.testing.strategies import SIZES
from pure_loopgrad.testing.transforms import Flat, gradient_by_backward, gradient_by_func

POSITIVE = SIZES.filter(lambda n: n > 0)


def weights_for(n):
    return [0.1 + i % 3 for i in range(n)]  # no float32 holds a tenth


def assert_same_under_transforms(ours, plain, case, loss, stack, gradient=gradient_by_backward):
    """`ours` and `plain` map (params, xs) to outputs; compares outputs, and the loss's value and gradient."""
    assert_close(ours(case.params, case.xs), plain(case.params, case.xs), what="outputs")
    flat = Flat((case.params, case.xs))

    def scalar(run):
        def f(v):
            params, xs = flat.unravel(v)
            return loss(params, run(params, xs))

        return f

    ref = gradient(transformed(scalar(plain), stack), flat.start())
    assert_close(gradient(transformed(scalar(ours), stack), flat.start()), ref, what=f"{stack}")


@given(loops(), losses(), transform_stacks())
def test_map(case, loss, stack):
    assert_same_under_transforms(
        lambda p, x: plg.map(case.body, p, x, chunk_size=case.chunk_size),
        lambda p, x: oracle.plain_map(case.body, p, x),
        case, loss, stack,
    )  # fmt: skip


@given(loops(), losses(), transform_stacks())
def test_sum(case, loss, stack):
    assert_same_under_transforms(
        lambda p, x: plg.sum(case.body, p, x, chunk_size=case.chunk_size),
        lambda p, x: oracle.plain_sum(case.body, p, x),
        case, loss, stack,
    )  # fmt: skip


@given(loops(outputs=FLOAT_OUTPUTS, sizes=POSITIVE), losses(), transform_stacks())
def test_mean(case, loss, stack):
    assert_same_under_transforms(
        lambda p, x: plg.mean(case.body, p, x, chunk_size=case.chunk_size),
        lambda p, x: oracle.plain_mean(case.body, p, x),
        case, loss, stack,
    )  # fmt: skip


@given(loops(outputs=FLOAT_OUTPUTS, sizes=POSITIVE), losses(), transform_stacks())
def test_weighted_mean(case, loss, stack):
    w = weights_for(case.n)
    assert_same_under_transforms(
        lambda p, x: plg.mean(case.body, p, x, weights=w, chunk_size=case.chunk_size),
        lambda p, x: oracle.plain_mean(case.body, p, x, w),
        case, loss, stack,
    )  # fmt: skip


@given(loops(sizes=POSITIVE), losses(), transform_stacks())
def test_checkpoint(case, loss, stack):
    x = lambda xs: oracle.take(xs, 0)
    assert_same_under_transforms(
        lambda p, xs: plg.checkpoint(case.body)(p, x(xs)),
        lambda p, xs: oracle.tree_map(torch.as_tensor, case.body(p, x(xs))),
        case, loss, stack,
    )  # fmt: skip


@given(loops(), losses(), transform_stacks(1))
def test_vjp(case, loss, stack):
    """The pullback, itself differentiated: by transforms, along the output and along the cotangent."""

    def pulled(vjp):
        def f(params, xs):
            ys, pullback = vjp(params, xs)
            dys = oracle.tree_map(lambda y: torch.cos(y) if y.is_floating_point() else None, ys)
            return oracle.tree_map(lambda t: t * 1.0, oracle.leaves(pullback(dys)))

        return f

    def plain(params, xs):
        flat = Flat((params, xs))
        v = flat.start()
        floats = lambda ys: tuple(y for y in oracle.leaves(ys) if y.is_floating_point())
        ys, pullback = torch.func.vjp(lambda v: floats(oracle.plain_map(case.body, *flat.unravel(v))), v)
        return [
            t * 1.0
            for t in oracle.leaves(flat.unravel(pullback(tuple(torch.cos(y) for y in ys))[0]))
            if t.is_floating_point()
        ]

    assert_same_under_transforms(
        pulled(lambda p, x: plg.vjp(case.body, p, x, chunk_size=case.chunk_size)),
        plain,
        case,
        loss,
        stack,
        gradient_by_func,
    )


@pytest.mark.parametrize("reduce", ["stack", "sum", "mean"])
@pytest.mark.parametrize("plan", ["auto", "two_pass"])
@given(case=loops(outputs=FLOAT_OUTPUTS, sizes=POSITIVE), loss=losses(), stack=transform_stacks(1))
def test_value_and_grad(reduce, plan, case, loss, stack):
    assert_value_and_grad(reduce, plan, case, loss, stack)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@given(case=loops(outputs=FLOAT_OUTPUTS, sizes=POSITIVE), loss=losses(), stack=transform_stacks(1))
def test_value_and_grad_in_one_pass(reduce, case, loss, stack):
    assert_value_and_grad(reduce, "one_pass", case, loss, stack)


def assert_value_and_grad(reduce, plan, case, loss, stack):
    plain_loop = {"stack": oracle.plain_map, "sum": oracle.plain_sum, "mean": oracle.plain_mean}[reduce]
    f = plg.value_and_grad(case.body, loss, reduce=reduce, argnums=(0, 1), plan=plan, chunk_size=case.chunk_size)

    def ours(params, xs):
        value, grads = f(params, xs)
        return [value, *oracle.leaves(grads)]

    def plain(params, xs):
        flat = Flat((params, xs))

        def scalar(v):
            p, x = flat.unravel(v)
            return loss(p, plain_loop(case.body, p, x))

        g, value = torch.func.grad_and_value(scalar)(flat.start())
        return [value, *(t for t in oracle.leaves(flat.unravel(g)) if t.is_floating_point())]

    assert_same_under_transforms(ours, plain, case, loss_of_list, stack, gradient_by_func)


def loss_of_list(params, ys):
    return sum(torch.sin(y).sum() for y in ys)


@given(loops(sizes=POSITIVE), losses())
def test_live_parameters(case, loss):
    """`.backward()` fills the gradients of the leaves themselves, and a second backward through it works."""
    assume(any(t.is_floating_point() for t in oracle.leaves(case.params["layers"])))

    def live(run):
        params = oracle.tree_map(
            lambda t: t.clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t,
            case.params,
        )
        wanted = oracle.leaves(params["layers"])
        value = loss(params, run(params))
        first = torch.autograd.grad(value, wanted, create_graph=True, allow_unused=True)
        first = [torch.zeros_like(t) if g is None else g for g, t in zip(first, wanted, strict=True)]
        norm = sum((torch.sin(g).sum() for g in first), torch.zeros((), dtype=torch.float64))
        if not norm.requires_grad:
            return first
        second = torch.autograd.grad(norm, wanted, allow_unused=True)
        return [*first, *(torch.zeros_like(t) if g is None else g for g, t in zip(second, wanted, strict=True))]

    ref = live(lambda p: oracle.plain_map(case.body, p, case.xs))
    assert_close(live(lambda p: plg.map(case.body, p, case.xs, chunk_size=case.chunk_size)), ref)
