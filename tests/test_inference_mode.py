"""Inside torch.inference_mode ordinary autograd records nothing; gradients of loops are right there all the same."""

from __future__ import annotations

import pytest
import torch

import pure_loopgrad as plg

G = torch.Generator().manual_seed(0)
W = torch.randn(3, dtype=torch.float64, generator=G)
XS = torch.randn(6, 3, dtype=torch.float64, generator=G)


def body(w, x):
    return (w * x).sin()


def number(w, x):
    return body(w, x).sum()


def plain(w):
    return torch.stack([body(w, x) for x in XS]).square().sum()


def grad(f):
    return lambda w: torch.func.grad(f)(w)


def scanned(w):
    return plg.scan(lambda w, c, x: (c, body(w, x)), w, w, XS)[1].square().sum()


def squares(_, ys):
    return ys.square().sum()


ALL = plg.Run(save="everything")
CALLS = {
    "map": (grad(lambda w: plg.map(body, w, XS).square().sum()), grad(plain)),
    "chunks": (grad(lambda w: plg.map(body, w, XS, chunk_size=4).square().sum()), grad(plain)),
    "scan": (grad(scanned), grad(plain)),
    "hessian": (torch.func.hessian(lambda w: plg.map(body, w, XS).square().sum()), torch.func.hessian(plain)),
    "one pass": (
        lambda w: plg.value_and_grad(number, reduce="sum")(w, XS)[1],
        grad(lambda w: sum(number(w, x) for x in XS)),
    ),
    "two passes": (lambda w: plg.value_and_grad(body, squares)(w, XS)[1], grad(plain)),
    "saved": (lambda w: plg.value_and_grad(body, squares, run=ALL)(w, XS)[1], grad(plain)),
    "auto": (lambda w: plg.value_and_grad(body, squares, chunk_size="auto")(w, XS)[1], grad(plain)),
    "each": (
        lambda w: plg.per_iteration_grads(number, w, XS),
        lambda w: torch.stack([torch.func.grad(number)(w, x) for x in XS]),
    ),
    "checkpoint": (
        grad(lambda w: plg.checkpoint(lambda w: body(w, XS[0]))(w).square().sum()),
        grad(lambda w: body(w, XS[0]).square().sum()),
    ),
}


@pytest.mark.parametrize("made", ["before", "inside"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_in_inference_mode(name, made):
    ours, right = CALLS[name]
    with torch.inference_mode():
        found = ours(W.clone() if made == "inside" else W)
    torch.testing.assert_close(found, right(W), rtol=1e-10, atol=1e-12)
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "auto"])
def test_gradients_outside_of_inference_mode_of_what_was_made_inside(name):
    """As under torch.func.grad; ordinary autograd saves no such tensor, and its checks do not see it change."""
    ours, right = CALLS[name]
    with torch.inference_mode():
        made = W.clone()
    torch.testing.assert_close(ours(made), right(W), rtol=1e-10, atol=1e-12)
    assert made.is_inference()


@pytest.mark.parametrize("of", [torch.clone, torch.conj, lambda t: t.imag, lambda t: t[:1].expand(6, 3)])
def test_xs_that_were_made_in_inference_mode(of):
    """Features of a frozen encoder."""
    with torch.inference_mode():
        xs = of(torch.complex(XS, XS.cos()))
    f = lambda w, x: (w * x).sin().abs().sum()
    value, grads = plg.value_and_grad(f, reduce="sum", argnums=(0, 1))(W, xs)
    w, right = W.clone().requires_grad_(), of(torch.complex(XS, XS.cos())).clone().requires_grad_()
    expected = torch.stack([f(w, x) for x in right]).sum()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (w, right)), rtol=1e-10, atol=1e-12)
