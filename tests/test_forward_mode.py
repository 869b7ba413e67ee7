"""Forward mode runs a body once for its outputs and their tangents, and says the same as the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jvp, vjp, vmap

import pure_loopgrad as plg
from pure_loopgrad._levels import active_levels
from pure_loopgrad.testing import count_calls, plain_map
from pure_loopgrad.testing.plain import leaves

f64 = torch.float64
N = 5
G = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, dtype=f64, generator=G)
V = torch.randn(3, 3, dtype=f64, generator=G)
XS = torch.randn(N, 3, dtype=f64, generator=G)


def body(w, x):
    return torch.tanh(w @ x)


def plain(fn):
    return lambda w, xs: plain_map(fn, w, xs)


def looped(fn, **options):
    return lambda w, xs: plg.map(fn, w, xs, **options)


def assert_same(found, expected):
    """Entry by entry, which is stricter than `plg.testing.assert_close`."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def along(f):
    return lambda w: jvp(f, (w,), (V,))[1]


# the calls that an iteration takes: a gradient's second pass takes one more
STACKS = {
    "jvp": (lambda f: jvp(f, (W,), (V,)), 1),
    "jvp of jvp": (lambda f: jvp(along(f), (W,), (W.cos(),)), 1),
    "jvp of grad": (lambda f: jvp(grad(f), (W,), (V,)), 2),
    "jvp of vjp": (lambda f: jvp(lambda w: vjp(f, w)[1](W.sum())[0], (W,), (V,)), 2),
    "grad of jvp": (lambda f: grad(along(f))(W), 2),
}


@pytest.mark.parametrize("name", STACKS)
def test_one_pass_for_outputs_and_tangents(name):
    stack, calls = STACKS[name]
    counted = count_calls(body)
    found = stack(lambda w: looped(counted)(w, XS).square().sum())
    assert_same(found, stack(lambda w: plain(body)(w, XS).square().sum()))
    assert counted.calls == calls * N


@pytest.mark.parametrize("name", STACKS)
def test_no_iterations(name):
    found = leaves(STACKS[name][0](lambda w: looped(body)(w, XS[:0]).square().sum()))
    assert found
    assert all(t.eq(0).all() for t in found)


@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_outputs_without_a_derivative(chunk_size):
    def mixed(w, x):
        y = w @ x
        return {"rank": y.argsort(), "y": y.sin(), "positive": y > 0}

    def loss(f):
        return lambda w: (lambda out: (out["y"] * out["rank"]).square().sum())(f(w))

    ours = lambda w: plg.map(mixed, w, XS, chunk_size=chunk_size)
    each = lambda w: plain_map(mixed, w, XS)
    found, expected = jvp(ours, (W,), (V,)), jvp(each, (W,), (V,))
    assert_same(found[0], expected[0])
    assert_same(found[1]["y"], expected[1]["y"])
    assert_same(jvp(grad(loss(ours)), (W,), (V,)), jvp(grad(loss(each)), (W,), (V,)))
    summed = jvp(lambda w: plg.sum(mixed, w, XS, chunk_size=chunk_size), (W,), (V,))
    assert_same(
        summed[0], {k: v.to(torch.int64).sum(0) if k == "positive" else v.sum(0) for k, v in expected[0].items()}
    )
    assert_same(summed[1]["y"], expected[1]["y"].sum(0))


@pytest.mark.parametrize(
    "stack",
    [
        lambda f: jvp(vmap(f, (None, 0)), (W, torch.stack([XS, XS.cos()])), (V, torch.ones(2, N, 3, dtype=f64))),
        lambda f: jvp(lambda w: vmap(grad(lambda w, xs: f(w, xs).sum()), (None, 0))(w, XS[None]), (W,), (V,)),
        lambda f: vmap(lambda v: jvp(grad(lambda w: f(w, XS).square().sum()), (W,), (v,))[1])(torch.stack([V, W])),
        lambda f: jacfwd(lambda w: f(w, XS))(W),
        lambda f: hessian(lambda w: f(w, XS).square().sum())(W),
        lambda f: jvp(grad(grad(lambda w: f(w * torch.ones_like(W), XS).square().sum())), (W[0, 0],), (V[0, 0],)),
        lambda f: jvp(lambda xs: f(W, xs), (XS,), (XS.sin(),)),
        lambda f: jvp(lambda w: f(w, XS) + f(W, XS), (W,), (V,)),
    ],
    ids=["jvp vmap", "jvp vmap grad", "vmap jvp grad", "jacfwd", "hessian", "jvp grad grad", "of xs", "one of two"],
)
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_with_batches(stack, chunk_size):
    assert_same(stack(looped(body, chunk_size=chunk_size)), stack(plain(body)))


def test_a_live_parameter_under_jvp():
    """The gradient of a tangent, by .backward() around torch.func.jvp."""
    grads = []
    for loop in (looped(body), plain(body)):
        w = W.clone().requires_grad_()
        jvp(lambda w, loop=loop: loop(w, XS).square().sum(), (w,), (V,))[1].backward()
        grads.append(w.grad)
    assert_same(*grads)


def test_random_bodies_draw_once():
    def noisy(w, x):
        return torch.tanh(w @ x) * torch.rand(3, dtype=f64)

    results = []
    for loop in (looped(noisy), plain(noisy)):
        torch.manual_seed(0)
        results.append((jvp(grad(lambda w, loop=loop: loop(w, XS).square().sum()), (W,), (V,)), torch.rand(2)))
    assert_same(*results)


def test_jacfwd_keeps_one_copy_of_the_outputs():
    """The batch of tangents shares its primals, so their pass is apart, with no transform around the body."""
    levels = []

    def seen(w, x):
        levels.append(active_levels())
        return body(w, x)

    jacfwd(lambda w: plg.map(seen, w, XS))(W)
    assert levels[:N] == [0] * N
    assert len(levels) == 2 * N


LOOPS = {
    "map": lambda w: plg.map(body, w, XS),
    "chunks": lambda w: plg.map(body, w, XS, chunk_size=2),
    "weighted": lambda w: plg.mean(body, w, XS, weights=torch.arange(1.0, N + 1)),
    "scan": lambda w: plg.scan(lambda w, c, x: (torch.tanh(w @ c + x), c * x), w, XS[0], XS)[1],
    "checkpoint": lambda w: plg.checkpoint(lambda w: body(w, XS[0]))(w),
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_in_a_dual_level_of_ordinary_autograd(loop):
    with torch.autograd.forward_ad.dual_level():
        primal, tangent = torch.autograd.forward_ad.unpack_dual(loop(torch.autograd.forward_ad.make_dual(W, V)))
    expected = jvp(loop, (W,), (V,))
    assert_same(primal, expected[0])
    assert_same(tangent, expected[1])
    live = W.clone().requires_grad_()
    assert torch.autograd.gradcheck(loop, live, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loop, live, check_fwd_over_rev=True)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # from torch's own folding of constants
@pytest.mark.parametrize("name", ["map", "chunks", "scan", "checkpoint"])
def test_linearize(name):
    primal, push = torch.func.linearize(LOOPS[name], W)
    for v in (V, V.sin()):
        assert_same((primal, push(v)), jvp(LOOPS[name], (W,), (v,)))
