"""Run(save=...): graphs of the last chunks are kept up to a number of bytes, and these are not run again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pure_loopgrad as plg
from pure_loopgrad._counting import LiveBytes
from pure_loopgrad.errors import CapturedTensorError, LoopValueError
from pure_loopgrad.testing import assert_close, peak_bytes

G = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, generator=G, dtype=torch.float64)
XS = torch.randn(7, 3, generator=G, dtype=torch.float64)
P = {"W": W, "b": XS[0].clone()}
POLICIES = ["nothing", 0, 100, 400, 1000, "everything"]


def body(p, x):
    return torch.tanh(p["W"] @ x + p["b"])


def square(_, y):
    return y.square().sum()


class Counted:
    def __init__(self, fn=body):
        self.fn, self.calls = fn, 0

    def __call__(self, p, x):
        self.calls += 1
        return self.fn(p, x)


def plain(reduce, p, xs):
    ys = torch.stack([body(p, x) for x in xs])
    return ys if reduce == "stack" else ys.sum(0) if reduce == "sum" else ys.mean(0)


def reference(reduce):
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    xs = XS.clone().requires_grad_()
    value = square(None, plain(reduce, live, xs))
    return value.detach(), torch.autograd.grad(value, [*live.values(), xs])


@given(
    st.sampled_from(POLICIES),
    st.sampled_from(["stack", "sum", "mean"]),
    st.sampled_from([1, 2, 3, 7, 9]),
    st.sampled_from(["backward", "value_and_grad", "vjp"]),
)
def test_equal_to_the_full_graph(save, reduce, chunk_size, way):
    run = plg.Run(save=save)
    value, ref = reference(reduce)
    if way == "backward":
        live, xs = {k: t.clone().requires_grad_() for k, t in P.items()}, XS.clone().requires_grad_()
        ys = {"stack": plg.map, "sum": plg.sum, "mean": plg.mean}[reduce](
            body, live, xs, chunk_size=chunk_size, run=run
        )
        found = square(None, ys)
        grads = torch.autograd.grad(found, [*live.values(), xs])
    elif way == "value_and_grad":
        f = plg.value_and_grad(body, square, reduce=reduce, argnums=(0, 1), chunk_size=chunk_size, run=run)
        found, (dp, dxs) = f(P, XS)
        grads = [*dp.values(), dxs]
    else:
        ys, pullback = plg.vjp(body, P, XS, reduce=reduce, chunk_size=chunk_size, run=run)
        found = square(None, ys)
        dp, dxs = pullback(2 * ys)
        assert_close(pullback(2 * ys), (dp, dxs))  # a graph is used once, then the chunk is run again
        grads = [*dp.values(), dxs]
    assert_close((found.detach(), list(grads)), (value, list(ref)))


@pytest.mark.parametrize("reduce", ["stack", "sum"])
def test_the_last_chunks_that_fit_are_not_run_again(reduce):
    """From 2n calls of the body down to n, one by one as bytes are given."""
    calls = {}
    one = _bytes_of_one()
    for k in range(8):
        counted = Counted()
        run = plg.Run(save=k * one)
        plg.value_and_grad(counted, square, reduce=reduce, run=run)(P, XS)
        calls[k] = counted.calls
    # a sum whose first chunk is run to see whether one pass pays is not recorded
    least = 7 if reduce == "stack" else 8
    assert calls == {k: max(14 - k, least) for k in range(8)}


def _bytes_of_one():
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    with LiveBytes() as mode:
        y = body(live, XS[0])
        return mode.now + 0 * y.numel()


def test_the_peak_grows_by_what_is_saved_and_no_more():
    """A deep body on 16 iterations, in steps of its own residuals."""
    deep = lambda w, x: torch.tanh(w * torch.tanh(w * torch.tanh(w * x))).sum()
    w, xs = torch.ones(20_000, dtype=torch.float64), torch.randn(16, 20_000, generator=G, dtype=torch.float64)

    def peak(save):
        f = plg.value_and_grad(deep, lambda w, y: y.square().sum(), run=plg.Run(save=save, check="off"))
        return peak_bytes(lambda: f(w, xs))

    nothing = peak("nothing")
    for save in (10**6, 3 * 10**6, 6 * 10**6):
        assert nothing + save / 2 < peak(save) <= nothing + save
    assert peak("everything") > nothing + 6 * 10**6


def test_a_saved_graph_is_freed_by_the_backward_that_uses_it():
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    with LiveBytes() as mode:
        loss = square(None, plg.map(body, live, XS, run=plg.Run(save="everything")))
        kept = mode.now
        loss.backward()
    assert mode.now < kept


def test_backward_twice_runs_again():
    counted = Counted()
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    loss = square(None, plg.map(counted, live, XS, run=plg.Run(save="everything")))
    first = torch.autograd.grad(loss, list(live.values()), retain_graph=True)
    assert counted.calls == 7
    assert_close(torch.autograd.grad(loss, list(live.values())), first)
    assert counted.calls == 14


def test_a_backward_that_is_differentiated_again():
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    results = []
    for f in (lambda p: plg.map(body, p, XS, run=plg.Run(save="everything")), lambda p: plain("stack", p, XS)):
        g = torch.autograd.grad(square(None, f(live)), live["W"], create_graph=True)[0]
        results.append(torch.autograd.grad(g.square().sum(), list(live.values())))
    assert_close(*results)


def test_the_gradient_of_some_leaves_only():
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    counted = Counted()
    loss = square(None, plg.map(counted, live, XS, run=plg.Run(save="everything")))
    ref = torch.autograd.grad(square(None, plain("stack", live, XS)), live["b"])
    assert_close(torch.autograd.grad(loss, live["b"]), ref)
    assert counted.calls == 7


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.hessian])
def test_under_a_transform_nothing_is_kept_and_all_is_right(transform):
    f = lambda b: square(None, plg.map(body, {**P, "b": b}, XS, run=plg.Run(save="everything")))
    assert_close(transform(f)(P["b"]), transform(lambda b: square(None, plain("stack", {**P, "b": b}, XS)))(P["b"]))


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("save", [400, "everything"])
def test_masks_of_dropout_are_those_of_the_first_pass(save, chunk_size):
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    noisy = lambda p, x: F.dropout(body(p, x), 0.5)
    results = []
    for s in ("nothing", save):
        torch.manual_seed(1)
        ys = plg.map(noisy, live, XS, chunk_size=chunk_size, randomness="different", run=plg.Run(save=s))
        results.append((ys.detach(), torch.autograd.grad(square(None, ys), list(live.values())), torch.get_rng_state()))
    assert_close(*results)


@pytest.mark.parametrize("save", [4000, "everything"])
def test_buffers_are_updated_once(save):
    """The oracle is the plain loop over a module in train mode."""
    xs = XS[:6].reshape(3, 2, 3)
    results = []
    for ours in (True, False):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
        run = plg.Run(save=save)
        ys = plg.map(*plg.from_module(net), xs, run=run) if ours else torch.stack([net(x) for x in xs])
        square(None, ys).backward()
        results.append(([p.grad for p in net.parameters()], dict(net.named_buffers())))
    assert_close(*results)


def test_grad_weights_and_weights():
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    scale = torch.tensor([1.0, 0, 2, 0, 0, 3, 1], dtype=torch.float64)
    results = []
    for save in ("nothing", "everything"):
        y = plg.mean(body, live, XS, grad_weights=scale, weights=scale, run=plg.Run(save=save))
        results.append(torch.autograd.grad(square(None, y), list(live.values())))
    assert_close(*results)


def test_no_iterations():
    f = plg.value_and_grad(body, square, run=plg.Run(save="everything"))
    assert_close(f(P, XS[:0]), plg.value_and_grad(body, square)(P, XS[:0]))


def test_checks_hold():
    captured = W.clone().requires_grad_()
    with pytest.raises(CapturedTensorError):
        plg.value_and_grad(lambda p, x: captured @ x, square, run=plg.Run(save="everything"))(P, XS)
    live = {k: t.clone().requires_grad_() for k, t in P.items()}
    ys = plg.map(body, live, XS, run=plg.Run(save="everything"))
    with torch.no_grad():
        live["W"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square(None, ys).backward()


@pytest.mark.parametrize("save", [-1, True, 1.5, "all", None])
def test_what_is_no_policy(save):
    with pytest.raises(LoopValueError, match="save="):
        plg.Run(save=save)


def test_beside_compile():
    """What is kept is recorded by autograd; the rest is compiled."""
    run = plg.Run(save=400, compile=lambda fn: torch.compile(fn, backend="aot_eager", fullgraph=True))
    assert_close(plg.value_and_grad(body, square, run=run)(P, XS), plg.value_and_grad(body, square)(P, XS))
