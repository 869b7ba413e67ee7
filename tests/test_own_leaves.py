"""Bodies that take a gradient of their own by x.requires_grad_() and torch.autograd.grad, differentiated once more."""

from __future__ import annotations

import pytest
import torch

import pure_loopgrad as plg
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
