"""Bodies that take a gradient of their own by x.requires_grad_() and torch.autograd.grad, differentiated once more."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import functional

import pure_loopgrad as plg
from pure_loopgrad.errors import LoopValueError
from pure_loopgrad.testing import assert_close

XS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
W = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def energy(w, x):
    return (w * x).sin().sum() + (w * x.square()).sum().cos()


def force(w, x):
    """Two gradients, each from a leaf of its own."""
    first = x.detach().requires_grad_()
    second = (2 * x.detach()).requires_grad_()
    (a,) = torch.autograd.grad(energy(w, first), first, create_graph=True)
    (b,) = torch.autograd.grad(energy(w, second), second, create_graph=True)
    return a * b


def force_by_func(w, x):
    """The same as torch.func can differentiate it."""
    x = x.detach()
    slope = torch.func.grad(energy, argnums=1)
    return slope(w, x) * slope(w, 2 * x)


def by_map(body, w):
    return plg.map(body, w, XS)


def by_scan(body, w):
    return plg.scan(lambda w, c, x: (c + body(w, x), c * body(w, x)), w, torch.ones_like(XS[0]), XS)[1]


def plain(loop, body, w):
    if loop is by_map:
        return torch.stack([body(w, x) for x in XS])
    c, ys = torch.ones_like(XS[0]), []
    for x in XS:
        ys.append(c * body(w, x))
        c = c + body(w, x)
    return torch.stack(ys)


@pytest.mark.parametrize("loop", [by_map, by_scan])
def test_backward_of_a_gradient(loop):
    def twice(run):
        w = W.clone().requires_grad_()
        (g,) = torch.autograd.grad(run(force, w).square().sum(), w, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)

    assert_close(twice(loop), twice(lambda body, w: plain(loop, body, w)))


@pytest.mark.parametrize("transform", ["grad", "jacfwd", "hessian", "jacfwd of jacfwd", "grad of jacfwd", "third"])
@pytest.mark.parametrize("loop", [by_map, by_scan])
def test_transforms(loop, transform):
    f = torch.func
    apply = {
        "grad": f.grad,
        "jacfwd": f.jacfwd,
        "hessian": f.hessian,
        "jacfwd of jacfwd": lambda fn: f.jacfwd(f.jacfwd(fn)),
        "grad of jacfwd": lambda fn: f.jacrev(f.jacfwd(fn)),
        "third": lambda fn: f.jacrev(f.jacrev(f.grad(fn))),
    }[transform]
    found = apply(lambda w: loop(force, w).square().sum())(W)
    assert_close(found, apply(lambda w: plain(loop, force_by_func, w).square().sum())(W))


@pytest.mark.parametrize("how", ["a chunk", "nothing watched"])
def test_the_remedy_is_named_where_it_cannot_be(how):
    def run(w):
        options = {"chunk_size": 2} if how == "a chunk" else {"run": plg.Run(check="off")}
        return plg.map(force, w, XS, **options).square().sum()

    with pytest.raises(RuntimeError, match=r"requires_grad_\(\)|does not require grad") as caught:
        torch.func.jvp(run, (W,), (W,))
    assert "torch.func.grad" in "".join(getattr(caught.value, "__notes__", ["torch.func.grad"]))


def rows(w, x):
    return torch.tanh(w * x).cumsum(0)


V = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
OF_X = {
    "jacobian": lambda w, x: functional.jacobian(lambda z: rows(w, z), x, create_graph=True),
    "hessian": lambda w, x: functional.hessian(lambda z: energy(w, z), x, create_graph=True),
    "vjp": lambda w, x: functional.vjp(lambda z: rows(w, z), x, V, create_graph=True)[1],
    "jvp": lambda w, x: functional.jvp(lambda z: rows(w, z), x, V, create_graph=True)[1],
    "hvp": lambda w, x: functional.hvp(lambda z: energy(w, z), x, V, create_graph=True)[1],
}


def of_params(w, x):
    return functional.jacobian(lambda v: rows(v, x), w, create_graph=True)


def in_one_batch(w, x):
    return functional.jacobian(lambda z: rows(w, z), x, create_graph=True, vectorize=True)


def summed(body):
    return lambda w, x: body(w, x).reshape(-1, 3).sum(0)


def first(run):
    w = W.clone().requires_grad_()
    return torch.autograd.grad(run(w).square().sum(), w)


def second(run):
    w = W.clone().requires_grad_()
    (g,) = torch.autograd.grad(run(w).square().sum(), w, create_graph=True)
    return torch.autograd.grad(g.square().sum(), w)


def whole(run):
    return torch.func.hessian(lambda w: run(w).square().sum())(W)


def tangents(run):
    return torch.func.jacfwd(run)(W)


@pytest.mark.parametrize("derivative", [first, second])
@pytest.mark.parametrize("loop", [by_map, by_scan])
@pytest.mark.parametrize("body", [*OF_X.values(), of_params], ids=[*OF_X, "of params"])
def test_functions_of_torch_autograd_functional(body, loop, derivative):
    body = summed(body)
    assert_close(derivative(lambda w: loop(body, w)), derivative(lambda w: plain(loop, body, w)))


@pytest.mark.parametrize("loop", [by_map, by_scan])
@pytest.mark.parametrize("body", OF_X.values(), ids=OF_X)
def test_they_do_not_stand_in_the_way_of_forward_mode(body, loop):
    """The plain loop by autograd alone, as torch refuses them in its transforms."""
    body = summed(body)
    expected = functional.hessian(lambda w: plain(loop, body, w).square().sum(), W)
    assert_close(whole(lambda w: loop(body, w)), expected)


@pytest.mark.parametrize("loop", [by_map, by_scan])
@pytest.mark.parametrize("derivative", [tangents, whole])
def test_what_has_a_tangent_is_not_detached(derivative, loop):
    with pytest.raises(LoopValueError, match="makes a leaf of a detached tensor"):
        derivative(lambda w: loop(summed(of_params), w))


@pytest.mark.parametrize("loop", [by_map, by_scan])
@pytest.mark.parametrize("derivative", [second, tangents, whole])
def test_batches_inside_the_body_are_refused_under_transforms(derivative, loop):
    body = summed(in_one_batch)
    assert_close(first(lambda w: loop(body, w)), first(lambda w: plain(loop, body, w)))
    with pytest.raises(LoopValueError, match="a batch of gradients"):
        derivative(lambda w: loop(body, w))


@pytest.mark.parametrize("body", [*OF_X.values(), of_params, in_one_batch], ids=[*OF_X, "of params", "in one batch"])
@pytest.mark.parametrize("check", ["first", "off"])
def test_vmapped_chunks_are_refused(body, check):
    """Their leaves are none, and torch.autograd.functional would take that for a derivative of zero."""
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\)"):
        plg.map(body, W, XS, chunk_size=2, run=plg.Run(check=check))


def test_a_vmap_around_the_loop():
    def over_rows(loop):
        return torch.vmap(loop)(torch.stack([W, 2 * W]))

    with pytest.raises(RuntimeError, match=r"requires_grad_\(\)"):
        over_rows(lambda w: by_map(force, w))
    with pytest.raises(RuntimeError, match=r"requires_grad_\(\)"):
        over_rows(lambda w: by_map(OF_X["jacobian"], w))
