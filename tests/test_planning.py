"""Plans: the predicted peak against the counted one; chunk sizes; progress."""

from __future__ import annotations

import functools
import re
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pure_loopgrad as plg
from pure_loopgrad import _throughput
from pure_loopgrad._measure import Subject
from pure_loopgrad._reduce import Options
from pure_loopgrad._throughput import fastest
from pure_loopgrad.testing import peak_bytes


def cnn():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 1, 3)]
    body, params = plg.from_module(nn.Sequential(*layers))
    return body, {k: p.detach() for k, p in params.items()}, torch.randn(24, 1, 1, 32, 32)


def bag():
    """An encoder of patches and the score of attention pooling, as in multiple-instance learning."""
    params = {"A": torch.randn(64, 192) / 14, "B": torch.randn(64, 64) / 8, "v": torch.randn(64)}

    def body(p, x):
        h = torch.relu(p["B"] @ torch.relu(p["A"] @ x.reshape(-1)))
        return {"h": h, "score": torch.tanh(h) @ p["v"]}

    return body, params, torch.randn(40, 3, 8, 8)


def tiny():
    return lambda w, x: torch.tanh(w @ x), torch.randn(32, 32) / 6, torch.randn(100, 32)


def mlp():
    params = {"A": torch.randn(128, 64) / 8, "B": torch.randn(32, 128) / 11}
    return lambda p, x: p["B"] @ torch.nn.functional.gelu(p["A"] @ x), params, torch.randn(64, 64)


WORKLOADS = {"cnn": cnn, "bag": bag, "tiny": tiny, "mlp": mlp}


def tensors(tree):
    return list(tree.values()) if isinstance(tree, dict) else [tree]


def streamed(body, params, xs, reduce, chunk_size):
    live = {k: p.clone().requires_grad_() for k, p in params.items()} if isinstance(params, dict) else None
    live = params.clone().requires_grad_() if live is None else live
    loop = {"stack": plg.map, "sum": plg.sum, "mean": plg.mean}[reduce]

    def run():
        # without the digest of the first chunk, which is large beside so small a body
        ys = tensors(loop(body, live, xs, chunk_size=chunk_size, run=plg.Run(check="off")))
        torch.autograd.grad(ys, tensors(live), [torch.ones_like(y) for y in ys])

    return peak_bytes(run)


def plain(body, params, xs, reduce):
    live = {k: p.clone().requires_grad_() for k, p in params.items()} if isinstance(params, dict) else None
    live = params.clone().requires_grad_() if live is None else live

    def run():
        outs = [tensors(body(live, x)) for x in xs]
        ys = [torch.stack(y) if reduce == "stack" else sum(y[1:], y[0]) for y in zip(*outs, strict=True)]
        del outs
        torch.autograd.grad(ys, tensors(live), [torch.ones_like(y) for y in ys])

    return peak_bytes(run)


@pytest.mark.parametrize("chunk_size", [1, 4, 17, 100])
@pytest.mark.parametrize("reduce", ["stack", "sum", "mean"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_predicted_peak(name, reduce, chunk_size):
    """Within 15 % of the counted one; found without a number of data."""
    body, params, xs = WORKLOADS[name]()
    predicted = Subject(body, params, xs, Options(reduce)).peak(len(xs), chunk_size)
    assert predicted == pytest.approx(streamed(body, params, xs, reduce, chunk_size), rel=0.15)


@pytest.mark.parametrize("reduce", ["stack", "sum"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_predicted_peak_of_the_full_graph(name, reduce):
    body, params, xs = WORKLOADS[name]()
    assert Subject(body, params, xs, Options(reduce)).full_graph(len(xs)) == pytest.approx(
        plain(body, params, xs, reduce), rel=0.15
    )


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_chunk_fits_the_budget(name):
    body, params, xs = WORKLOADS[name]()
    budget = 2 * streamed(body, params, xs, "stack", 2)
    plan = plg.plan(body, params, xs, memory_budget=budget)
    assert plan.chunk_size > 1
    assert streamed(body, params, xs, "stack", plan.chunk_size) <= 1.15 * budget
    seen = []
    with plg.run(memory_budget=budget, progress=lambda done, n, what: seen.append(done)):
        plg.map(body, params, xs, chunk_size="auto")
    assert 1 <= seen[0] <= plan.chunk_size


@pytest.fixture
def calls(monkeypatch):
    """The calls of a body, which are the time: a clock that no other program disturbs."""
    ticks = []
    monkeypatch.setattr(_throughput, "time", types.SimpleNamespace(perf_counter=lambda: len(ticks)))
    monkeypatch.setattr(_throughput, "LONG", float("inf"))
    return ticks


def test_auto_is_found_once_for_each_shape(calls):
    def body(w, x):
        calls.append(0)
        return torch.tanh(w @ x)

    f = plg.value_and_grad(body, lambda w, ys: ys.sum(), chunk_size="auto")
    w = torch.ones(8, 8)
    counts = []
    for xs in (torch.ones(6, 8), torch.ones(6, 8), torch.ones(7, 8), torch.ones(6, 8)):
        calls.clear()
        f(w, xs)
        counts.append(len(calls))
    assert counts[1] == counts[3] == 2  # one chunk, twice
    assert counts[0] > 2
    assert counts[2] > 2


def test_auto_is_found_once_for_a_body_whatever_calls_it():
    """A training loop calls `plg.map` in each step, with a closure that is made anew."""
    calls = []

    def step():
        return plg.map(lambda w, x: (calls.append(0), torch.tanh(w @ x))[1], w, xs, chunk_size="auto")

    w, xs = torch.ones(8, 8), torch.ones(6, 8)
    step()
    calls.clear()
    step()
    assert 1 <= len(calls) <= 6


@pytest.mark.parametrize(
    ("seconds", "largest", "best", "tried"),
    [
        ({1: 8, 2: 4, 4: 2, 8: 1}, 8, 8, [1, 2, 4, 8]),
        ({1: 8, 2: 4, 4: 3.9, 8: 3.85, 16: 1}, 16, 2, [1, 2, 4, 8]),
        ({1: 8, 2: 9, 4: 7, 6: 5}, 6, 6, [1, 2, 4, 6]),
        ({1: 8}, 1, 1, []),
    ],
)
def test_the_fastest_chunk(seconds, largest, best, tried):
    seen = []
    assert fastest(lambda size: (seen.append(size), seconds[size])[1], largest) == best
    assert seen == tried


def test_auto_is_measured_on_the_data_and_takes_large_chunks_of_a_tiny_body(calls):
    seen = []
    run = plg.Run(progress=lambda done, n, what: seen.append(done))
    w, xs = torch.ones(8, 8), torch.randn(4096, 8)
    plg.map(lambda w, x: (calls.append(0), torch.tanh(w @ x))[1], w, xs, chunk_size="auto", run=run)
    assert seen[0] == 4096


def test_measuring_is_not_noticed():
    """Neither by generators nor by buffers, nor by live parameters."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Dropout(0.5))
    body, params = plg.from_module(net)
    xs = torch.randn(8, 6, 3)
    results = []
    for size in (1, "auto"):
        torch.manual_seed(0)
        one = plg.map(body, params, xs[:0], chunk_size=size, randomness="different")
        results.append((one, torch.get_rng_state()))
        plg.map(body, params, xs, chunk_size=size, randomness="different").sum().backward()
    assert torch.equal(results[0][1], results[1][1])
    counted = nn.BatchNorm1d(3)
    body, params = plg.from_module(counted)
    plg.map(body, params, xs, chunk_size="auto")
    assert counted.num_batches_tracked == 8


def test_the_rule():
    body, params, xs = cnn()
    assert plg.plan(body, params, xs, memory_budget=2**40).rule == "full graph"
    plan = plg.plan(body, params, xs, memory_budget=2**21)
    assert plan.rule == "two passes"
    assert [c.name for c in plan.choices] == ["full graph", "two passes"]
    scalar = lambda p, x: body(p, x).sum()
    assert plg.plan(scalar, params, xs, memory_budget=2**21, reduce="sum").rule == "one pass"
    nothing = plg.plan(body, params, xs, memory_budget=0)
    assert nothing.rule == "two passes"
    assert nothing.chunk_size == 1
    assert not any(c.fits for c in nothing.choices)


def test_numbers_of_the_plan():
    plan = plg.plan(lambda w, x: torch.tanh(w @ x), torch.ones(64, 64), torch.ones(1000, 64), memory_budget=10**9)
    assert (plan.n, plan.outputs, plan.gradients) == (1000, 256, 64 * 64 * 4)
    assert plan.residuals == 256  # tanh keeps its result, which the stack copies
    full, two = plan.choices
    assert full.time == 1
    assert two.time == pytest.approx(4 / 3)  # torch counts no operations of a matrix and a vector: B = 2 F then


def test_the_table():
    text = str(plg.plan(*mlp(), memory_budget=2**20))
    assert re.search(r"n = 64, chunk_size = \d+, budget 1\.0 MiB: (full graph|two passes)", text)
    assert re.search(r"two passes +[\d.]+ +[\d.]+  (yes|no)", text)


def test_a_body_that_cannot_be_vmapped_runs_one_at_a_time():
    body = lambda w, x: w * x if x.sum() > 0 else w
    w, xs = torch.ones(3), torch.randn(5, 3)
    assert torch.equal(plg.map(body, w, xs, chunk_size="auto"), torch.stack([body(w, x) for x in xs]))
    with pytest.raises(plg.errors.ShapeInferenceError, match="Choose chunk_size yourself"):
        plg.plan(body, w, xs)


def test_auto_draws_what_chunks_of_one_draw():
    """A body that draws is not vmapped unless randomness= allows it, and measuring draws nothing."""
    drop = lambda w, x: torch.nn.functional.dropout(w * x)
    w, xs = torch.ones(3), torch.randn(5, 3)
    torch.manual_seed(0)
    ref = torch.stack([drop(w, x) for x in xs])
    torch.manual_seed(0)
    assert torch.equal(plg.map(drop, w, xs, chunk_size="auto"), ref)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.jacrev, torch.func.hessian])
def test_auto_where_what_is_given_is_computed_inside_a_transform(transform):
    w, xs = torch.randn(3), torch.randn(37, 3)
    _throughput._found.clear()
    body = lambda p, x: torch.sin(p * x)
    ours = lambda w: plg.map(body, 2 * w[:3], xs * w, chunk_size="auto").square().sum()
    plain = lambda w: torch.sin(2 * w * xs * w).square().sum()
    assert torch.allclose(transform(ours)(w), transform(plain)(w), rtol=1e-3, atol=1e-4)
    assert [list(sizes.values()) for sizes in _throughput._found.values()] == [[37]]


def test_planning_touches_no_buffers():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    body, params = plg.from_module(net)
    plg.plan(body, params, torch.randn(4, 8, 3))
    assert net[1].num_batches_tracked == 0


def test_progress_of_a_map():
    seen = []
    w = torch.ones(3, requires_grad=True)
    run = plg.Run(progress=lambda done, n, what: seen.append((done, n, what)))
    plg.map(lambda w, x: w * x, w, torch.ones(5, 3), chunk_size=2, run=run).sum().backward()
    assert seen == [(d, 5, what) for what in ("forward pass", "vjp") for d in (2, 4, 5)]


@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 2])
def test_progress_of_a_scan(checkpoints):
    seen = []
    w = torch.ones(3, requires_grad=True)
    with plg.run(progress=lambda done, n, what: seen.append((done, what))):
        c, _ = plg.scan(lambda w, c, x: (c * w + x, None), w, torch.ones(3), torch.ones(6, 3), checkpoints=checkpoints)
    assert [d for d, what in seen if what == "forward pass"] == [1, 2, 3, 4, 5, 6]
    c.sum().backward()
    backward = [d for d, what in seen if what == "vjp"]
    assert backward == sorted(backward)
    assert backward[-1] == 6


def test_progress_bars(capsys):
    plg.map(lambda w, x: w * x, torch.ones(3), torch.ones(5, 3), run=plg.Run(progress=True))
    assert re.search(r"forward pass.*5/5", capsys.readouterr().err)


def test_progress_bars_without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ValueError, match=r"pip install 'pure_loopgrad\[progress\]'"):
        plg.map(lambda w, x: w * x, torch.ones(3), torch.ones(5, 3), run=plg.Run(progress=True))


@pytest.mark.parametrize(
    ("option", "value"),
    [("progress", 3), ("progress", None), ("compile", "yes"), ("compile", 1), ("report", 3), ("generators", 3)],
)
def test_options_of_another_type(option, value):
    with pytest.raises(plg.errors.LoopTypeError, match=f"{option}={value!r}: expected"):
        plg.Run(**{option: value})


class Queries(nn.Module):
    """Attention of learned queries: a submodule whose input is a bare parameter."""

    def __init__(self):
        super().__init__()
        self.q = nn.Parameter(torch.randn(3, 8))
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return self.attention(self.q, x, x)[0]


BARE = {
    "queries": lambda: (Queries(), torch.randn(5, 7, 8)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), torch.randn(5, 8)),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)), torch.randn(5, 8)),
}


@pytest.mark.parametrize("name", BARE)
def test_a_plan_for_a_module_that_is_called_on_a_bare_parameter(name):
    net, xs = BARE[name]()
    plan = plg.plan(*plg.from_module(net), xs, memory_budget=2**20)
    assert [c.name for c in plan.choices] == ["full graph", "two passes"]
    assert 1 < plan.choices[1].time <= 2


@pytest.mark.parametrize("name", WORKLOADS)
def test_operations_are_those_of_torchs_counter(name):
    body, params, xs = WORKLOADS[name]()
    with FlopCounterMode(display=False) as forward:
        body(params, xs[0])
    found = Subject(body, params, xs, Options()).flops()[0]
    assert found == forward.get_total_flops()
    assert (found > 0) is (name == "cnn")  # torch has no formula for a matrix times a vector


def dropping(training):
    return lambda w, x: nn.functional.dropout(torch.tanh(w * x), 0.5, bool(training))


def dropping_in_part(training):
    return functools.partial(lambda w, x, *, training: nn.functional.dropout(w * x, 0.5, training), training=training)


@pytest.mark.parametrize("make", [dropping, dropping_in_part, lambda flag: dropping(int(flag))])
def test_auto_of_closures_that_differ_in_a_switch(make):
    """A chunk in which a body without dropout is fast is none for a body with dropout, of the same code."""
    w, xs = torch.ones(4), torch.randn(64, 4)
    for flag in (False, True, False):
        f = make(flag)
        torch.manual_seed(0)
        ys = plg.map(f, w, xs, chunk_size="auto")
        torch.manual_seed(0)
        assert torch.allclose(ys, torch.stack([f(w, x) for x in xs]))


@pytest.mark.parametrize("wrapped", [False, True])
def test_auto_in_eval_and_in_train_mode(wrapped):
    net, xs = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)), torch.randn(64, 4)
    body, params = plg.from_module(net)
    f = (lambda p, x: body(p, x)) if wrapped else body
    for training in (False, True, False):
        net.train(training)
        torch.manual_seed(0)
        ys = plg.map(f, params, xs, chunk_size="auto")
        torch.manual_seed(0)
        assert torch.allclose(ys, torch.stack([net(x) for x in xs]))


def test_auto_measures_once_for_closures_that_differ_in_a_number(calls):
    def step(i):
        def body(w, x):
            calls.append(0)
            return torch.tanh(w @ x) / i

        calls.clear()
        plg.map(body, torch.ones(8, 8), torch.ones(6, 8), chunk_size="auto")
        return len(calls)

    counts = [step(i) for i in (1, 2, 3)]
    assert counts[0] > counts[1] == counts[2]
