"""Run(compile=...): chunks and steps through torch.compile give the numbers of the plain loop, or run as they are."""

from __future__ import annotations

import functools
import gc
import itertools
import shutil
import warnings
import weakref
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import pure_loopgrad as plg
from pure_loopgrad import _compile
from pure_loopgrad.errors import CapturedTensorError, ImpureBodyError
from pure_loopgrad.testing import assert_close

G = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, generator=G, dtype=torch.float64)
B = torch.randn(3, generator=G, dtype=torch.float64)
XS = torch.randn(7, 3, generator=G, dtype=torch.float64)
P = {"W": W, "more": [B]}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


class Graphs:
    """A compiler that counts what it compiles, and a compiled function's calls."""

    def __init__(self, **options):
        self.compiled = self.calls = 0
        self.options = options

    def __call__(self, fn):
        def backend(graph, inputs):
            self.compiled += 1
            return functools.partial(self._run, graph)

        return torch.compile(fn, backend=backend, fullgraph=True, **self.options)

    def _run(self, graph, *args):
        self.calls += 1
        return graph(*args)


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    _compile._entries.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs():
    return Graphs()


def body(p, x):
    return torch.tanh(p["W"] @ x + p["more"][0])


def square(_, y):
    return y.square().sum()


def looped(reduce):
    """The plain loop."""

    def f(p, xs):
        ys = torch.stack([body(p, x) for x in xs])
        return ys if reduce == "stack" else ys.sum(0) if reduce == "sum" else ys.mean(0)

    return f


STACKS = {
    "grad": lambda f: grad(f)(P),
    "jvp": lambda f: jvp(f, (P,), (P,)),
    "jvp of grad": lambda f: jvp(grad(f), (P,), (P,)),
    "grad of grad": lambda f: grad(lambda p: grad(f)(p)["W"].square().sum())(P),
    "vmap of grad": lambda f: vmap(lambda s: grad(f)({"W": s * W, "more": [B]}))(torch.arange(1.0, 4.0).double()),
    "grad of vmap": lambda f: grad(lambda w: vmap(lambda s: f({"W": s * w, "more": [B]}))(XS[:, 0]).square().sum())(W),
    "hessian": lambda f: hessian(lambda b: f({"W": W, "more": [b]}))(B),
    "jacrev": lambda f: jacrev(lambda b: f({"W": W, "more": [b]}))(B),
    "jacfwd of jacrev": lambda f: jacfwd(jacrev(lambda b: f({"W": W, "more": [b]})))(B),
}
CALLS = {"stack": plg.map, "sum": plg.sum, "mean": plg.mean}


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("reduce", CALLS)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_every_transform(stack, reduce, chunk_size, graphs):
    ref = STACKS[stack](lambda p: looped(reduce)(p, XS).square().sum())
    run = plg.Run(compile=graphs)
    found = STACKS[stack](lambda p: CALLS[reduce](body, p, XS, chunk_size=chunk_size, run=run).square().sum())
    assert_close(found, ref)
    assert graphs.calls > 0


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _module(run):
    return plg.value_and_grad(plg.from_module(NET)[0], square, run=run)(plg.from_module(NET)[1], XS)


def _scan(run, **options):
    def f(w):
        carry, ys = plg.scan(lambda p, c, x: (torch.tanh(p @ c + x), c * x), w, B, XS, run=run, **options)
        return carry.square().sum() + ys.sum()

    return torch.func.grad_and_value(f)(W)


def _scan_backward(run):
    w = W.clone().requires_grad_()
    plg.scan(lambda p, c, x: (torch.tanh(p @ c + x), None), w, B, XS, run=run, checkpoints=3)[0].sum().backward()
    return w.grad


def _fori(run):
    return grad(lambda w: plg.fori_loop(0, 6, lambda p, i, c: torch.tanh(p @ c) + i, w, B, run=run).sum())(W)


def _vg(f, loss=square, params=P, **options):
    return lambda run: plg.value_and_grad(f, loss, run=run, **options)(params, XS)


WEIGHTS = torch.tensor([1.0, 0, 2, 0, 0, 3, 1])
CASES = {
    "stack": _vg(body),
    "xs": _vg(body, argnums=(0, 1), chunk_size=2),
    "one pass": _vg(lambda p, x: body(p, x).sum(), lambda _, y: -F.logsigmoid(y), reduce="sum", chunk_size=2),
    "one pass of K": _vg(body, reduce="mean", plan="one_pass", chunk_size=3),
    "no loss": _vg(lambda p, x: body(p, x).sum(), None, reduce="mean"),
    "batched": _vg(lambda p, x: torch.tanh(x @ p["W"]), batched=True, chunk_size=3),
    "weights": _vg(body, reduce="mean", weights=WEIGHTS, chunk_size=2),
    "grad_weights": _vg(body, grad_weights=WEIGHTS, chunk_size=2),
    "named tuple": _vg(lambda p, x: Pair(torch.tanh(p.a @ x), p.b * x), lambda _, y: y.a.sum() + y.b.square().sum(),
                       Pair(W, B)),
    "constants in params": _vg(lambda p, x: torch.tanh(p["W"] @ x) * p["k"] if p["act"] == "tanh" else x,
                               params={"W": W, "k": 2.5, "act": "tanh", "none": None}),
    "numbers in the output": _vg(lambda p, x: (body(p, x), 2.0), lambda _, y: (y[0].sum(1) * y[1]).sum()),
    "module": _module,
    "scan": _scan,
    "scan, 3 carries": functools.partial(_scan, checkpoints=3),
    "scan, all carries, reverse": functools.partial(_scan, checkpoints="all", reverse=True),
    "scan, truncated": functools.partial(_scan, truncate=3),
    "scan, backward": _scan_backward,
    "fori_loop": _fori,
    "per_iteration_grads": lambda run: plg.per_iteration_grads(lambda p, x: body(p, x).sum(), P, XS, run=run),
    "grad_stats": lambda run: plg.grad_stats(lambda p, x: body(p, x).sum(), P, XS, chunk_size=2, run=run),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_equal_to_eager_and_compiled_once(case, graphs):
    """Eager is held to the plain loop elsewhere; here, that this compiles, and that a second call finds it."""
    ref = CASES[case](plg.Run())
    assert_close(CASES[case](plg.Run(compile=graphs)), ref)
    compiled, calls = graphs.compiled, graphs.calls
    assert calls > 1
    assert_close(CASES[case](plg.Run(compile=graphs)), ref)
    assert graphs.compiled == compiled
    assert graphs.calls == 2 * calls


@needs_compiler
@pytest.mark.parametrize("case", ["stack", "one pass", "scan, 3 carries"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_true_is_inductor(case):
    ref = CASES[case](plg.Run())
    assert_close(CASES[case](plg.Run(compile=True)), ref)
    assert _compile._entries
    assert not any(entry.broken for entries in _compile._entries.values() for entry in entries.values())


def test_check_off_compiles_the_first_chunk_of_later_passes(graphs):
    """With one chunk, the first pass shows what the body returns, and the second one is compiled, and the loss."""
    f = lambda check: plg.value_and_grad(body, square, chunk_size=None, run=plg.Run(compile=graphs, check=check))
    f("first")(P, XS)
    assert graphs.calls == 1
    assert_close(f("off")(P, XS), f("first")(P, XS))
    assert graphs.calls == 1 + 2 + 1


def test_a_closure_made_anew_is_not_compiled_anew(graphs):
    def make(scale):
        return lambda p, x: scale * body(p, x)

    for _ in range(3):
        plg.value_and_grad(make(2.0), square, run=plg.Run(compile=graphs))(P, XS)
    assert graphs.compiled == 3  # the body, its vjp, the loss


def test_a_captured_value_that_changes_is_seen(graphs):
    """Of a number, a tensor, a global and an attribute: between calls, each call uses what holds then."""
    state = {"scale": 1.0, "shift": torch.zeros(3, dtype=torch.float64)}

    def f(p, x):
        return state["scale"] * body(p, x) + state["shift"]

    for scale, shift in itertools.product((1.0, 2.0, 5.0), (0.0, 1.0)):
        state |= {"scale": scale, "shift": torch.full((3,), shift, dtype=torch.float64)}
        found = plg.map(f, P, XS, run=plg.Run(compile=graphs))
        assert_close(found, torch.stack([f(P, x) for x in XS]))
    assert graphs.calls > 0


@pytest.mark.parametrize("chunk_size", [1, 2])
def test_a_body_that_draws_runs_as_it_is(chunk_size, graphs):
    """A draw that only one of two passes needs could be left out there, and shift all that follow."""
    noisy = lambda p, x: F.dropout(body(p, x) + 0 * torch.rand(()), 0.5)
    f = lambda run: plg.value_and_grad(noisy, square, chunk_size=chunk_size, randomness="different", run=run)
    results = []
    for run in (plg.Run(), plg.Run(compile=graphs)):
        torch.manual_seed(3)
        results.append((f(run)(P, XS), torch.get_rng_state()))
    assert_close(*results)
    assert graphs.calls == 1  # the loss


def test_a_scan_that_draws_runs_as_it_is(graphs):
    def f(w, run):
        return plg.scan(lambda p, c, x: (F.dropout(torch.tanh(p @ c + x), 0.5), None), w, B, XS, run=run)[0].sum()

    grads = []
    for run in (plg.Run(), plg.Run(compile=graphs)):
        torch.manual_seed(3)
        grads.append(grad(lambda w, run=run: f(w, run))(W))
    assert_close(*grads)
    assert graphs.calls == 0


def test_buffers_are_updated_once(graphs):
    def trained(run):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        g = plg.value_and_grad(plg.from_module(net)[0], square, run=run)(
            plg.from_module(net)[1], XS[:6].reshape(3, 2, 3)
        )
        return g, dict(net.named_buffers())

    assert_close(trained(plg.Run(compile=graphs)), trained(plg.Run()))


@pytest.mark.parametrize(
    "broken",
    [
        lambda p, x: body(p, x) if x.sum() > 0 else body(p, 2 * x),
        lambda p, x: plg.map(lambda q, s: s * body(q, x), p, XS[:, 0]).sum(0),
    ],
    ids=["branch on data", "loop inside"],
)
def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning(broken, graphs):
    ref = plg.value_and_grad(broken, square)(P, XS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert_close(plg.value_and_grad(broken, square, run=plg.Run(compile=graphs))(P, XS), ref)
    said = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(said) == 1
    assert "<lambda> cannot be compiled" in said[0]


def test_without_a_compiler_there_is_one_warning():
    def no_compiler(graph, inputs):
        raise RuntimeError("no compiler was found")

    hook = functools.partial(torch.compile, backend=no_compiler, fullgraph=True)
    f = plg.value_and_grad(lambda p, x: body(p, x).sum(), None, reduce="mean", run=plg.Run(compile=hook))
    with pytest.warns(RuntimeWarning, match="no compiler was found") as caught:
        found = [f(P, XS) for _ in range(3)]
    assert len(caught) == 1
    ref = plg.value_and_grad(lambda p, x: body(p, x).sum(), None, reduce="mean")(P, XS)
    assert_close(found, [ref] * 3)


def test_an_error_of_the_body_is_its_own(graphs):
    """Not one of the compiler."""

    def f(p, x):
        return body(p, x).reshape(-1, 3 if p["ok"] else 2)

    with pytest.raises(RuntimeError, match="invalid for input"):
        plg.map(f, {**P, "ok": False}, XS, run=plg.Run(compile=graphs))


def test_an_output_that_changes_its_shape_is_refused(graphs):
    sizes = iter([3, 3, 2, 2, 2])
    with pytest.raises(ImpureBodyError, match="changed"):
        plg.map(lambda p, x: body(p, x)[: next(sizes)], P, XS, run=plg.Run(compile=graphs))


def test_a_captured_weight_is_refused(graphs):
    w = W.clone().requires_grad_()
    with pytest.raises(CapturedTensorError):
        plg.map(lambda p, x: w @ x, P, XS, run=plg.Run(compile=graphs))
    with pytest.raises(CapturedTensorError):
        plg.value_and_grad(body, lambda p, y: (y @ w).sum(), run=plg.Run(compile=graphs))(P, XS)


def test_what_was_compiled_dies_with_the_module(graphs):
    net = nn.Linear(3, 2).double()
    plg.value_and_grad(plg.from_module(net)[0], square, run=plg.Run(compile=graphs))(plg.from_module(net)[1], XS)
    before, alive = len(_compile._entries), weakref.ref(net)
    assert graphs.calls > 0
    del net
    gc.collect()
    assert alive() is None
    assert len(_compile._entries) == before - 1


def test_the_number_of_bodies_is_limited(graphs, monkeypatch):
    """Dynamo holds the code of what it has traced; what we hold by it is dropped, the oldest first."""
    monkeypatch.setattr(_compile, "MAX_BODIES", 2)
    for k in range(4):
        scope = {"body": body}
        exec(f"def f(p, x):\n    return {k} * body(p, x)", scope)
        assert_close(plg.map(scope["f"], P, XS, run=plg.Run(compile=graphs)), k * looped("stack")(P, XS))
    assert len(_compile._entries) == 2


def test_what_was_compiled_holds_no_tensor(graphs):
    """Neither params nor what the body captures."""
    params, captured = {"W": W.clone(), "more": [B.clone()]}, torch.ones(3, dtype=torch.float64)
    refs = [weakref.ref(params["W"]), weakref.ref(params["more"][0]), weakref.ref(captured)]
    f = lambda p, x, c=captured: body(p, x) * c
    plg.value_and_grad(f, square, run=plg.Run(compile=graphs))(params, XS)
    del params, captured, f
    gc.collect()
    assert [r() for r in refs] == [None, None, None]


def test_the_autocast_of_the_first_pass_is_that_of_the_second(graphs):
    half = {k: v.float() for k, v in (("W", W), ("B", B))}

    def g(run):
        live = half["W"].clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ys = plg.map(lambda w, x: torch.tanh(x @ w), live, XS.float()[:, None], run=run)
        (grad_,) = torch.autograd.grad(ys.float().square().sum(), live)
        return ys, grad_

    assert_close(g(plg.Run(compile=graphs)), g(plg.Run()), rtol=2e-2)
    assert graphs.calls > 0
