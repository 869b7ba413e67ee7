"""Cases from people's bug reports (by number), each with its right value. `ref` is the plain loop in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close, plain_map, plain_mean, plain_sum

f64 = torch.float64


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


def twice_sin(x):
    return x.sin().sin()


# 1 to 3: rematerialisation under torch.func


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "jacfwd"])
def test_1_checkpoint_under_transforms(transform):
    x = torch.tensor(0.7, dtype=f64)
    f = plg.checkpoint(twice_sin)
    if transform == "vjp":
        found = torch.func.vjp(f, x)[1](torch.ones((), dtype=f64))[0]
    else:
        found = getattr(torch.func, transform)(f)(x)
    assert_close(found, torch.cos(torch.sin(x)) * torch.cos(x), rtol=1e-14)


def test_1_third_derivative_and_jacobian():
    grad = torch.func.grad
    x = torch.tensor(0.7, dtype=f64)
    f = plg.checkpoint(twice_sin)
    assert_close(grad(grad(grad(f)))(x), grad(grad(grad(twice_sin)))(x), rtol=1e-13)
    x = data(3)
    assert_close(torch.func.jacrev(f)(x), torch.diag(torch.cos(torch.sin(x)) * torch.cos(x)), rtol=1e-14)


def test_2_vmap_of_checkpoint_on_a_live_tensor():
    x = data(3).requires_grad_()
    ref = (torch.cos(torch.sin(x)) * torch.cos(x)).detach()
    f = plg.checkpoint(twice_sin)
    (g,) = torch.autograd.grad(torch.func.vmap(f)(x).sum(), x)
    assert_close(g, ref, rtol=1e-14)
    x = x.detach()
    assert_close(torch.func.vmap(torch.func.grad(f))(x), ref, rtol=1e-14)
    assert_close(torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(x), ref, rtol=1e-14)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_3_a_body_that_differentiates(grad_mode):
    def body(th, x):
        return torch.func.grad(lambda x: ((th * x) ** 2).sum())(x)

    x, th = torch.tensor([1.0, 2.0], dtype=f64), torch.tensor(3.0, dtype=f64)
    with torch.set_grad_enabled(grad_mode):
        found = torch.func.grad(lambda th: plg.checkpoint(body)(th, x).sum())(th)
    assert found.item() == 36.0


# 5: part of the purity checks


@pytest.mark.parametrize(("change", "text"), [("shape", r"shape \(2,\).*shape \(4,\)"), ("dtype", "float64.*float32")])
def test_5_a_second_call_that_differs(change, text):
    calls = []

    def body(w, x):
        calls.append(x)
        y = w * x
        if len(calls) > 3:
            y = torch.cat([y, y]) if change == "shape" else y.float()
        return {"y": y}

    w = torch.ones(2, dtype=f64, requires_grad=True)
    loss = plg.map(body, w, data(3, 2))["y"].sum()
    with pytest.raises(plg.errors.ImpureBodyError, match=rf"output\['y'\] changed in iteration 0.*{text}.*side effect"):
        loss.backward()


def test_5_an_iteration_that_differs():
    body = lambda w, x: w * x[: 1 + int(x[0] > 0)]
    with pytest.raises(plg.errors.ImpureBodyError, match=r"output changed in iteration 1: first shape \(1,\)"):
        plg.map(body, torch.ones((), dtype=f64), torch.tensor([[-1.0, 1.0], [1.0, 1.0]], dtype=f64))


# 18: dropout, replayed


def test_18_dropout_draws_what_the_plain_loop_draws():
    p, xs = data(8, 5), data(16, 8, seed=1)
    body = lambda p, x: F.dropout(x @ p, 0.5)

    def run(loop):
        torch.manual_seed(3)
        live = p.clone().requires_grad_()
        value = torch.logsumexp(loop(body, live, xs).flatten(), 0)
        value.backward()
        return value.detach(), live.grad, torch.get_rng_state()

    value, g, state = run(plg.map)
    ref_value, ref_g, ref_state = run(plain_map)
    assert_close([value, g], [ref_value, ref_g])
    assert torch.equal(state, ref_state)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_18_one_mask_for_a_batch_of_cotangents_or_tangents(chunk_size):
    """jacrev and jacfwd batch what is pulled back and pushed forward; the masks are those of the one first pass."""
    p, xs = torch.tensor(2.0, dtype=f64), torch.ones(6, 5, dtype=f64)
    body = lambda p, x: F.dropout(p * x, 0.5)
    rows = lambda p: plg.map(body, p, xs, chunk_size=chunk_size, randomness="different").sum(1)
    torch.manual_seed(1)
    ref = rows(p) / p  # linear in p
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        torch.manual_seed(1)
        assert_close(jacobian(rows)(p), ref)
    torch.manual_seed(1)
    ys, pullback = torch.func.vjp(rows, p)
    found = torch.func.vmap(pullback, randomness="different")(torch.eye(6, dtype=f64))[0]
    assert_close(found, ys / p)


# 20 to 23: splits, means, masks


@pytest.mark.parametrize("split", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_20_splits_add_up(split):
    W, xs = data(2, 4), data(3, 4, seed=1)
    f = plg.value_and_grad(lambda W, x: torch.tanh(W @ x).sum(), reduce="sum", chunk_size=2)
    whole = f(W, xs)[1]
    assert_close(sum(f(W, part)[1] for part in xs.split(split)), whole, rtol=1e-12)


@pytest.mark.parametrize("loop", [plg.map, plg.sum, plg.mean])
def test_20_every_chunk_size(loop):
    W, xs = data(2, 4), data(7, 4, seed=1)
    body = lambda W, x: torch.tanh(W @ x)
    gradient = lambda c: torch.func.grad(lambda W: torch.logsumexp(loop(body, W, xs, chunk_size=c).flatten(), 0))(W)
    for c in (2, 3, 4, 7, 8, 100, None):
        assert_close(gradient(c), gradient(1), rtol=1e-12)


def test_21_the_mean_over_tokens():
    losses, valid = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]], dtype=f64), torch.tensor([3, 1])
    xs = (losses, valid)
    w = torch.ones((), dtype=f64)
    pair = lambda w, x: (w * x[0].sum(), x[1])
    total, g = plg.value_and_grad(pair, lambda w, y: y[0] / y[1], reduce="sum")(w, xs)
    assert (total.item(), g.item()) == (2.5, 2.5)
    mean_of_row = lambda w, x: w * x[0].sum() / x[1]
    assert plg.mean(mean_of_row, w, xs, weights=[3, 1]).item() == 2.5
    assert plg.value_and_grad(mean_of_row, reduce="mean", weights=[3, 1])(w, xs)[1].item() == 2.5


@pytest.mark.parametrize("weights", [[0, 0], [1.0, -1.0], [float("nan"), 1.0]])
def test_21_weights_that_do_not_add_up(weights):
    with pytest.raises(ValueError, match="weights add up to"):
        plg.mean(lambda w, x: w * x, torch.ones(()), torch.ones(2), weights=weights)


@pytest.mark.parametrize("how", ["live", "grad", "vmap", "dual"])
def test_21_weights_that_are_differentiated_or_batched_and_add_up_to_zero(how):
    w, xs, zero = torch.ones(2, dtype=f64), torch.ones(3, dtype=f64), torch.tensor([1.0, -1.0, 0.0], dtype=f64)
    mean = lambda weights: plg.mean(lambda w, x: (w * x).sum(), w, xs, weights=weights)
    calls = {
        "live": lambda: mean(zero.clone().requires_grad_()),
        "grad": lambda: torch.func.grad(mean)(zero),
        "vmap": lambda: torch.func.vmap(mean)(torch.stack([zero + 1, zero])),
        "dual": lambda: torch.func.jvp(mean, (zero,), (zero,)),
    }
    with pytest.raises(ValueError, match="weights add up to 0"):
        calls[how]()


def test_21_differentiated_weights_in_half_precision_are_added_in_float32():
    weights = torch.full((3000,), 1.01, dtype=torch.bfloat16)
    weights[0] = 300.0
    ys = torch.ones(3000)
    given = weights.clone().requires_grad_()
    ours = torch.autograd.grad(plg.mean(lambda p, y: y, None, ys, weights=given, chunk_size=100), given)[0]
    assert plg.mean(lambda p, y: y, None, ys, weights=given, chunk_size=100).item() == pytest.approx(1, rel=1e-6)
    assert ours.abs().max() < 1e-6


@pytest.mark.parametrize("chunk_size", [1, 2, None])
def test_22_an_iteration_that_counts_nothing(chunk_size):
    """Its masked mean is 0 / 0; by weight zero it adds exactly nothing, also to the gradient."""
    x, mask = data(3, 4), torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=f64)
    body = lambda w, x: (w * x[0] * x[1]).sum() / x[1].sum()
    w, counts = data(4, seed=1), mask.sum(1)
    value, g = plg.value_and_grad(body, reduce="mean", weights=counts, chunk_size=chunk_size)(w, (x, mask))
    live = w.clone().requires_grad_()
    ref = (live * x * mask).sum() / mask.sum()
    ref.backward()
    assert_close([value, g], [ref.detach(), live.grad])
    sums = plg.value_and_grad(lambda w, x: (w * x[0] * x[1]).sum(), reduce="sum", chunk_size=chunk_size)
    assert_close(sums(w, (x, mask))[1], (x * mask).sum(0))


def test_22_weights_that_are_differentiated():
    body = lambda w, x: torch.tanh(w * x)
    w, xs, weights = data(), data(4), torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=f64)
    loss = lambda loop: lambda weights: loop(body, w, xs, weights=weights) ** 2
    plain = lambda body, w, xs, weights: (torch.tanh(w * xs) * weights).sum() / weights.sum()
    assert_close(torch.func.grad(loss(plg.mean))(weights), torch.func.grad(loss(plain))(weights))
    assert_close(torch.func.vmap(loss(plg.mean))(weights[None]), loss(plain)(weights)[None])


@pytest.mark.parametrize("chunk_size", range(1, 13))
def test_23_mean_of_ten(chunk_size):
    W, xs = data(2, 4), data(10, 4, seed=1)
    body = lambda W, x: torch.tanh(W @ x)
    gradient = lambda loop: torch.func.grad(lambda W: loop(W).square().sum())(W)
    ours = gradient(lambda W: plg.mean(body, W, xs, chunk_size=chunk_size))
    assert_close(ours, gradient(lambda W: plain_mean(body, W, xs)))


# 24: autocast


@pytest.mark.parametrize("cache", [True, False])
def test_24_autocast_around_the_call_alone(cache):
    net = torch.nn.Linear(6, 4)
    x = torch.randn(1, 6)

    def run(loop):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            ys = loop(*plg.from_module(net), x)
        ys.float().square().sum().backward()
        return ys.detach(), [p.grad.clone() for p in net.parameters()]

    (ys, grads), (ref_ys, ref_grads) = run(plg.map), run(plain_map)
    assert ys.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in grads)
    assert torch.equal(ys, ref_ys)
    assert all(torch.equal(a, b) for a, b in zip(grads, ref_grads, strict=True))  # bitwise, for one iteration


def test_24_sums_of_half_precision_are_wide():
    xs = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    total = plg.sum(lambda p, x: p * x, torch.ones((), dtype=torch.bfloat16), xs)
    assert total.dtype == torch.bfloat16
    assert total.item() == 4096  # adding in bfloat16 stops at 256
    g = plg.value_and_grad(lambda p, x: p * x, reduce="sum")(torch.ones((), dtype=torch.bfloat16), xs)[1]
    assert (g.dtype, g.item()) == (torch.bfloat16, 4096)


# 25: bags


def bag_loss(params, ys):
    a = torch.softmax(ys @ params["attention"], 0)
    return F.binary_cross_entropy_with_logits((a * ys.T).sum(1) @ params["head"], torch.ones((), dtype=f64))


def bag_params():
    return {"conv": data(4, 3, 3, 3) * 0.3, "attention": data(4, seed=1), "head": data(4, seed=2)}


def encode(params, patch):
    return torch.tanh(F.conv2d(patch[None], params["conv"])).mean((0, 2, 3))


@pytest.mark.parametrize("n", [257, 5, 1, 9])
def test_25_attention_over_a_bag(n):
    params, patches = bag_params(), data(n, 3, 8, 8, seed=3)
    live = {k: v.clone().requires_grad_() for k, v in params.items()}
    bag_loss(live, plain_map(encode, live, patches)).backward()
    found = plg.value_and_grad(encode, bag_loss, chunk_size=64)(params, patches)[1]
    assert_close(found, {k: v.grad for k, v in live.items()})


def test_25_patches_of_different_sizes_by_index():
    params = bag_params()
    patches = [data(3, 4 + i, 9 - i, seed=i) for i in range(5)]
    body = lambda params, i: encode(params, patches[int(i)])
    live = {k: v.clone().requires_grad_() for k, v in params.items()}
    bag_loss(live, plain_map(body, live, torch.arange(5))).backward()
    found = plg.value_and_grad(body, bag_loss)(params, torch.arange(5))[1]
    assert_close(found, {k: v.grad for k, v in live.items()})


# 27, 29: chunks


@pytest.mark.parametrize("chunk_size", [1, 3, 10, 11, None])
def test_27_each_element_once(chunk_size):
    seen = []

    def body(p, x):
        seen.append(x)
        return p * x

    ys = plg.map(body, torch.tensor(2.0), torch.arange(10.0), chunk_size=chunk_size, batched=True)
    assert torch.equal(torch.cat(seen), torch.arange(10.0))
    assert torch.equal(ys, 2 * torch.arange(10.0))


@pytest.mark.parametrize("chunk_size", [0, -1, 1.5, True, "auto?"])
def test_27_chunk_sizes_that_cannot_be(chunk_size):
    with pytest.raises(plg.LoopGradError, match="chunk_size="):
        plg.map(lambda p, x: p * x, torch.tensor(2.0), torch.arange(3.0), chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_27_numbers_and_none_in_the_output(chunk_size):
    ys = plg.map(lambda p, x: (p * x, None, 3, True), torch.tensor(2.0), torch.arange(3.0), chunk_size=chunk_size)
    assert ys[1] is None
    assert torch.equal(ys[2], torch.tensor([3, 3, 3]))
    assert torch.equal(ys[3], torch.tensor([True] * 3))
    with pytest.raises(TypeError, match=r"output\[1\] is a str"):
        plg.map(lambda p, x: (p * x, "a"), torch.tensor(2.0), torch.arange(3.0), chunk_size=chunk_size)


def test_29_writing_in_place_into_a_fresh_tensor():
    def body(w, x):
        out = torch.zeros(4, 4, dtype=f64)
        out[:2, :3] = w * x
        return out

    w, xs = data(2, 3), data(5, 2, 3, seed=1)
    loss = lambda loop, **kw: lambda w: loop(body, w, xs, **kw).sin().sum()
    assert_close(torch.func.grad(loss(plg.map))(w), torch.func.grad(loss(plain_map))(w))
    with pytest.raises(RuntimeError) as caught:
        plg.map(body, w, xs, chunk_size=2)
    assert any("chunk_size=1" in note for note in getattr(caught.value, "__notes__", ["chunk_size=1"]))


def test_integer_sums_keep_their_dtype_and_bools_are_counted():
    counts = plg.sum(lambda p, x: (x > p, x.to(torch.int32)), torch.tensor(1.0), torch.arange(5.0))
    assert [(c.item(), c.dtype) for c in counts] == [(3, torch.int64), (10, torch.int32)]
    assert_close(plain_sum(lambda p, x: x.to(torch.int32), None, torch.arange(5.0)), counts[1])
