"""scan, fori_loop, while_loop: equal to the plain loop, by counting no more than the schedule allows."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loopgrad as plg
from pure_loopgrad._schedule import advances
from pure_loopgrad.testing import (
    assert_close,
    losses,
    peak_bytes,
    plain_scan,
    saved_bytes,
    schedules,
    transform_stacks,
    transformed,
)
from pure_loopgrad.testing.grammar import OPS
from pure_loopgrad.testing.grammar import WIDTH as D
from pure_loopgrad.testing.transforms import Flat, gradient_by_backward

f64 = torch.float64


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64)


# Properties


@dataclasses.dataclass(frozen=True)
class StepBody:
    """A drawn step: operations of the grammar on the carry, mixed with x."""

    ops: tuple[str, ...]
    kind: str

    def __call__(self, params, carry, x):
        h = torch.tanh(carry["h"] + x)
        for name, p in zip(self.ops, params["layers"], strict=True):
            h = torch.tanh(OPS[name][1](h, p, x))
        new = {"h": h, "count": carry["count"] + 1}
        outputs = {
            "none": None,
            "carry in": carry["h"],
            "carry out": h,
            "tuple": (h.sum(), new["count"], h),
            "twice": [h, h],
        }
        return new, outputs[self.kind]


@st.composite
def scans(draw):
    ops = draw(st.lists(st.sampled_from(sorted(set(OPS) - {"skip"})), min_size=1, max_size=2))
    kind = draw(st.sampled_from(["none", "carry in", "carry out", "tuple", "twice"]))
    n = draw(st.sampled_from([1, 2, 3, 5, 7, 11]))
    seed = draw(st.integers(0, 1000))
    layers = [None if OPS[o][0] is None else data(*OPS[o][0], seed=seed + i) for i, o in enumerate(ops)]
    params = {"layers": layers, "spare": data(2, seed=seed), "name": "static"}
    init = {"h": data(D, seed=seed + 7), "count": torch.tensor(0)}
    plan = draw(schedules(n + 2))
    return StepBody(tuple(ops), kind), params, init, data(n, D, seed=seed + 9), plan, draw(st.booleans())


@given(scans(), losses(), transform_stacks())
def test_scan_equals_the_plain_loop(case, loss, stack):
    body, params, init, xs, plan, reverse = case
    flat = Flat(((params, init), xs))

    def scalar(loop):
        def f(v):
            (params, init), xs = flat.unravel(v)
            return loss(params, loop(params, init, xs))

        return f

    ours = lambda p, c, xs: plg.scan(body, p, c, xs, checkpoints=plan, reverse=reverse)
    plain = lambda p, c, xs: plain_scan(body, p, c, xs, reverse=reverse)
    assert_close(ours(params, init, xs), plain(params, init, xs), what="outputs")
    ref = gradient_by_backward(transformed(scalar(plain), stack), flat.start())
    assert_close(gradient_by_backward(transformed(scalar(ours), stack), flat.start()), ref, what=f"{stack}")


def rnn(W, c, x):
    n = torch.tanh(W @ c + x)
    return n, n.sum()


@given(st.integers(0, 60), schedules(62))
def test_every_length_and_schedule(n, plan):
    W, c, xs = data(2, 2), data(2, seed=1), data(n, 2, seed=2)
    plan = min(plan, n + 2) if isinstance(plan, int) else plan
    loss = lambda out: out[0].sum() + out[1].square().sum()
    ours = torch.func.grad(lambda W, c, xs: loss(plg.scan(rnn, W, c, xs, checkpoints=plan)), (0, 1, 2))(W, c, xs)

    def plain(W, c, xs):
        ys = []
        for x in xs:
            c, y = rnn(W, c, x)
            ys.append(y)
        return c, torch.stack(ys) if ys else xs.sum(1)

    assert_close(ours, torch.func.grad(lambda *a: loss(plain(*a)), (0, 1, 2))(W, c, xs))


# 11: counts


class Counted:
    def __init__(self, body):
        self.body, self.calls = body, 0

    def __call__(self, *args):
        self.calls += 1
        return self.body(*args)


@pytest.mark.parametrize(
    ("n", "plan", "extra"),
    [
        (10, 1, 45),
        (10, 2, 20),
        (10, 3, 15),
        (10, 4, 14),
        (100, 6, 280),
        (1000, 10, 3636),
        (1000, "sqrt", 1960),
        (1000, "all", 999),
    ],
)
@pytest.mark.parametrize("live", [True, False])
def test_11_the_schedule_is_kept_exactly(n, plan, extra, live):
    W, c, xs = data(2, 2), data(2), data(n, 2)
    body = Counted(rnn)
    f = lambda W: plg.scan(body, W, c, xs, checkpoints=plan)[0].sum()
    if live:
        f(W.requires_grad_()).backward()
    else:
        torch.func.grad(f)(W)
    assert body.calls == n + extra  # a step's own backward runs it once
    if isinstance(plan, int):
        assert extra == advances(n, plan)


def carries_alive(n, plan):
    """The most carries that live at once, by bytes: the carry is large, all else is not."""
    size = 4096
    step = lambda w, c, x: (torch.sin(w * c + x), None)
    w, c, xs = torch.ones((), requires_grad=True), torch.zeros(size), torch.zeros(n)
    return peak_bytes(lambda: plg.scan(step, w, c, xs, checkpoints=plan)[0].sum().backward()) / (4 * size)


STEP = 8  # what one step and its backward need themselves


@pytest.mark.parametrize(("n", "plan", "most"), [(225, "sqrt", 30), (40, 1, 1), (200, 5, 5), (1000, 10, 10)])
def test_11_live_carries(n, plan, most):
    assert carries_alive(n, plan) <= most + STEP


def test_11_memory_grows_with_the_square_root():
    assert carries_alive(900, "sqrt") <= 2.2 * carries_alive(225, "sqrt")
    assert carries_alive(1000, 10) < 1000 * 2 / 20  # the plain loop keeps two a step


def test_saved_for_the_backward_are_carries_alone():
    W, c, xs = data(8, 8).requires_grad_(), data(8), data(100, 8)
    saved = saved_bytes(lambda: plg.scan(rnn, W, c, xs))
    assert saved <= 8 * (64 + 8 + 800) + 30 * 8 * 8 + 4096


# 12: what a step may return


class Pair(NamedTuple):
    h: torch.Tensor
    i: torch.Tensor


@dataclasses.dataclass
class State:
    h: torch.Tensor
    i: torch.Tensor


CONTAINERS = {
    "list": lambda h, i: [h, i],
    "dict": lambda h, i: {"h": h, "i": i},
    "NamedTuple": Pair,
    "dataclass": State,
}


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("y", ["same", "carry in", "none"])
@pytest.mark.parametrize("plan", ["sqrt", 2])
def test_12_containers_and_shared_outputs(kind, y, plan):
    make = CONTAINERS[kind]
    parts = lambda c: (
        (c[0], c[1]) if kind in ("list", "NamedTuple") else (c["h"], c["i"]) if kind == "dict" else (c.h, c.i)
    )

    def step(W, c, x):
        h, i = parts(c)
        n = torch.tanh(h @ W + x)
        return make(n, i + 1), {"same": n, "carry in": h, "none": None}[y]

    W, xs = data(3, 3), data(7, 3, seed=1)
    init = make(data(3, seed=2), torch.tensor(0))

    def loss(loop):
        def f(W):
            c, ys = loop(step, W, init, xs)
            return parts(c)[0].sin().sum() + (0 if ys is None else ys.square().sum())

        return f

    ours, plain = loss(functools.partial(plg.scan, checkpoints=plan)), loss(plain_scan)
    assert parts(plg.scan(step, W, init, xs)[0])[1].item() == 7
    for transform in (
        lambda f: torch.func.grad(f)(W),
        lambda f: torch.func.jvp(f, (W,), (W,)),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.stack([W, 2 * W])),
        lambda f: torch.func.hessian(f)(W),
    ):
        assert_close(transform(ours), transform(plain))


def test_12_the_carry_itself_is_returned():
    c, ys = plg.scan(lambda p, c, x: (c, x), None, torch.ones(2), torch.arange(3.0))
    assert torch.equal(c, torch.ones(2))
    assert torch.equal(ys, torch.arange(3.0))


# 13 to 17


def test_13_a_linear_recurrence():
    xs = torch.tensor([0.11, -0.37, 0.23, 0.41, -0.19], dtype=f64)
    a, c0 = torch.tensor(0.7, dtype=f64), torch.tensor(0.2, dtype=f64)

    def step(a, c, x):
        n = a * c + x
        return n, n

    def loss(a):
        c, ys = plg.scan(step, a, c0, xs)
        return c**2 + (ys**2).sum()

    g, value = torch.func.grad_and_value(loss)(a)
    assert value.item() == pytest.approx(0.37611220095, rel=1e-9)
    assert g.item() == pytest.approx(0.4341423812, rel=1e-9)
    captured = lambda a: plg.scan(lambda _, c, x: step(a, c, x), None, c0, xs)[0]
    with pytest.raises(plg.errors.CapturedTensorError, match="uses a "):
        captured(a.clone().requires_grad_()).backward()
    with pytest.raises(plg.errors.CapturedTensorError, match="uses a "):
        torch.func.grad(captured)(a)


@pytest.mark.parametrize("plan", ["all", "sqrt", 3])
def test_14_no_steps(plan):
    W, c, xs = data(2, 2), data(2), data(0, 2)
    last, ys = plg.scan(rnn, W, c, xs, checkpoints=plan)
    assert torch.equal(last, c)
    assert (ys.shape, ys.dtype) == ((0,), f64)
    assert_close(torch.func.jacrev(lambda c: plg.scan(rnn, W, c, xs)[0])(c), torch.eye(2, dtype=f64))
    assert_close(torch.func.grad(lambda W: plg.scan(rnn, W, c, xs)[0].sum())(W), torch.zeros(2, 2, dtype=f64))


@pytest.mark.parametrize("transform", ["grad", "jacfwd", "jacrev", "hessian", "jvp", "vmap"])
def test_14_no_steps_where_what_is_given_is_computed_inside_a_transform(transform):
    """Torch cannot make a fake tensor of a view or a dual tensor of a transform."""
    w, xs = data(3), data(0, 3)
    step = lambda p, c, x: (torch.tanh(p * c + x), x * c)
    transforms = {
        "jvp": lambda f: lambda w: torch.func.jvp(f, (w,), (w,)),
        "vmap": lambda f: lambda w: torch.func.vmap(f)(torch.stack([w, 2 * w])),
    }
    made = transforms.get(transform) or getattr(torch.func, transform)

    def ours(w):
        carry, ys = plg.scan(step, 2 * w[:3], w.sin(), xs * w)
        assert ys.shape == (0, 3)
        return carry.square().sum() + ys.sum()

    plain = lambda w: w.sin().square().sum()
    assert_close(made(ours)(w), made(plain)(w))
    until = lambda w: plg.while_loop(lambda p, c: False, lambda p, c: p * c, 2 * w[:3], w.sin()).square().sum()
    assert_close(made(until)(w), made(plain)(w))


def test_14_lengths():
    double = lambda p, c, x: (p * c, None)
    assert plg.scan(double, torch.tensor(2.0), torch.tensor(1.0), length=3)[0].item() == 8.0
    with pytest.raises(ValueError, match="pass length="):
        plg.scan(double, torch.tensor(2.0), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"length=4, but .* 3 entries"):
        plg.scan(double, torch.tensor(2.0), torch.tensor(1.0), torch.zeros(3), length=4)
    with pytest.raises(ValueError, match=r"length=-1"):
        plg.scan(double, torch.tensor(2.0), torch.tensor(1.0), length=-1)


def test_15_a_captured_parameter_is_named():
    a = data(3).requires_grad_()
    for step in (lambda b, c, x: (a * c + b, None), functools.partial(lambda a, b, c, x: (a * c + b, None), a)):
        with pytest.raises(plg.errors.CapturedTensorError, match=r"uses (a|partial argument 0) "):
            plg.scan(step, data(3).requires_grad_(), data(3), length=4)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda p, c, x: ({"h": c["h"].double()}, None), r"carry\['h'\] has .*float32 in init, but .*float64"),
        (lambda p, c, x: ({"h": c["h"][:1]}, None), r"carry\['h'\] has shape \(2,\).*shape \(1,\)"),
        (lambda p, c, x: ({"k": c["h"]}, None), "changes its structure"),
        (lambda p, c, x: c["h"], r"returns \(carry, y\), not a Tensor"),
    ],
)
def test_16_a_carry_that_changes(step, text):
    with pytest.raises(TypeError, match=text) as caught:
        plg.scan(step, None, {"h": torch.zeros(2)}, length=3)
    assert isinstance(caught.value, plg.LoopGradError)


def test_17_products():
    xs, init = torch.tensor([1.0, 2.0, 3.0], dtype=f64), torch.tensor(2.0, dtype=f64)
    f = lambda c, xs: plg.scan(lambda p, c, x: (c * x, None), None, c, xs)[0]
    assert f(init, xs).item() == 12.0
    assert torch.func.jvp(lambda c: f(c, xs), (init,), (torch.ones((), dtype=f64),))[1].item() == 6.0
    assert torch.func.jacfwd(f)(init, xs).item() == 6.0
    plain = lambda c, xs: c * xs.prod()
    mixed = lambda f: torch.func.jacrev(torch.func.jacfwd(f), argnums=1)(init, xs)
    assert_close(mixed(f), mixed(plain))
    assert_close(torch.func.vmap(f, (0, None))(xs, xs), 6 * xs)


# Other faces and options


@pytest.mark.parametrize(("k", "expected"), [(3, 0.108), (5, 0.108), (2, 0.072), (1, 0.036)])
def test_truncated_gradients(k, expected):
    w, x0 = torch.tensor(0.2, dtype=f64), torch.tensor(0.9, dtype=f64)
    f = lambda w: plg.scan(lambda w, c, x: (w * c, c), w, x0, length=3, truncate=k)
    assert torch.func.grad(lambda w: f(w)[0])(w).item() == pytest.approx(expected, rel=1e-12)
    assert torch.func.jvp(lambda w: f(w)[0], (w,), (torch.ones_like(w),))[1].item() == pytest.approx(
        expected, rel=1e-12
    )
    assert_close(f(w), plg.scan(lambda w, c, x: (w * c, c), w, x0, length=3))


@pytest.mark.parametrize("window", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("reverse", [False, True])
def test_windows_cut_the_carry_alone(window, reverse):
    W, c, xs, n = data(2, 2), data(2, seed=1), data(7, 2, seed=2), 7

    def plain(W, c, xs):
        total = 0.0
        for i in range(n):
            c = c.detach() if (n - i) % window == 0 else c
            c, y = rnn(W, c, xs[n - 1 - i if reverse else i])
            total = total + y**2
        return total + c.sum()

    def ours(W, c, xs):
        last, ys = plg.scan(rnn, W, c, xs, window=window, reverse=reverse)
        return ys.square().sum() + last.sum()

    for transform in (
        lambda f: torch.func.grad(f, (0, 1, 2))(W, c, xs),
        lambda f: torch.func.jvp(lambda W: f(W, c, xs), (W,), (W,)),
    ):
        assert_close(transform(ours), transform(plain))


def test_fori_loop():
    body = lambda w, i, c: torch.sin(w * c + i)
    w, c = data(), data(seed=1)
    plain = lambda w: functools.reduce(lambda c, i: body(w, i, c), range(2, 9), c)
    ours = lambda w: plg.fori_loop(2, 9, body, w, c)
    assert_close(torch.func.hessian(ours)(w), torch.func.hessian(plain)(w))
    assert plg.fori_loop(3, 3, body, w, c) is not None
    assert torch.equal(plg.fori_loop(3, 2, body, w, c), c)


def collatz(limit):
    return lambda w, c: c["h"].abs().max() < limit


@pytest.mark.parametrize("plan", ["sqrt", 1, 4, 16])
def test_while_loop(plan):
    body = lambda w, c: {"h": c["h"] * (1 + torch.sigmoid(w)), "n": c["n"] + 1}
    init = {"h": data(3), "n": torch.tensor(0)}
    w = data(3, seed=1)

    def plain(w):
        c = init
        while collatz(50)(w, c):
            c = body(w, c)
        return c

    ours = lambda w: plg.while_loop(collatz(50), body, w, init, checkpoints=plan)
    assert_close(ours(w), plain(w))
    for transform in (torch.func.grad, torch.func.jacfwd, torch.func.hessian):
        assert_close(transform(lambda w: ours(w)["h"].sum())(w), transform(lambda w: plain(w)["h"].sum())(w))
    live = w.clone().requires_grad_()
    ours(live)["h"].sum().backward()
    assert_close(live.grad, torch.func.grad(lambda w: plain(w)["h"].sum())(w))


def test_loops_with_a_carry_under_vmap():
    """The condition counts, so it is the same for the whole batch."""
    body = lambda w, i, c: torch.sin(c * w) + i
    ws, c = data(4), data(seed=1)
    plain = lambda w: functools.reduce(lambda c, i: body(w, i, c), range(5), c)
    by_range = lambda w: plg.fori_loop(0, 5, body, w, c)
    step = lambda w, s: {"c": body(w, s["i"], s["c"]), "i": s["i"] + 1}
    until = lambda w: plg.while_loop(lambda w, s: s["i"] < 5, step, w, {"c": c, "i": torch.tensor(0)})["c"]
    for ours in (by_range, until):
        for transform in (lambda f: f, torch.func.grad, torch.func.hessian):
            assert_close(torch.func.vmap(transform(ours))(ws), torch.func.vmap(transform(plain))(ws))


def test_while_loop_counts():
    """At most n steps more than a scan that knows n: 1.5 times the offline optimum of n + t."""
    body = Counted(lambda w, c: c * w)
    w = torch.tensor(1.01, dtype=f64)
    f = lambda w: plg.while_loop(lambda w, c: c < 2.7, body, w, torch.ones((), dtype=f64), checkpoints=5)
    f(w)
    n = body.calls
    body.calls = 0
    torch.func.grad(f)(w)
    assert n == 100
    assert body.calls == n + n + advances(n, 5)
    assert body.calls <= 1.5 * (n + advances(n, 5))


def test_while_loop_bounds_and_refusals():
    w = torch.tensor(2.0)
    always = lambda w, c: True
    double = lambda w, c: c * w
    assert plg.while_loop(always, double, w, torch.tensor(1.0), max_steps=5).item() == 32.0
    assert (
        torch.func.grad(lambda w: plg.while_loop(always, double, w, torch.tensor(1.0), max_steps=3))(w).item() == 12.0
    )
    assert plg.while_loop(lambda w, c: False, double, w, torch.tensor(1.0)).item() == 1.0
    assert plg.while_loop(lambda w, c: np.less(c.item(), 3), double, w, torch.tensor(1.0)).item() == 4.0
    with pytest.raises(TypeError, match=r"shape \(2,\).*one bool"):
        plg.while_loop(lambda w, c: c < 1, double, w, torch.zeros(2))
    with pytest.raises(TypeError, match="is a str"):
        plg.while_loop(lambda w, c: "yes", double, w, torch.tensor(1.0))
    with pytest.raises(ValueError, match="max_steps=-1"):
        plg.while_loop(always, double, w, torch.tensor(1.0), max_steps=-1)
    with pytest.raises(ValueError, match="vmap batches"):
        torch.func.vmap(lambda c: plg.while_loop(lambda w, c: c < 3, double, w, c))(torch.ones(3))


@pytest.mark.parametrize("plan", ["all", "sqrt", 1, 3])
def test_random_steps_are_replayed(plan):
    """Dropout in a carry loop: the masks of the plain loop, in every recomputation, at every order."""
    step = lambda W, c, x: (lambda h: (h, h.sum()))(torch.nn.functional.dropout(torch.tanh(W @ c + x), 0.5))
    W, c, xs = data(4, 4), data(4, seed=1), data(9, 4, seed=2)

    def run(loop, transform):
        torch.manual_seed(11)
        found = transform(lambda W: (lambda o: o[0].square().sum() + o[1].square().sum())(loop(W)))(W)
        return found, torch.get_rng_state()

    hvp = lambda f: lambda W: torch.func.jvp(torch.func.grad(f), (W,), (torch.cos(W),))[1]
    for transform in (torch.func.grad, hvp, lambda f: torch.func.grad(lambda W: torch.func.grad(f)(W).sin().sum())):
        ours, state = run(lambda W: plg.scan(step, W, c, xs, checkpoints=plan), transform)
        ref, ref_state = run(lambda W: plain_scan(step, W, c, xs), transform)
        assert_close(ours, ref)
        assert torch.equal(state, ref_state)


def test_meta_gradients():
    """Steps that call torch.func.grad: an inner optimiser, differentiated for its start and its learning rate."""
    target = data(3)
    inner = lambda w, x: ((w * x).sin() - target).square().sum()

    def step(p, w, x):
        return w - p["lr"] * torch.func.grad(inner)(w, x), None

    p, w, xs = {"lr": torch.tensor(0.1, dtype=f64)}, data(3, seed=1), data(6, 3, seed=2)

    def loss(loop):
        return lambda lr, w: inner(loop(step, {"lr": lr}, w, xs)[0], xs[0])

    ours = torch.func.grad(loss(plg.scan), (0, 1))(p["lr"], w)
    assert_close(ours, torch.func.grad(loss(plain_scan), (0, 1))(p["lr"], w))


def test_forward_mode_keeps_nothing():
    tangent = lambda n: (
        lambda: torch.func.jvp(
            lambda W: plg.scan(lambda W, c, x: (torch.tanh(W @ c + x), None), W, c, xs[:n])[0], (W,), (W,)
        )
    )
    W, c, xs = data(16, 16), data(16), data(256, 16)
    assert peak_bytes(tangent(256)) <= 1.02 * peak_bytes(tangent(32))


def test_second_order_keeps_few_carries():
    step = lambda W, c, x: (torch.tanh(W @ c + x), None)
    W, c, xs = data(8, 8), data(8, 64), data(100, 8, 64)

    def hvp(n, plan):
        f = lambda W: plg.scan(step, W, c, xs[:n], checkpoints=plan)[0].square().sum()
        return lambda: torch.func.jvp(torch.func.grad(f), (W,), (W,))

    assert peak_bytes(hvp(100, "sqrt")) <= 3 * peak_bytes(hvp(25, "sqrt"))
    assert peak_bytes(hvp(100, "sqrt")) <= 0.6 * peak_bytes(hvp(100, "all"))


def test_a_deep_recursion_is_none():
    """Neither many steps nor few carries meet Python's recursion limit, also when parts are recorded in each other."""
    W, c, xs = data(1, 1), data(1), data(20_000, 1)
    torch.func.grad(lambda W: plg.scan(rnn, W, c, xs)[0].sum())(W)
    f = lambda W, n: plg.scan(rnn, W, c, xs[:n], checkpoints=1)[0].sum()
    plain = lambda W, n: plain_scan(rnn, W, c, xs[:n])[0].sum()
    assert_close(torch.func.grad(f)(W, 300), torch.func.grad(plain)(W, 300))
    assert_close(torch.func.hessian(f)(W, 40), torch.func.hessian(plain)(W, 40))


# Carries kept elsewhere


@pytest.mark.parametrize("plan", ["sqrt", 3])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offload(where, plan, tmp_path):
    run = plg.Run(offload="cpu" if where == "cpu" else tmp_path)
    W, c, xs = data(3, 3), data(3), data(20, 3)
    body = Counted(rnn)
    loss = lambda out: out[0].sum() + out[1].square().sum()
    ours = torch.func.grad(lambda W: loss(plg.scan(body, W, c, xs, checkpoints=plan, run=run)))(W)
    assert_close(ours, torch.func.grad(lambda W: loss(plain_scan(rnn, W, c, xs)))(W))
    assert list(tmp_path.iterdir()) == []
    if plan == 3:
        assert body.calls == 20 + 20 + advances(20, 3)  # once more forward
    live = W.clone().requires_grad_()
    with plg.run(offload=run.offload):
        loss(plg.scan(rnn, live, c, xs, checkpoints=plan)).backward()
    assert_close(live.grad, ours)


def test_offload_holds_few_files_and_removes_them_when_a_step_raises(tmp_path):
    most = []

    def step(W, c, x):
        files = list(tmp_path.rglob("*.pt"))
        most.append(len(files))
        if len(most) > 45:
            raise KeyError("mine")
        return rnn(W, c, x)

    W = data(3, 3).requires_grad_()
    out = plg.scan(step, W, data(3), data(20, 3), checkpoints=4, run=plg.Run(offload=tmp_path))
    with pytest.raises(KeyError, match="mine"):
        out[0].sum().backward()
    assert 0 < max(most) <= 4
    assert list(tmp_path.iterdir()) == []
    assert W.grad is None


def test_offload_to_a_full_disk(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    W = data(3, 3).requires_grad_()
    out = plg.scan(rnn, W, data(3), data(20, 3), run=plg.Run(offload=tmp_path))
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(plg.errors.OffloadError, match=r"No space left.*no gradient was computed"):
        out[0].sum().backward()
    assert W.grad is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("offload", "kind"), [("/no/such/folder", ValueError), (3, TypeError)])
def test_what_is_no_place(offload, kind):
    with pytest.raises(kind, match="offload="):
        plg.Run(offload=offload)


@pytest.mark.parametrize("name", ["truncate", "window"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_what_is_no_number_of_steps(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        plg.scan(rnn, data(2, 2), data(2), data(3, 2), **{name: value})


def test_a_truncation_of_all_steps_runs_no_empty_head():
    body = lambda a, c, x: (a * c + x.item(), c)  # reads a number, which a run for shapes alone could not
    one = torch.ones(())
    cut = plg.scan(body, one, one, torch.ones(3), truncate=5)
    assert [t.tolist() for t in cut] == [t.tolist() for t in plg.scan(body, one, one, torch.ones(3))] == [4, [1, 2, 3]]


def test_a_condition_that_draws_is_refused_where_a_gradient_is_asked_for():
    cond = lambda a, c: torch.rand(()) < 0.9
    body = lambda a, c: a * c + torch.rand(())
    a = torch.tensor(1.1)
    with pytest.raises(plg.errors.ImpureBodyError, match="the condition of a while_loop draws random numbers"):
        plg.while_loop(cond, body, a.clone().requires_grad_(), torch.ones(()), max_steps=20)
    torch.manual_seed(0)
    ours = plg.while_loop(cond, body, a, torch.ones(()), max_steps=20)
    torch.manual_seed(0)
    plain = torch.ones(())
    while cond(a, plain):
        plain = body(a, plain)
    assert ours == plain
