"""Loops inside torch.func.linearize and make_fx, which record the operations of a loop into a graph."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jvp, linearize

import pure_loopgrad as plg

f64 = torch.float64
G = torch.Generator().manual_seed(0)
W, V = torch.randn(3, dtype=f64, generator=G), torch.randn(3, dtype=f64, generator=G)
XS = torch.randn(4, 3, dtype=f64, generator=G)

pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # from torch's own folding


def body(w, x):
    return torch.tanh(w * x)


def step(w, c, x):
    return torch.tanh(c + x), body(w, x) * c


def each(w, xs=XS):
    return torch.stack([body(w, x) for x in xs])


def steps(w):
    c, ys = w, []
    for x in XS.flip(0):
        c, y = step(w, c, x)
        ys.append(y)
    return torch.stack(ys[::-1])


WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=f64)


def scaled(w):
    """The plain loop, with its derivatives times the weights."""
    ys, still = each(w), each(w.detach())
    return still + (ys - still) * WEIGHTS[:, None]


def weighted(w, weights):
    return weights @ each(w) / weights.sum()


def exponentials(w):
    return torch.cat([w, w[:1]]).exp()


# each with the plain loop that it is
LOOPS = {
    "map": (lambda w: plg.map(body, w, XS), each),
    "map of one": (lambda w: plg.map(body, w, XS[:1]), lambda w: each(w, XS[:1])),
    "chunks": (lambda w: plg.map(body, w, XS, chunk_size=3), each),
    "one chunk": (lambda w: plg.map(body, w, XS, chunk_size=None), each),
    "sum": (lambda w: plg.sum(body, w, XS), lambda w: each(w).sum(0)),
    "scan": (lambda w: plg.scan(step, w, w, XS, reverse=True, checkpoints=2)[1], steps),
    "checkpoint": (lambda w: plg.checkpoint(each)(w), each),
    "nested": (
        lambda w: plg.map(lambda w, x: plg.map(body, w, x * XS), w, XS),
        lambda w: torch.stack([each(w, x * XS) for x in XS]),
    ),
    "scaled": (lambda w: plg.map(body, w, XS, grad_weights=WEIGHTS), scaled),
    "scaled chunks": (lambda w: plg.sum(body, w, XS, grad_weights=WEIGHTS, chunk_size=3), lambda w: scaled(w).sum(0)),
    "weighted": (lambda w: plg.mean(body, w, XS, weights=WEIGHTS), lambda w: weighted(w, WEIGHTS)),
    "by numbers": (
        lambda w: plg.mean(body, w, XS, weights=WEIGHTS.tolist(), chunk_size=3),
        lambda w: weighted(w, WEIGHTS),
    ),
    "by exponentials": (
        lambda w: plg.mean(body, w, XS, weights=exponentials(w)),
        lambda w: weighted(w, exponentials(w)),
    ),
}
AROUND = {
    "alone": lambda f: f,
    "then": lambda f: lambda w: f(w).square().sum() * w,
    "gradient": lambda f: grad(lambda w: (f(w).square().sum() * w).sum()),
}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def assert_linearized(f, plain):
    """Like torch.func.jvp of the plain loop, along more than one tangent."""
    primal, push = linearize(f, W)
    for v in (V, V.sin()):
        assert_same((primal, push(v)), jvp(plain, (W,), (v,)))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize(("loop", "plain"), LOOPS.values(), ids=LOOPS)
def test_linearize(loop, plain, around):
    assert_linearized(around(loop), around(plain))


@pytest.mark.parametrize("reduce", ["stack", "sum"])
def test_linearize_a_gradient(reduce):
    loss = lambda w, y: (y * w).square().sum()
    f = plg.value_and_grad(body, loss, reduce=reduce, chunk_size=3)
    plain = torch.func.grad_and_value(lambda w: loss(w, each(w) if reduce == "stack" else each(w).sum(0)))
    assert_linearized(lambda w: f(w, XS)[::-1], plain)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_random_numbers_that_a_graph_cannot_replay_are_refused(around):
    noisy = lambda w: plg.map(lambda w, x: body(w, x) * torch.rand(3, dtype=f64), w, XS)
    with pytest.raises(plg.errors.LoopValueError, match=r"torch\.func\.jvp"):
        linearize(around(noisy), W)
