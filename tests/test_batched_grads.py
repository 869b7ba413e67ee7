"""Batches of ordinary autograd: is_grads_batched, vectorised jacobians and hessians, gradcheck of batched gradients."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import functional, grad, gradcheck, gradgradcheck

import pure_loopgrad as plg

f64 = torch.float64
G = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, dtype=f64, generator=G)
XS = torch.randn(5, 3, dtype=f64, generator=G)
SCALES = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0], dtype=f64)


def body(w, x):
    return torch.tanh(w @ x)


def step(w, c, x):
    return torch.tanh(w @ c + x), c.sum()


def rows(w, x):
    return plg.sum(lambda w, z: torch.sin(w * z), w, x)


def each(w):
    return torch.stack([body(w, x) for x in XS])


def plain_scan(w):
    c, ys = torch.zeros(3, dtype=f64), []
    for x in XS:
        c, y = step(w, c, x)
        ys.append(y)
    return torch.cat([c, torch.stack(ys)])


def scan(w, checkpoints):
    c, ys = plg.scan(step, w, torch.zeros(3, dtype=f64), XS, checkpoints=checkpoints)
    return torch.cat([c, ys])


LOOPS = {
    "map": (lambda w: plg.map(body, w, XS), each),
    "chunks": (lambda w: plg.map(body, w, XS, chunk_size=2), each),
    "saved": (lambda w: plg.map(body, w, XS, run=plg.Run(save="everything")), each),
    "sum": (lambda w: plg.sum(body, w, XS), lambda w: each(w).sum(0)),
    "mean": (lambda w: plg.mean(body, w, XS, weights=SCALES), lambda w: SCALES @ each(w) / SCALES.sum()),
    "nested": (
        lambda w: plg.map(rows, w, XS),
        lambda w: torch.stack([sum(torch.sin(w * z) for z in x) for x in XS]),
    ),
    "checkpoint": (lambda w: plg.checkpoint(body)(w, XS[0]), lambda w: body(w, XS[0])),
    "scan, all": (lambda w: scan(w, "all"), plain_scan),
    "scan, sqrt": (lambda w: scan(w, "sqrt"), plain_scan),
}
LOOP = pytest.mark.parametrize(("f", "plain"), LOOPS.values(), ids=LOOPS)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@LOOP
def test_a_batch_of_cotangents(f, plain):
    def found(f):
        w = W.clone().requires_grad_()
        y = f(w)
        cotangents = torch.randn(4, *y.shape, dtype=f64, generator=torch.Generator().manual_seed(1))
        (once,) = grad(y, w, cotangents, is_grads_batched=True, create_graph=True)
        return once, grad(once.square().sum(), w)

    assert_close(found(f), found(plain))


@LOOP
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorised_jacobians(f, plain, strategy):
    assert_close(functional.jacobian(f, W, vectorize=True, strategy=strategy), functional.jacobian(plain, W))


@LOOP
@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorised_hessians(f, plain, strategy):
    found = functional.hessian(lambda w: f(w).square().sum(), W, vectorize=True, outer_jacobian_strategy=strategy)
    assert_close(found, functional.hessian(lambda w: plain(w).square().sum(), W))


@LOOP
def test_gradcheck_of_batched_gradients(f, plain):
    w = W.clone().requires_grad_()
    assert gradcheck(f, w, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True)
    assert gradgradcheck(f, w, check_batched_grad=True)


def test_random_numbers_are_those_of_the_one_first_pass():
    def found(loop):
        torch.manual_seed(0)
        w = W.clone().requires_grad_()
        return functional.jacobian(loop, w, vectorize=True)

    def dropped(w, x):
        return torch.nn.functional.dropout(body(w, x), 0.5)

    expected = found(lambda w: torch.stack([dropped(w, x) for x in XS]))
    assert_close(found(lambda w: plg.map(dropped, w, XS)), expected)


def test_the_body_runs_once_more_for_the_whole_batch():
    calls = []

    def counted(w, x):
        calls.append(None)
        return body(w, x)

    w = W.clone().requires_grad_()
    y = plg.map(counted, w, XS, run=plg.Run(check="off"))
    before = len(calls)
    grad(y, w, torch.ones(4, 5, 3, dtype=f64), is_grads_batched=True)
    assert (before, len(calls)) == (5, 10)
