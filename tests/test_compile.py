"""torch.compile around the body, around the whole, on the pullback: the same numbers, or a graph break."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor

import pure_loopgrad as plg
from pure_loopgrad import _early_stop
from pure_loopgrad.testing import assert_close, peak_bytes

W = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
XS = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


def body(w, x):
    return F.dropout(torch.tanh(w @ x), 0.5)


def plain(body):
    return lambda w, xs: torch.stack([body(w, x) for x in xs]).square().sum()


def by_scan(body):
    return lambda w, xs: plg.scan(lambda w, c, x: (c, body(w, x)), w, torch.zeros(()), xs)[1].square().sum()


def by_checkpoint(body):
    call = plg.checkpoint(body)
    return lambda w, xs: torch.stack([call(w, x) for x in xs]).square().sum()


WAYS = {
    "map": lambda body: lambda w, xs: plg.map(body, w, xs).square().sum(),
    "mean": lambda body: lambda w, xs: plg.mean(lambda w, x: body(w, x).square(), w, xs).sum() * len(xs),
    "scan": by_scan,
    "checkpoint": by_checkpoint,
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    with inductor.patch(fallback_random=True):  # else inductor draws numbers of its own
        yield
    torch.compiler.reset()


def step(loss):
    w = W.clone().requires_grad_()
    torch.manual_seed(1)
    value = loss(w, XS)
    value.backward()
    return value.detach(), w.grad, torch.get_rng_state()


def by_func(loss):
    torch.manual_seed(1)
    g, value = loss(W, XS)
    return value, g, torch.get_rng_state()


@pytest.mark.filterwarnings("ignore")  # dynamo warns of each graph break
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiled", ["body", "whole", "body and whole", "grad"])
def test_compiled(compiled, way, backend):
    """CASES 32: equal to eager with the same seed, twice, and the generator where it leaves it."""
    compile_ = lambda f: torch.compile(f, backend=backend)
    ref = step(plain(body))
    loss = WAYS[way](compile_(body) if "body" in compiled else body)
    if compiled == "grad":
        run, loss = by_func, compile_(torch.func.grad_and_value(loss))
    else:
        run, loss = step, compile_(loss) if "whole" in compiled else loss
    for _ in range(2):
        assert_close(run(loss), ref)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_pullback_and_value_and_grad(backend):
    value, grad, _ = step(plain(body))
    torch.manual_seed(1)
    ys, pullback = plg.vjp(body, W, XS)
    assert_close(torch.compile(pullback, backend=backend)(2 * ys)[0], grad)
    f = plg.value_and_grad(body, lambda w, ys: ys.square().sum())
    torch.manual_seed(1)
    assert_close(torch.compile(f, backend=backend)(W, XS), (value, grad))


@needs_compiler
@inductor.patch(fallback_random=False)
def test_the_mask_of_a_compiled_body_is_that_of_its_first_pass():
    """Inductor's own random numbers are not those of eager, but its second pass sees those of the first."""
    compiled = torch.compile(lambda w, x: F.dropout(w * x, 0.5))
    w = torch.ones(64, requires_grad=True)
    xs = torch.randn(3, 64)
    ys = plg.map(compiled, w, xs)
    ys.sum().backward()
    assert_close(w.grad, ys.detach().sum(0), rtol=1e-5)  # d(m w x)/dw = m x = y at w = 1; in float32
    assert (ys == 0).sum() not in (0, ys.numel())


def noting_backend():
    """A list of graphs, and a backend that adds each one that is compiled."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return graphs, backend


def test_a_compiled_body_stays_compiled():
    """The look-out for captured tensors must not make dynamo give the body up."""
    graphs, backend = noting_backend()
    compiled = torch.compile(lambda w, x: torch.tanh(w @ x), backend=backend)
    plg.map(compiled, W, XS)
    first = len(graphs)
    assert first > 0
    plg.map(compiled, W, XS)
    assert len(graphs) == first


def some_memory_measured(compiled, w, xs):
    peak_bytes(lambda: plg.map(compiled, w, xs))


@pytest.mark.parametrize(
    "before",
    [
        lambda compiled, w, xs: plg.value_and_grad(compiled, lambda _, y: y.sum())(w, xs),
        lambda compiled, w, xs: plg.value_and_grad(compiled, lambda _, y: y.sum(), run=plg.Run(save=200))(w, xs),
        lambda compiled, w, xs: plg.plan(compiled, w, xs),
        some_memory_measured,
    ],
)
def test_a_compiled_body_runs_compiled_in_every_chunk(before):
    """A mode that sees operations makes dynamo give up what is called under it, for good, unless it is told not to."""
    runs = []

    def backend(graph, inputs):
        def run(*tensors):
            runs.append(1)
            return graph(*tensors)

        return run

    def body(w, x):
        return torch.tanh(w @ x)

    xs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    w = torch.eye(3) + 0.5
    compiled = torch.compile(body, backend=backend)
    gradient = plg.value_and_grad(compiled, lambda _, y: y.sum(), run=plg.Run(check="off"))
    before(compiled, w, xs)
    runs.clear()
    found = gradient(w, xs)[1]
    assert len(runs) == 2 * 8
    live = w.clone().requires_grad_()
    torch.stack([body(live, x) for x in xs]).sum().backward()
    assert_close(found, live.grad, rtol=1e-6)  # in float32


def test_dynamo_keeps_out_of_the_modes_of_this_library():
    """Once dynamo has given a function up, as it does under torch.vmap, it looks at all that this function calls."""
    graphs, backend = noting_backend()
    compiled = torch.compile(lambda w, x: torch.tanh(w @ x), backend=backend)
    xs = torch.ones(8, 3)
    compiled(torch.eye(3), xs[0])
    torch.vmap(compiled, (None, 0))(torch.eye(3), xs)
    graphs.clear()
    plg.value_and_grad(compiled, lambda _, y: y.sum(), run=plg.Run(check="off"))(torch.eye(3), xs)
    assert graphs == []


@needs_compiler
def test_a_product_that_compiled_code_takes_is_computed(monkeypatch):
    """No mode sees what that code does, but the output shows that something was made of the product."""
    monkeypatch.setattr(_early_stop, "WORTHWHILE", {"cpu": 0, "other": 0})
    calls = []
    compiled = torch.compile(lambda y: y * y.sin())

    def body(w, x):
        calls.append(1)
        return compiled(torch.tanh(x) @ w)

    w = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    xs = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(1))
    found = plg.value_and_grad(body, lambda _, y: y.sum(), run=plg.Run(check="off"))(w, xs)[1]
    assert len(calls) == 2 * 8  # no chunk was tried in part, and run once more
    live = w.clone().requires_grad_()
    torch.stack([(y := torch.tanh(x) @ live) * y.sin() for x in xs]).sum().backward()
    assert_close(found, live.grad, rtol=1e-5)  # in float32


def test_compiling_loads_no_compiler_by_itself():
    """To import torch._dynamo takes a second, which only those who compile should wait."""
    import subprocess  # only here
    import sys

    program = """
import sys, torch, pure_loopgrad as plg
plg.map(lambda w, x: w * x, torch.ones(2, requires_grad=True), torch.ones(3, 2)).sum().backward()
plg.value_and_grad(lambda w, x: w * x, lambda _, y: y.sum(), run=plg.Run(save=16))(torch.ones(2), torch.ones(8, 2))
from pure_loopgrad.testing import peak_bytes
peak_bytes(lambda: torch.ones(2) + 1)
assert "torch._dynamo" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
