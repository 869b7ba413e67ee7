"""grad_weights: scales an iteration's derivative and nothing else; zero runs none. subsample: unbiased ones."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close, loops, losses, transform_stacks
from pure_loopgrad.testing import plain as oracle
from tests.test_properties import assert_same_under_transforms

N = 6
W = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
XS = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FACTORS = st.sampled_from([0.0, 0.0, 1.0, 2.5, -1.0])


def body(w, x):
    return torch.tanh(w * x)


def scaled(body, factors):
    """The plain loop's body with a factor on each derivative."""
    calls = iter(())

    def run(params, x):
        y = body(params, x)
        f = next(calls)
        one = lambda t: f * t + (1 - f) * t.detach() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        return oracle.tree_map(one, y)

    def loop(reduce):
        def whole(params, xs):
            nonlocal calls
            calls = itertools.cycle(factors)
            return reduce(run, params, xs)

        return whole

    return loop


@given(loops(sizes=st.sampled_from([1, 2, 3, 5])), losses(), transform_stacks(), st.data())
def test_equals_the_plain_loop(case, loss, stack, data):
    factors = data.draw(st.lists(FACTORS, min_size=case.n, max_size=case.n))
    plain = scaled(case.body, factors)
    loops = (plg.map, oracle.plain_map), (plg.sum, oracle.plain_sum), (plg.mean, oracle.plain_mean)
    ours, reduce = data.draw(st.sampled_from(loops))
    run = lambda p, x: ours(case.body, p, x, grad_weights=factors, chunk_size=case.chunk_size)
    assert_same_under_transforms(run, plain(reduce), case, loss, stack)


@pytest.mark.parametrize("mask", [[True, False, False, True, False, False], [False] * 6, [True] * 6])
@pytest.mark.parametrize("loop", [plg.map, plg.sum, plg.mean])
def test_the_rest_is_detached_and_not_run(loop, mask):
    """n F + k (F + B): n calls of the body forward, k in the backward."""
    calls = []

    def counted(w, x):
        calls.append(0)
        return body(w, x)

    w, ref = W.clone().requires_grad_(), W.clone().requires_grad_()
    ys = loop(counted, w, XS, grad_weights=torch.tensor(mask))
    assert len(calls) == N
    torch.logsumexp(ys.flatten(), 0).backward()
    assert len(calls) == N + sum(mask)
    plain = torch.stack([body(ref if m else ref.detach(), x) for m, x in zip(mask, XS, strict=True)])
    reduced = {plg.map: plain, plg.sum: plain.sum(0), plg.mean: plain.mean(0)}[loop]
    assert_close(ys.detach(), reduced.detach())
    torch.logsumexp(reduced.flatten(), 0).backward() if any(mask) else None
    assert_close(w.grad, ref.grad if any(mask) else torch.zeros_like(W))


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
@pytest.mark.parametrize("reduce", ["stack", "sum", "mean"])
def test_gradient_transforms(reduce, chunk_size):
    factors = [2.0, 0.0, 0.0, 0.0, 1.0, 3.0]
    fold = {"stack": lambda y: y, "sum": lambda y: y.sum(0), "mean": lambda y: y.mean(0)}[reduce]
    w = W.clone().requires_grad_()
    f = torch.tensor(factors, dtype=torch.float64)[:, None]
    y = torch.stack([body(w, x) for x in XS])
    loss = fold(f * y + (1 - f) * y.detach()).square().sum()
    loss.backward()
    options = {"reduce": reduce, "grad_weights": factors, "chunk_size": chunk_size}
    value, grad = plg.value_and_grad(body, lambda w, y: y.square().sum(), **options)(W, XS)
    assert_close((value, grad), (loss.detach(), w.grad))
    ys, pullback = plg.vjp(body, W, XS, **options)
    dw, dxs = pullback(2 * ys)
    assert_close(dw, w.grad)
    assert torch.equal(dxs[1:4].abs().sum(1) == 0, torch.ones(3, dtype=torch.bool))


def test_beside_weights_of_a_mean():
    weights, factors = [1.0, 0.0, 2.0, 1.0, 3.0, 0.0], [0.0, 1.0, 2.0, 1.0, 0.0, 1.0]
    w = W.clone().requires_grad_()
    a, f = (torch.tensor(v, dtype=torch.float64)[:, None] for v in (weights, factors))
    y = torch.stack([body(w, x) for x in XS])
    (((f * y + (1 - f) * y.detach()) * a).sum(0) / a.sum()).square().sum().backward()
    v = W.clone().requires_grad_()
    plg.mean(body, v, XS, weights=weights, grad_weights=factors).square().sum().backward()
    assert_close(v.grad, w.grad)


def test_an_infinite_output_without_a_derivative():
    """Its value stays, its gradient is zero, not NaN, as no vjp is run."""
    w = W.clone().requires_grad_()
    ys = plg.map(lambda w, x: w / x, w, torch.tensor([[1.0], [0.0], [1.0]]).double(), grad_weights=[1, 0, 1])
    assert torch.isinf(ys[1]).all()
    torch.where(torch.isfinite(ys), ys, 0).sum().backward()
    assert_close(w.grad, torch.full_like(W, 2.0))


@pytest.mark.parametrize(("given_", "text"), [([1, 0], r"shape \(2,\), but xs has 6"), (torch.ones(6, 1), r"\(6, 1\)")])
def test_what_is_refused(given_, text):
    with pytest.raises(ValueError, match=text):
        plg.map(body, W, XS, grad_weights=given_)


def test_dropout_is_replayed_where_iterations_are_left_out():
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    drop = lambda w, x: torch.nn.functional.dropout(w * x, 0.5)
    ys = plg.map(drop, w, XS, grad_weights=[0, 0, 1, 0, 1, 1])
    ys.sum().backward()
    assert_close(w.grad, ys.detach()[[2, 4, 5]].sum(0))


def gradient(weights):
    w = W.clone().requires_grad_()
    torch.logsumexp(plg.map(body, w, XS, grad_weights=weights).flatten(), 0).backward()
    return w.grad


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_mean_over_all_subsets_is_the_full_gradient(k):
    """And their variance is what the formula says: n^2 (1 - k/n) S^2 / k."""
    full, grads = gradient(None), []
    for subset in itertools.combinations(range(N), k):
        weights = torch.zeros(N, dtype=torch.float64)
        weights[list(subset)] = N / k
        grads.append(gradient(weights))
    assert len(grads) == math.comb(N, k)
    assert_close(torch.stack(grads).mean(0), full, rtol=1e-12)
    terms = torch.stack([gradient(torch.eye(N, dtype=torch.float64)[i]) for i in range(N)])
    spread = (terms - terms.mean(0)).square().sum() / (N - 1)
    found = (torch.stack(grads) - full).square().sum(1).mean()
    assert_close(found, N**2 * (1 - k / N) * spread / k)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_uniform_draws_each_subset(k):
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(400):
        weights = plg.subsample(N, k, generator=generator)
        chosen = tuple(weights.nonzero().flatten().tolist())
        assert len(chosen) == k
        assert torch.equal(weights[list(chosen)], torch.full((k,), N / k, dtype=torch.float64))
        seen.add(chosen)
    assert len(seen) == math.comb(N, k)


@pytest.mark.parametrize("scheme", ["uniform", "stratified", "importance"])
@pytest.mark.parametrize(("n", "k"), [(6, 2), (7, 3), (5, 5), (10, 1)])
def test_expectation_is_one(scheme, n, k):
    """Within five standard errors over 4,000 draws."""
    generator = torch.Generator().manual_seed(1)
    scores = {"scores": torch.arange(1.0, n + 1)} if scheme == "importance" else {}
    draws = torch.stack([plg.subsample(n, k, generator=generator, scheme=scheme, **scores) for _ in range(4000)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - 1).abs() <= 5 * error + 1e-12).all()
    assert ((draws > 0).sum(1) <= k).all()


def test_stratified_takes_one_of_each_stretch():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        weights = plg.subsample(7, 3, generator=generator, scheme="stratified")
        assert [int((part > 0).sum()) for part in weights.split([2, 2, 3])] == [1, 1, 1]
        assert weights.sum() == 7


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n": 3, "k": 4}, ValueError),
        ({"n": 3, "k": 0}, ValueError),
        ({"n": 3.0, "k": 1}, TypeError),
        ({"n": 3, "k": 1, "scheme": "odd"}, ValueError),
        ({"n": 3, "k": 1, "scheme": "importance"}, ValueError),
        ({"n": 3, "k": 1, "scores": [1, 1, 1]}, ValueError),
        ({"n": 3, "k": 1, "scheme": "importance", "scores": [1, 0, 1]}, ValueError),
    ],
)
def test_bad_draws(arguments, error):
    with pytest.raises(error) as caught:
        plg.subsample(**arguments)
    assert isinstance(caught.value, plg.LoopGradError)
