"""A body that keeps what it has computed: right in a plain loop, without a gradient in a recomputation, so refused."""

from __future__ import annotations

import weakref

import pytest
import torch

import pure_loopgrad as plg

G = torch.Generator().manual_seed(0)
XS = torch.randn(4, 3, generator=G, dtype=torch.float64)
W = torch.randn(3, generator=G, dtype=torch.float64)


def once(cache, key, make):
    if key not in cache:
        cache[key] = make()
    return cache[key]


def of_a_parameter(cache):
    return lambda p, x: once(cache, "k", lambda: torch.exp(p)) * x


def of_a_parameter_in_place(cache):
    def body(p, x):
        def make():
            table = torch.zeros(2, 3, dtype=torch.float64)
            table[0] = p
            return table.add_(1)

        return once(cache, "k", make)[0] * x

    return body


def of_the_whole_output(cache):
    return lambda p, x: once(cache, "k", lambda: torch.exp(p) * x)


REFUSED = [of_a_parameter, of_a_parameter_in_place, of_the_whole_output]


def mask(cache):
    return lambda p, x: once(cache, "k", lambda: torch.ones_like(p) + torch.arange(3).to(x)) * torch.exp(p) * x


def detached(cache):
    return lambda p, x: once(cache, "k", lambda: torch.exp(p).detach()) * p * x


def without_grad(cache):
    def body(p, x):
        with torch.no_grad():
            scale = once(cache, "k", lambda: torch.exp(p))
        return scale * p * x

    return body


def comparison(cache):
    return lambda p, x: once(cache, "k", lambda: (p > 0).double()) * p * x


def of_an_x_without_gradient(cache):
    return lambda p, x: once(cache, "k", lambda: torch.tanh(x)) * p * x


def workspace(cache):
    """Written anew each time."""

    def body(p, x):
        return once(cache, "k", lambda: torch.zeros(3, dtype=torch.float64)).copy_(p * x) * p

    return body


def looked_at_from_outside(cache):
    def body(p, x):
        cache["last"] = p * x
        return cache["last"] * p

    return body


WELCOME = [mask, detached, without_grad, comparison, of_an_x_without_gradient, workspace, looked_at_from_outside]

LOOPS = {
    "map": lambda body, p, xs: plg.map(body, p, xs),
    "chunks": lambda body, p, xs: plg.sum(body, p, xs, chunk_size=2),
    "batched": lambda body, p, xs: plg.map(body, p, xs, chunk_size=1, batched=True),
    "checkpoint": lambda body, p, xs: torch.stack([plg.checkpoint(body)(p, xs[0]), p]),
    "scan": lambda body, p, xs: plg.scan(lambda p, c, x: (c + body(p, x), None), p, torch.zeros_like(p), xs)[0],
    "in a transform": lambda body, p, xs: torch.func.grad(lambda q: plg.map(body, q, xs).square().sum())(p),
    "value_and_grad": lambda body, p, xs: plg.value_and_grad(body, lambda p, ys: ys.square().sum())(p, xs)[1] * p,
}


def gradient(loop, body, n):
    p = W.clone().requires_grad_()
    loop(body, p, XS[:n]).square().sum().backward()
    return p.grad


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_was_computed_from_a_parameter_is_refused(loop, kind, n):
    with pytest.raises(plg.errors.ImpureBodyError, match=r"cache\['k'\] \(shape .* and kept: it would get no gradient"):
        gradient(LOOPS[loop], kind({}), n)


@pytest.mark.parametrize("kind", WELCOME)
@pytest.mark.parametrize("loop", ["map", "checkpoint", "scan"])
def test_constants_may_be_kept(loop, kind):
    plain = {
        "map": lambda body, p, xs: torch.stack([body(p, x) for x in xs]),
        "checkpoint": lambda body, p, xs: torch.stack([body(p, xs[0]), p]),
        "scan": lambda body, p, xs: sum(body(p, x) for x in xs),
    }[loop]
    # a plain loop would write into what its graph needs
    oracle = (lambda p, x: p * x * p) if kind is workspace else kind({})
    ref = gradient(plain, oracle, 4)
    torch.testing.assert_close(gradient(LOOPS[loop], kind({}), 4), ref, rtol=1e-12, atol=0)


def test_what_is_kept_of_x_is_refused_where_x_has_a_gradient():
    xs = XS.clone().requires_grad_()
    ys = plg.map(of_an_x_without_gradient({}), W, xs)
    with pytest.raises(plg.errors.ImpureBodyError, match="kept"):
        ys.sum().backward()


def test_nothing_is_kept_alive():
    """The notes about the first pass hold no tensor."""
    made = []

    def body(p, x):
        h = torch.exp(p)
        made.append(weakref.ref(h))
        return h * x

    ys = plg.map(body, W.clone().requires_grad_(), XS)
    assert [ref() for ref in made] == [None] * len(XS)
    ys.sum().backward()
