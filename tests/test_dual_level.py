"""The dual levels of torch.autograd.forward_ad, around losses, gradients, weights and folds."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad_and_value, jvp

import pure_loopgrad as plg
from pure_loopgrad.testing.plain import leaves

f64 = torch.float64
G = torch.Generator().manual_seed(0)
W, V = torch.randn(3, dtype=f64, generator=G), torch.randn(3, dtype=f64, generator=G)
XS = torch.randn(4, 3, dtype=f64, generator=G)


def body(w, x):
    return torch.tanh(w * x)


def loss(w, y):
    return (y * w).square().sum()


def each(w, xs=XS):
    return torch.stack([body(w, x) for x in xs])


def assert_same_duals(f, plain, live=False):
    """Values and tangents, in a dual level, like torch.func.jvp of the plain loop."""
    with forward_ad.dual_level():
        out = leaves(f(forward_ad.make_dual(W.clone().requires_grad_(live), V)))
        pairs = [forward_ad.unpack_dual(t) for t in out]
        found = [p.primal for p in pairs], [p.tangent for p in pairs]
    expected = [leaves(part) for part in jvp(plain, (W,), (V,))]
    torch.testing.assert_close(found, tuple(expected), rtol=1e-10, atol=1e-12)
    return out


REDUCED = {"stack": each, "sum": lambda w: each(w).sum(0), "mean": lambda w: each(w).mean(0)}


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("reduce", REDUCED)
def test_value_and_grad_of_a_loss(reduce, recording, chunk_size):
    f = plg.value_and_grad(body, loss, reduce=reduce, chunk_size=chunk_size)
    plain = grad_and_value(lambda w: loss(w, REDUCED[reduce](w)))
    with torch.set_grad_enabled(recording):
        assert_same_duals(lambda w: f(w, XS)[::-1], plain)


@pytest.mark.parametrize("plan", ["one_pass", "two_pass"])
def test_a_loss_of_one_number(plan):
    f = plg.value_and_grad(lambda w, x: body(w, x).sum(), lambda w, z: z.sin() * w.sum(), reduce="sum", plan=plan)
    assert_same_duals(lambda w: f(w, XS)[::-1], grad_and_value(lambda w: each(w).sum().sin() * w.sum()))


def test_a_live_parameter_keeps_its_tangent_and_loses_its_graph():
    f = plg.value_and_grad(body, loss)
    found = assert_same_duals(lambda w: f(w, XS)[::-1], grad_and_value(lambda w: loss(w, each(w))), live=True)
    assert [t.requires_grad for t in found] == [False, False]


def test_a_jvp_with_grad_mode_off():
    f = plg.value_and_grad(body, loss)
    expected = jvp(grad_and_value(lambda w: loss(w, each(w))), (W,), (V,))
    with torch.no_grad():
        found = jvp(lambda w: f(w, XS)[::-1], (W,), (V,))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


GRAD_WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0], dtype=f64)


def scaled(w, weights=GRAD_WEIGHTS):
    """The plain loop, with its derivatives times the weights."""
    ys, still = each(w), each(w.detach())
    return still + (ys - still) * weights[:, None]


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_grad_weights(chunk_size):
    options = {"grad_weights": GRAD_WEIGHTS, "chunk_size": chunk_size}
    assert_same_duals(lambda w: plg.map(body, w, XS, **options), scaled)
    assert_same_duals(lambda w: plg.sum(body, w, XS, **options), lambda w: scaled(w).sum(0))
    f = plg.value_and_grad(body, loss, **options)
    assert_same_duals(lambda w: f(w, XS)[::-1], grad_and_value(lambda w: loss(w, scaled(w))))


@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_weights_with_a_tangent(chunk_size):
    weights = lambda w: torch.cat([w, w[:1]]).exp()
    assert_same_duals(
        lambda w: plg.mean(body, w, XS, weights=weights(w), chunk_size=chunk_size),
        lambda w: weights(w) @ each(w) / weights(w).sum(),
    )


CAPTURING = {
    "map": lambda w: plg.map(lambda p, x: w * x + p, V, XS),
    "chunks": lambda w: plg.map(lambda p, x: w * x + p, V, XS, chunk_size=3),
    "scan": lambda w: plg.scan(lambda p, c, x: (c * w + x, c), V, V, XS)[1],
    "checkpoint": lambda w: plg.checkpoint(lambda p: w * p)(V),
    "loss": lambda w: plg.value_and_grad(body, lambda p, y: (y * w).sum())(V, XS),
}


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("loop", CAPTURING.values(), ids=CAPTURING)
def test_a_captured_tensor_with_a_tangent_is_refused(loop, recording):
    refused = pytest.raises(plg.errors.CapturedTensorError, match="w ")
    with forward_ad.dual_level(), torch.set_grad_enabled(recording), refused:
        loop(forward_ad.make_dual(W, V))


FOLDS = {
    "mean": (plg.folds.mean(), lambda g: g.mean(0)),
    "variance": (plg.folds.variance(), lambda g: g.var(0)),
    "norms": (plg.folds.norms(), lambda g: g.norm(dim=-1)),
    "cosine_to_mean": (plg.folds.cosine_to_mean(), lambda g: torch.cosine_similarity(g, g.mean(0), dim=-1)),
}


def folded(name, chunk_size):
    """The fold, and what it is of all gradients, as functions of w."""
    fold, of = FOLDS[name]

    def scalar(w, x):
        return body(w, x).prod()

    return (
        lambda w: plg.fold_grads(scalar, w, XS, [fold], chunk_size=chunk_size)[0],
        lambda w: of(torch.stack([torch.func.grad(scalar)(w, x) for x in XS])),
    )


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize("name", FOLDS)
def test_folds(name, chunk_size, recording):
    with torch.set_grad_enabled(recording):
        assert_same_duals(*folded(name, chunk_size))


@pytest.mark.parametrize("name", FOLDS)
def test_folds_linearized(name):
    f, plain = folded(name, 3)
    push = torch.func.linearize(f, W)[1]
    torch.testing.assert_close(push(V), jvp(plain, (W,), (V,))[1], rtol=1e-10, atol=1e-12)
