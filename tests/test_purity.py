"""What cannot be replayed is found and raised: values, captured constants, generators, settings."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close

W = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
XS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def live():
    return W.clone().requires_grad_()


def by_map(body, w, **options):
    return plg.map(body, w, XS, **options)


def by_mean(body, w, **options):
    return plg.mean(body, w, XS, **options)


def by_checkpoint(body, w, **options):
    with plg.run(**{k: v for k, v in options.items() if k == "run"} and vars(options["run"])):
        return plg.checkpoint(body)(w, XS[0])


def by_scan(body, w, **options):
    return plg.scan(lambda w, c, x: (c, body(w, x)), w, torch.zeros(()), XS, **options)[1]


def by_while_loop(body, w, **options):
    def step(w, c):
        i, total = c
        return i + 1, total + body(w, XS[i])

    start = torch.tensor(0), torch.zeros(3, dtype=torch.float64)
    return plg.while_loop(lambda w, c: c[0] < len(XS), step, w, start, **options)[1]


WAYS = [by_map, by_mean, by_checkpoint, by_scan]


class Scale:
    k = 2.0


def read_dict(state):
    return lambda w, x: (w * x * state["k"]).square()


@pytest.mark.parametrize("way", WAYS)
def test_a_python_number_that_changes_between_the_passes(way):
    """CASES 7: never 20 without a word."""
    state = {"k": 2.0}
    loss = way(read_dict(state), live()).sum()
    state["k"] = 5.0
    with pytest.raises(plg.errors.ImpureBodyError, match="has other values in the recomputation of iteration 0"):
        loss.backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_counter_in_the_body(way):
    """CASES 6: the body adds to an attribute on each call."""
    c = Scale()
    c.v = torch.zeros(3, dtype=torch.float64)

    def body(w, x):
        c.v = c.v.detach() + x
        return c.v * w

    loss = way(body, live()).sum()
    with pytest.raises(plg.errors.ImpureBodyError, match="side effect"):
        loss.backward()


def test_case_6_and_7_in_numbers():
    """With the checks off, the wrong numbers that they are there for; with them, 8 each."""
    state = {"k": 2.0}
    x = torch.ones(3, requires_grad=True)
    f = plg.checkpoint(lambda x: (x * state["k"]).square().sum())
    f(x).backward()
    assert x.grad.tolist() == [8.0, 8.0, 8.0]
    x.grad = None
    with plg.run(check="off"):
        loss = f(x)
    state["k"] = 5.0
    loss.backward()
    assert x.grad.tolist() != [8.0, 8.0, 8.0]


@pytest.mark.parametrize("way", [*WAYS, by_while_loop])
def test_a_captured_tensor_changed_between_the_passes(way):
    """CASES 7."""
    table = torch.ones(3, dtype=torch.float64)
    loss = way(lambda w, x: w * x * table, live()).sum()
    table.mul_(1 + 1e-12)  # too little for any comparison of values
    recorded = "modified by an inplace operation"  # the last step of a scan is not recomputed, and torch finds it
    with pytest.raises((ValueError, RuntimeError), match=rf"table \(shape \(3,\) and dtype .*between|{recorded}"):
        loss.backward()


@pytest.mark.parametrize("way", [*WAYS, by_while_loop])
def test_a_captured_tensor_changed_by_the_body(way):
    total = torch.zeros(3, dtype=torch.float64)

    def body(w, x):
        total.add_(x)
        return w * x

    with pytest.raises(plg.errors.ImpureBodyError, match=r"the body changes total .* in place.*plg\.scan"):
        way(body, live())


@pytest.mark.parametrize("fn", [F.batch_norm, torch.batch_norm])
def test_batch_norm_with_captured_statistics(fn):
    """It writes without counting it as a change of the tensor."""
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    by_position = {F.batch_norm: (mean, var, None, None, True), torch.batch_norm: (None, None, mean, var, True)}
    rest = () if fn is F.batch_norm else (0.1, 1e-5, False)
    body = lambda w, x: fn(w * x.expand(2, 3) * torch.tensor([[1.0], [2.0]]), *by_position[fn], *rest)
    with pytest.raises(plg.errors.ImpureBodyError, match=r"the body changes by_position\[.* in place"):
        plg.map(body, live(), XS)
    given = lambda p, x: F.batch_norm(p["w"] * x.expand(2, 3), p["mean"], p["var"], training=True)
    with pytest.raises(plg.errors.ImpureBodyError, match="batch_norm update an input"):
        plg.map(given, {"w": live(), "mean": mean, "var": var}, XS)


def test_a_temporary_may_be_changed_in_place():
    """Also one that comes from where no torch function is seen."""

    def body(w, x):
        y = torch.from_numpy(np.ones(3))
        y += 1
        out = torch.zeros(3, dtype=torch.float64)
        out[:2] = x[:2]
        return w * y * out

    w, ref = live(), live()
    plg.map(body, w, XS).sum().backward()
    torch.stack([body(ref, x) for x in XS]).sum().backward()
    assert_close(w.grad, ref.grad)


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_all_iterations_are_checked_on_demand(chunk_size):
    """An impurity that iteration 0 does not show."""
    state = {"k": 1.0}

    def body(w, x):
        return w * x * torch.where(x[0] == XS[3, 0], state["k"], 1.0)

    def loss(check):
        state["k"] = 1.0
        value = plg.map(body, live(), XS, chunk_size=chunk_size, run=plg.Run(check=check)).sum()
        state["k"] = 2.0
        return value

    loss("first").backward()
    with pytest.raises(plg.errors.ImpureBodyError, match=r"iteration(s 2 to)? 3"):
        loss("all").backward()


def test_a_mask_that_is_not_replayed_is_found_in_half_precision():
    """The comparison is loose enough for two kernels and tight enough for two masks."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64):
        for size in (8, 100, 4096):
            x = torch.randn(size, dtype=dtype)
            masks = [torch.rand(size) < 0.5 for _ in range(2)]
            first, again, rounded = (plg._purity.Digest.of(t) for t in (x * masks[0], x * masks[1], x * (1 + 4e-16)))
            assert not first.agrees(again)
            assert plg._purity.Digest.of(x).agrees(rounded)
            noise = 1 + 0.5 * torch.finfo(dtype).eps * torch.randn(size, dtype=torch.float64)
            assert plg._purity.Digest.of(x).agrees(plg._purity.Digest.of((x * noise).to(dtype)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand(), lambda: float(np.random.randn())])
def test_foreign_draws(way, draw):
    """CASES 31: Python's and numpy's global generators are refused, or replayed on demand."""
    body = lambda w, x: torch.tanh(w * x) * draw()
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(plg.errors.ImpureBodyError, match=r"(global generator of (random|numpy\.random)|other values)"):
        way(body, live()).sum().backward()
    with torch.no_grad():  # nothing will be recomputed
        way(body, W)

    def seeded(f):
        random.seed(1)
        np.random.seed(1)
        w = live()
        f(w).sum().backward()
        return w.grad, draw()

    xs = XS[:1] if way is by_checkpoint else XS
    ys = lambda w: torch.stack([body(w, x) for x in xs])
    ref = seeded(lambda w: ys(w).mean(0) if way is by_mean else ys(w))
    run = plg.Run(generators=(random, np.random))
    assert_close(seeded(lambda w: way(body, w, run=run))[0], ref[0])
    assert seeded(lambda w: way(body, w, run=run))[1] == ref[1]  # the global stream ends where one pass leaves it


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()])
@pytest.mark.parametrize("way", [by_map, by_scan])
def test_foreign_draws_of_later_iterations(way, draw):
    """The values of iteration 0 do not show them."""
    body = lambda w, x: w * x * (draw() if torch.equal(x, XS[2]) else 1.0)
    with pytest.raises(plg.errors.ImpureBodyError, match=r"global generator of (random|numpy\.random)"):
        way(body, live())


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g, dtype=torch.float64)),
    "numpy": (lambda: np.random.default_rng(3), lambda g: torch.from_numpy(g.random(3))),
    "legacy": (lambda: np.random.RandomState(3), lambda g: torch.from_numpy(g.rand(3))),
    "python": (lambda: random.Random(3), lambda g: torch.tensor([g.random() for _ in range(3)], dtype=torch.float64)),
}


@pytest.mark.parametrize("way", [*WAYS, by_while_loop])
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators(kind, way):
    """CASES 31: given to us they are replayed; captured they are refused, by name or by value."""
    make, draw = GENERATORS[kind]
    ref_g, w = make(), live()
    xs = XS[:1] if way is by_checkpoint else XS
    ys = torch.stack([torch.tanh(w * x) * draw(ref_g) for x in xs])
    (ys.mean(0) if way is by_mean else ys).sum().backward()
    g, found = make(), live()
    way(lambda w, x: torch.tanh(w * x) * draw(g), found, run=plg.Run(generators=(g,))).sum().backward()
    assert_close(found.grad, w.grad)
    assert_close(draw(g), draw(ref_g))
    captured = make()
    match = "draws from the generator captured" if kind == "torch" else "other values"
    with pytest.raises(plg.errors.ImpureBodyError, match=match):
        way(lambda w, x: torch.tanh(w * x) * draw(captured), live()).sum().backward()


@pytest.mark.parametrize("order", ["grad", "hessian", "jvp", "scan"])
def test_a_generator_among_the_params(order):
    def ref(w):
        g = torch.Generator().manual_seed(5)
        return sum((torch.sin(w * x) * torch.rand(3, generator=g, dtype=torch.float64)).sum() for x in XS)

    def found(w):
        body = lambda p, x: torch.sin(p["w"] * x) * torch.rand(3, generator=p["g"], dtype=torch.float64)
        params = {"w": w, "g": torch.Generator().manual_seed(5)}
        if order == "scan":
            return plg.scan(lambda p, c, x: (c + body(p, x).sum(), None), params, w.sum() * 0, XS)[0]
        return plg.sum(body, params, XS).sum()

    if order == "jvp":
        assert_close(torch.func.jvp(found, (W,), (XS[0],)), torch.func.jvp(ref, (W,), (XS[0],)))
        return
    transform, plain = torch.func.grad, torch.func.grad
    if order == "hessian":  # torch.func.hessian of the plain loop refuses to draw under vmap
        transform, plain = torch.func.hessian, lambda f: lambda w: torch.autograd.functional.hessian(f, w)
    assert_close(transform(found)(W), plain(ref)(W))


def test_a_generator_made_in_the_body_is_no_side_effect():
    def body(w, x):
        g = torch.Generator().manual_seed(int(x[0] > 0))
        return w * x * torch.rand(3, generator=g, dtype=torch.float64)

    w, ref = live(), live()
    plg.map(body, w, XS).sum().backward()
    torch.stack([body(ref, x) for x in XS]).sum().backward()
    assert_close(w.grad, ref.grad)


def test_what_is_no_generator():
    with pytest.raises(TypeError, match="a int is no random generator"):
        plg.Run(generators=(3,))


@pytest.mark.parametrize("way", WAYS)
def test_default_dtype_of_the_first_pass(way):
    """CASES 4: float64 by default in the first pass, float32 before the backward."""
    body = lambda w, x: w * torch.ones(3) * x / torch.tensor(3.0)
    w, ref = live(), live()
    torch.set_default_dtype(torch.float64)
    try:
        loss, expected = way(body, w).sum(), torch.stack([body(ref, x) for x in XS])
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    {by_mean: expected.mean(0), by_checkpoint: expected[0]}.get(way, expected).sum().backward()
    assert_close(w.grad, ref.grad)


SETTINGS = [
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    (lambda: torch.backends.cudnn.benchmark, lambda v: setattr(torch.backends.cudnn, "benchmark", v), True),
    (lambda: torch.backends.cudnn.deterministic, lambda v: setattr(torch.backends.cudnn, "deterministic", v), True),
    (torch.get_default_device, torch.set_default_device, torch.device("meta")),
    (torch.is_grad_enabled, lambda v: None, True),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=range(len(SETTINGS)))
def test_settings_of_the_first_pass(setting):
    """Each holds in the second pass, and is what it was around it."""
    get, put, value = setting
    before, seen = get(), []

    def body(w, x):
        seen.append(get())
        return w * x

    put(value)
    try:
        loss = plg.map(body, live(), XS).sum()
    finally:
        put(before)
    loss.backward()
    assert seen == [value] * 8
    assert get() == before


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("way", [by_map, by_scan, by_mean])
def test_raising_anywhere_changes_nothing_global(way, at):
    """The user's exception passes as it is, with the iteration and the shapes, whichever call of the body raises."""
    calls = []

    def body(w, x):
        calls.append(0)
        torch.rand(2)
        if len(calls) == at + 1:
            raise ZeroDivisionError("mine")
        return F.dropout(w * x)

    def settings():
        threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
        return threads, grad, *(get() for get, _, _ in SETTINGS), torch.is_autocast_enabled("cpu")

    before = settings()
    torch.manual_seed(0)
    w = live()
    states = []

    def step():
        loss = way(body, w).sum()
        states.append(torch.get_rng_state())
        torch.set_default_dtype(torch.float64)  # the second pass has something to restore
        try:
            loss.backward()
        finally:
            torch.set_default_dtype(torch.float32)

    with pytest.raises(ZeroDivisionError, match=r"^mine") as caught:
        step()
    assert settings() == before
    notes = " ".join(getattr(caught.value, "__notes__", ["iteration shape (3,)"]))
    assert re.search(r"iteration \d of 4.*shape \(3,\)", notes)
    assert w.grad is None
    if at >= 4:
        assert torch.equal(torch.get_rng_state(), states[0])
    ys = way(lambda w, x: w * x, w)  # and everything still works
    assert torch.isfinite(torch.autograd.grad(ys.sum(), w)[0]).all()


class Doubled(torch.autograd.Function):
    """The old style: no setup_context, so torch.func transforms refuse it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


@pytest.mark.parametrize("outer", ["backward", "grad", "vjp"])
def test_an_old_autograd_function(outer):
    """With chunk_size=1 it works where the plain loop under torch.func does not; chunks and jvp say what to do."""
    body = lambda w, x: Doubled.apply(w * x)
    expected = (2 * W * XS.square()).sum(0)
    loss = lambda w: plg.map(body, w, XS).sum()
    if outer == "backward":
        w = live()
        loss(w).backward()
        assert_close(w.grad, expected)
    elif outer == "grad":
        assert_close(torch.func.grad(loss)(W), expected)
    else:
        assert_close(plg.vjp(body, W, XS)[1](torch.ones_like(XS))[0], expected)
    with pytest.raises(RuntimeError, match="setup_context") as caught:
        plg.map(body, W, XS, chunk_size=2)
    assert "chunk_size=1" in " ".join(getattr(caught.value, "__notes__", ["chunk_size=1"]))
    with pytest.raises(RuntimeError, match="setup_context") as caught:
        torch.func.jvp(loss, (W,), (W,))
    assert "of iteration 0" in " ".join(getattr(caught.value, "__notes__", ["of iteration 0"]))


def test_control_flow_on_data():
    body = lambda w, x: torch.sin(w * x) if x.sum() > 0 else torch.cos(w * x)
    w, ref = live(), live()
    plg.map(body, w, XS).sum().backward()
    torch.stack([body(ref, x) for x in XS]).sum().backward()
    assert_close(w.grad, ref.grad)
    with pytest.raises(RuntimeError, match="data-dependent") as caught:
        plg.map(body, W, XS, chunk_size=2)
    assert "chunk_size=1" in " ".join(getattr(caught.value, "__notes__", ["chunk_size=1"]))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_importing_starts_no_thread():
    """Else what forks afterwards, a loader's workers for instance, may hang in its first operation."""
    count = "print(len(os.listdir('/proc/self/task')))"
    library = "import pure_loopgrad, pure_loopgrad.distributed, pure_loopgrad.testing"
    script = f"import os, torch; {count}; {library}; {count}"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    before, after = done.stdout.split()
    assert after == before


def test_hooks_on_what_the_body_computes():
    """They work in the recomputation; a first pass has no graph for them, and says so."""
    xs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def hooked(p, x):
        h = p * x
        if h.requires_grad:
            h.register_hook(lambda g: g * 2)
        return h.tanh()

    grads = []
    for loop in (lambda p: plg.map(hooked, p, xs), lambda p: torch.stack([hooked(p, x) for x in xs])):
        p = torch.ones(3, dtype=torch.float64, requires_grad=True)
        loop(p).sum().backward()
        grads.append(p.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=0)

    with pytest.raises(RuntimeError, match="hook") as caught:
        plg.map(lambda p, x: (p * x).register_hook(lambda g: g), p, xs)
    assert "where h.requires_grad" in " ".join(getattr(caught.value, "__notes__", ["where h.requires_grad"]))
