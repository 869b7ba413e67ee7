"""Gradients inside the bodies of loops: what a body computes is differentiated, also where it is a gradient itself."""

from __future__ import annotations

import pytest
import torch

import pure_loopgrad as plg

G = torch.Generator().manual_seed(0)
W = torch.randn(3, dtype=torch.float64, generator=G)
XS = torch.randn(5, 3, dtype=torch.float64, generator=G)
ZS = torch.randn(6, 3, dtype=torch.float64, generator=G)


def task(p, z):
    """The loss of one z, at w and x."""
    return torch.sin(p["w"] * p["x"] * z).sum() ** 2


def given(w, x):
    return {"w": w, "x": x}


def each(p):
    return torch.stack([task(p, z) for z in ZS])


def each_gradient(p):
    return torch.stack([torch.func.grad(task)(p, z)["w"] for z in ZS])


def gradient_of(loss):
    return lambda w, x: torch.func.grad(lambda p: loss(p, each(p)))(given(w, x))["w"]


def ours(loss, **options):
    return lambda w, x: plg.value_and_grad(task, loss, **options)(given(w, x), ZS)[1]["w"]


def with_params(p, y):
    return (y * p["w"].sum()).square().sum()


# what a body computes by our own functions, and by torch
INSIDE = {
    "one pass": (ours(None, reduce="sum"), gradient_of(lambda p, y: y.sum())),
    "two passes": (ours(None, reduce="sum", plan="two_pass"), gradient_of(lambda p, y: y.sum())),
    "loss": (ours(with_params), gradient_of(with_params)),
    "saved": (ours(with_params, run=plg.Run(save="everything")), gradient_of(with_params)),
    "value": (
        lambda w, x: w * plg.value_and_grad(task, reduce="sum")(given(w, x), ZS)[0],
        lambda w, x: w * each(given(w, x)).sum(),
    ),
    "vjp": (
        lambda w, x: plg.vjp(task, given(w, x), ZS)[1](ZS[:, 0])[0]["w"],
        gradient_of(lambda p, y: (y * ZS[:, 0]).sum()),
    ),
    "each": (
        lambda w, x: plg.per_iteration_grads(task, given(w, x), ZS)["w"].square().sum(0),
        lambda w, x: each_gradient(given(w, x)).square().sum(0),
    ),
    "mean": (
        lambda w, x: plg.fold_grads(task, given(w, x), ZS, plg.folds.mean(), chunk_size=2)["w"],
        lambda w, x: each_gradient(given(w, x)).mean(0),
    ),
    "variance": (
        lambda w, x: plg.fold_grads(task, given(w, x), ZS, plg.folds.moments())[1]["w"],
        lambda w, x: each_gradient(given(w, x)).var(0),
    ),
}
AROUND = {
    "map": (lambda body, w: plg.map(body, w, XS), lambda body, w: torch.stack([body(w, x) for x in XS])),
    "chunks": (
        lambda body, w: plg.map(body, w, XS, chunk_size=2),
        lambda body, w: torch.stack([body(w, x) for x in XS]),
    ),
    "sum": (lambda body, w: plg.sum(body, w, XS), lambda body, w: sum(body(w, x) for x in XS)),
    "scan": (
        lambda body, w: plg.scan(lambda w, c, x: (c + body(w, x), None), w, w, XS)[0],
        lambda body, w: w + sum(body(w, x) for x in XS),
    ),
    "checkpoint": (
        lambda body, w: plg.checkpoint(lambda w: body(w, XS[0]))(w),
        lambda body, w: body(w, XS[0]),
    ),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("around", AROUND)
def test_a_gradient_inside_a_body_is_differentiated(inside, around):
    body, plain_body = INSIDE[inside]
    loop, plain_loop = AROUND[around]
    f = lambda w: loop(lambda w, x: w - 0.1 * body(w, x), w).square().sum()
    right = torch.func.grad(lambda w: plain_loop(lambda w, x: w - 0.1 * plain_body(w, x), w).square().sum())(W)
    live = W.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(f)(W), right, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(f(live), live)[0], right, rtol=1e-10, atol=1e-12)


def test_hessian_over_a_gradient_inside_a_body():
    body, plain_body = INSIDE["loss"]
    f = lambda w: plg.map(lambda w, x: w - 0.1 * body(w, x), w, XS).square().sum()
    plain = lambda w: torch.stack([w - 0.1 * plain_body(w, x) for x in XS]).square().sum()
    torch.testing.assert_close(torch.func.hessian(f)(W), torch.func.hessian(plain)(W), rtol=1e-10, atol=1e-12)


def test_frozen_parameters_of_the_outer_loop_keep_their_gradient_inside():
    params = {"w": W.clone().requires_grad_(), "x": XS[0]}  # x is frozen for the outer loop alone

    def body(p, z):
        return plg.value_and_grad(lambda p, z: task(p, z), reduce="sum")(p, torch.stack([z, 2 * z]))[1]["x"]

    plain = lambda w: sum(
        torch.func.grad(lambda p, z=z: task(p, z) + task(p, 2 * z))(given(w, XS[0]))["x"].square().sum() for z in ZS
    )
    plg.map(body, params, ZS).square().sum().backward()
    torch.testing.assert_close(params["w"].grad, torch.func.grad(plain)(W), rtol=1e-10, atol=1e-12)


def test_outside_of_a_body_live_parameters_are_constants():
    live = W.clone().requires_grad_()
    value, gradient = plg.value_and_grad(lambda w, x: (w * x).sum() ** 2, reduce="sum")(live, XS)
    assert not value.requires_grad
    assert not gradient.requires_grad
