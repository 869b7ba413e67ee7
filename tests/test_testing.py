"""The public testing tools: sound loops pass, a planted fault of each kind is found, strategies draw what they say."""

from __future__ import annotations

import random
import re
import subprocess
import sys

import numpy
import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pure_loopgrad as plg
from pure_loopgrad import _tree, testing
from pure_loopgrad._tree import tree_map
from pure_loopgrad.testing.comparing import differences
from pure_loopgrad.testing.plain import leaves

f64 = torch.float64
W = torch.tensor([0.5, -1.0, 2.0])
XS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
INF = torch.full((2,), torch.inf)


def sound(w, x):
    return torch.tanh(w * x)


# Sound loops pass


@given(testing.loops(sizes=st.sampled_from([1, 2, 3, 5])), testing.losses(), testing.transform_stacks())
def test_drawn_loops_match(loop, loss, stack):
    testing.assert_matches_full_graph(
        loop.body, loop.params, loop.xs, loss, chunk_sizes=[loop.chunk_size], stack=stack
    )  # fmt: skip


@given(testing.loops(sizes=st.sampled_from([1, 3])))
def test_drawn_loops_are_pure(loop):
    testing.assert_pure(loop.body, loop.params, loop.xs)


@given(testing.pytrees())
def test_any_parameters(tree):
    """A body that uses every float leaf of any pytree."""

    def body(params, x):
        floats = [t for t in leaves(params) if t.is_floating_point() or t.is_complex()]
        return x + sum((torch.tanh(t.abs() + x).sum() for t in floats), torch.zeros(()))

    testing.assert_matches_full_graph(body, tree, XS[:, 0], chunk_sizes=[2], rtol=1e-9 if no_float32(tree) else None)


def no_float32(tree):
    return all(t.dtype != torch.float32 for t in leaves(tree))


@pytest.mark.parametrize("reduce", ["stack", "sum", "mean"])
def test_all_reductions_and_a_loss_of_ones_own(reduce):
    loss = lambda w, y: (w * y).square().sum()
    testing.assert_matches_full_graph(sound, W, XS, loss, reduce=reduce)
    testing.assert_memory_independent_of_n(sound, W, XS.repeat(8, 1), reduce=reduce)


def test_dropout_and_buffers_are_sound():
    testing.assert_pure(lambda w, x: F.dropout(w * x, 0.5), W, XS)
    testing.assert_matches_full_graph(lambda w, x: F.dropout(w * x, 0.5), W, XS, chunk_sizes=[1])
    testing.assert_matches_full_graph(lambda w, x: torch.sin(w @ x.mT), W[None], XS[:, None], batched=True)


def test_a_complex_and_a_half_precision_loop():
    testing.assert_matches_full_graph(lambda w, x: torch.exp(1j * w * x), W + 1j, XS)
    testing.assert_matches_full_graph(sound, W.bfloat16(), XS.bfloat16(), dtype=None)


@given(st.integers(1, 7), testing.schedules(), testing.transform_stacks(1))
def test_scans_match(n, checkpoints, stack):
    step = lambda w, c, x: (torch.tanh(w * c + x), c.sum())
    testing.assert_scan_matches_full_graph(step, W, W, XS[:n], checkpoints=[checkpoints], stack=stack)


def test_a_body_without_a_float_output():
    for reduce in ("stack", "sum"):
        testing.assert_matches_full_graph(lambda p, x: x > p, W, XS, reduce=reduce)


def test_a_module_with_buffers_of_another_dtype():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    xs = torch.randn(5, 6, 3)
    body, params = plg.from_module(net)
    with pytest.raises(plg.errors.LoopTypeError, match=r"Use dtype=None, or module.double\(\)"):
        testing.assert_matches_full_graph(body, params, xs)
    with pytest.raises(plg.errors.LoopTypeError, match=r"Use dtype=None, or module.double\(\)"):
        testing.assert_scan_matches_full_graph(lambda p, c, x: (c + body(p, x), None), params, torch.zeros(6, 4), xs)
    testing.assert_matches_full_graph(*plg.from_module(net.double()), xs, chunk_sizes=[1])
    with pytest.raises(RuntimeError, match="must match the size"):  # an error of the body's own stays what it is
        testing.assert_matches_full_graph(lambda p, x: x + torch.ones(7), W, XS)


# Planted faults


def captured_weight():
    hidden = torch.ones(3, requires_grad=True)
    return lambda w, x: sound(w, x) * hidden


def captured_module():
    net = nn.Linear(3, 3)
    return lambda w, x: net(w * x)


def mask_of(draw):
    """A dropout mask that a second pass draws anew."""
    return lambda w, x: sound(w, x) * torch.tensor([float(draw() > 0.5) + 0.1 for _ in range(3)])


def counter():
    calls = []

    def body(w, x):
        calls.append(0)
        return sound(w, x) * len(calls)

    return body


def late_counter():
    """Does wrong only from its sixth call on."""
    calls = []

    def body(w, x):
        calls.append(0)
        return sound(w, x) * (2 if len(calls) > 5 else 1)

    return body


def changes_params():
    def body(w, x):
        y = sound(w, x)
        with torch.no_grad():
            w += 1
        return y

    return body


def changes_x():
    def body(w, x):
        y = sound(w, x.clone())
        x.data.mul_(2)
        return y

    return body


def changes_x_through_numpy():
    def body(w, x):
        y = sound(w, x.clone())
        x.numpy()[0] = 9
        return y

    return body


def changes_captured():
    seen = torch.zeros(3)

    def body(w, x):
        seen.add_(1)
        return sound(w, x) * seen

    return body


def changes_grad_mode():
    def body(w, x):
        torch.set_default_dtype(f64)
        return sound(w, x)

    return body


FAULTS = {
    "a captured weight": captured_weight,
    "a captured module": captured_module,
    "a mask of Python's numbers": lambda: mask_of(random.Random(0).random),
    "a mask of numpy's numbers": lambda: mask_of(numpy.random.default_rng(0).random),
    "a mask of the global generator": lambda: mask_of(random.random),
    "a counter": counter,
    "a late counter": late_counter,
    "changed params": changes_params,
    "a changed x": changes_x,
    "an x changed through numpy": changes_x_through_numpy,
    "a changed captured tensor": changes_captured,
    "a changed setting": changes_grad_mode,
}


@pytest.fixture
def _settings_put_back():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_settings_put_back")
@pytest.mark.parametrize("fault", FAULTS)
def test_assert_pure_finds(fault):
    with pytest.raises(AssertionError):
        testing.assert_pure(FAULTS[fault](), W.clone(), XS.clone())


# With the library's own checks off, the gradient must still be seen to be wrong.
WRONG_GRADIENTS = ["a captured weight", "a mask of numpy's numbers", "a counter", "a changed captured tensor"]


@pytest.mark.parametrize("fault", WRONG_GRADIENTS)
def test_assert_matches_full_graph_finds(fault):
    with pytest.raises(AssertionError, match=r"differs by|needs a gradient"):
        testing.assert_matches_full_graph(FAULTS[fault](), W, XS, chunk_sizes=[1], run=plg.Run(check="off"))


def test_a_wrong_gradient_alone_is_found():
    with pytest.raises(AssertionError, match=r"gradient of loss: inputs: differs"):
        testing.assert_same_gradient(lambda w: w + w.detach(), lambda w: 2 * w, W)


def test_a_dropped_chunk_is_found():
    def in_full_chunks(inputs, chunk=2):
        """A loop of somebody's own that forgets the last iterations, in values."""
        w, xs = inputs
        return plg.sum(sound, w, xs[: len(xs) // chunk * chunk], chunk_size=chunk)

    with pytest.raises(AssertionError, match="outputs"):
        testing.assert_same_gradient(in_full_chunks, lambda inputs: testing.plain_sum(sound, *inputs), (W, XS))
    testing.assert_same_gradient(in_full_chunks, lambda inputs: testing.plain_sum(sound, *inputs), (W, XS[:6]))


def test_a_chunk_dropped_in_the_backward_is_found():
    """A hand-written gradient cache that leaves the remainder out, so that values are right."""

    def cached(inputs):
        w, xs = inputs
        last = len(xs) // 2 * 2
        return torch.cat([plg.map(sound, w, xs[:last]), sound(w.detach(), xs[last:])])

    with pytest.raises(AssertionError, match=r"gradient of loss: inputs\[0\]"):
        testing.assert_same_gradient(cached, lambda inputs: testing.plain_map(sound, *inputs), (W, XS))


def test_a_batched_body_that_mixes_its_rows_is_found():
    centred = lambda w, x: w * (x - x.mean(0))
    with pytest.raises(AssertionError, match="chunk_size=2"):
        testing.assert_matches_full_graph(centred, W, XS, batched=True)


def test_a_wrong_scan_is_found():
    calls = []

    def step(w, c, x):
        calls.append(0)
        return torch.tanh(w * c + x) * (1 + (len(calls) > 20)), None

    with pytest.raises(AssertionError, match="checkpoints='all'"):
        testing.assert_scan_matches_full_graph(step, W, W, XS, run=plg.Run(check="off"))


def keeping():
    kept = []

    def body(w, x):
        kept.append(sound(w, x))
        return kept[-1]

    return body


@pytest.mark.parametrize("reduce", ["stack", "sum", "mean"])
def test_a_body_that_keeps_tensors_is_found(reduce):
    with pytest.raises(AssertionError, match="each iteration adds"):
        testing.assert_memory_independent_of_n(keeping(), W.repeat(100), XS.repeat(4, 100), reduce=reduce)


@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_stack_may_grow(dtype, chunk_size):
    body = lambda w, x: (torch.tanh(w * x).to(dtype), torch.sin(w))
    testing.assert_memory_independent_of_n(body, W.repeat(100), XS.repeat(8, 100), chunk_size=chunk_size)


def test_graphs_that_are_kept_are_found():
    deep = lambda w, x: torch.tanh(torch.tanh(torch.tanh(w * x)))
    save = plg.Run(save="everything")
    with pytest.raises(AssertionError, match="each iteration adds"):
        testing.assert_memory_independent_of_n(deep, W.repeat(100), XS.repeat(4, 100), run=save)


def test_too_few_iterations_to_tell():
    with pytest.raises(ValueError, match="4 chunks"):
        testing.assert_memory_independent_of_n(sound, W, XS, chunk_size=3)


# Comparing and counting


@pytest.mark.parametrize(
    ("ours", "plain", "message"),
    [
        ({"a": W}, {"b": W}, "structure"),
        ([W], [W[:2]], "instead of"),
        ([W], [W.double()], "float32"),
        ([torch.tensor(1)], [torch.tensor(2)], "other values"),
        ([W.double(), W.double() * 1e-3], [W.double(), W.double() * 1.001e-3], r"y\[1\]"),
        ([W], [W * torch.nan], "has 0 NaN and 0 infinities where the plain loop has 3 NaN"),
        ([W * torch.inf], [-W * torch.inf], "in other places"),
        ([torch.tensor([1.0, torch.inf])], [torch.tensor([torch.inf, 1.0])], "in other places"),
        ([torch.tensor([3.0, 5.0])], [torch.tensor([torch.inf, 1.0])], "1 infinities"),
        ([INF, W], [INF, 2 * W], r"y\[1\]: differs"),
        ([torch.tensor([torch.inf, 1.0])], [torch.tensor([torch.inf, 2.0])], "differs by 1.00e"),
        ([torch.tensor([complex(1, torch.inf)])], [torch.tensor([complex(2, torch.inf)])], "differs by 1.00e"),
        ([1.0], [2.0], "1.0 instead of 2.0"),
        ([None], [W], "structure"),
    ],
)
def test_differences(ours, plain, message):
    found = "; ".join(differences(ours, plain, 1e-6, "y"))
    assert found
    assert re.search(message, found)


def test_no_differences():
    assert differences([W, W * torch.nan, 1.0, "a"], [W, W * torch.nan, 1.0, "a"], 1e-9, "y") == []
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert differences([odd, odd * 1j], [odd.clone(), odd * 1j], 1e-9, "y") == []
    nan = torch.tensor([torch.nan, 1.0], dtype=f64)
    assert differences([nan, nan], [nan, nan * (1 + 1e-15)], 1e-9, "y") == []
    noise = [torch.ones(3, dtype=f64), torch.full((3,), 1e-16, dtype=f64)]
    assert differences(noise, [noise[0], torch.zeros(3, dtype=f64)], 1e-9, "y") == []


def test_an_infinity_hides_nothing():
    """Neither in the outputs nor in the gradient: a mask of -inf, a logarithm at 0."""
    masked = lambda k: lambda i: {"m": torch.full((2,), torch.inf), "y": i * k}
    for loss in (None, lambda i, y: i.square().sum()):
        with pytest.raises(AssertionError, match=r"outputs\['y'\]: differs"):
            testing.assert_same_gradient(masked(50), masked(2), torch.ones(3), loss)
        testing.assert_same_gradient(masked(2), masked(2), torch.ones(3), loss)
    wrong = lambda i: {"m": torch.full((2,), torch.inf), "y": i * 2 + i.detach() * 3}
    with pytest.raises(AssertionError, match="gradient of loss: inputs: differs"):
        testing.assert_same_gradient(wrong, masked(5), torch.ones(3))
    root = lambda k: lambda i: i["a"].sqrt() + (i["b"] - i["b"].detach()) * k + i["b"].detach()
    inputs = {"a": torch.zeros(()), "b": torch.ones(())}
    with pytest.raises(AssertionError, match=r"inputs\['b'\]: differs"):
        testing.assert_same_gradient(root(3), root(2), inputs, lambda i, y: y)
    testing.assert_same_gradient(root(2), root(2), inputs, lambda i, y: y)


def test_counting():
    counted = testing.count_calls(sound)
    plg.value_and_grad(counted, lambda w, ys: ys.prod(), chunk_size=2)(W, XS)
    assert counted.calls == 2 * 4
    assert counted.__name__ == "sound"
    live = W.clone().requires_grad_()
    assert testing.saved_bytes(lambda: torch.stack([sound(live, x) for x in XS]).sum()) > 7 * 3 * 4
    assert testing.peak_bytes(lambda: torch.ones(100)) == 400


# Strategies


@pytest.mark.parametrize(
    "wanted",
    [
        lambda t: t == {},
        lambda t: isinstance(t, list) and len(t) == 2,
        lambda t: any(x.is_complex() for x in leaves(t)),
        lambda t: any(x.dtype == torch.bool for x in leaves(t)),
        lambda t: any(x.numel() == 0 for x in leaves(t)),
        lambda t: isinstance(t, tuple) and hasattr(t, "_fields") and isinstance(t[0], dict),
        lambda t: isinstance(t, str),
    ],
    ids=["an empty dict", "a list", "complex", "bool", "no entries", "nested", "a string"],
)
def test_pytrees_reach(wanted):
    assert wanted(find(testing.pytrees(), wanted))


@given(testing.pytrees())
def test_pytrees_are_pytrees(tree):
    found, spec = _tree.flatten(tree)
    again, same = _tree.flatten(spec.unflatten(found))
    assert spec == same
    assert all(a is b for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("n", [0, 1, 7])
def test_loops_reach_sizes(n):
    loop = find(testing.loops(), lambda loop: loop.n == n and loop.chunk_size == 3)
    assert len(leaves(loop.xs)[0]) == n


@given(testing.bodies().flatmap(lambda body: st.tuples(st.just(body), testing.params(body))))
def test_params_fit_their_body(drawn):
    body, params = drawn
    assert leaves(body(params, torch.ones(3, dtype=f64)))


@given(testing.params())
def test_params_have_a_gradient(params):
    assert any(t.dtype == f64 for t in leaves(params))


def test_draws_repeat():
    """A blob must bring the same numbers back."""
    wanted = lambda loop: loop.n == 2
    a, b = (find(testing.loops(), wanted, random=random.Random(3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(leaves((a.params, a.xs)), leaves((b.params, b.xs)), strict=True))


def test_without_hypothesis_the_remedy_is_named():
    code = "import sys; sys.modules['hypothesis'] = None\nimport pure_loopgrad\nimport pure_loopgrad.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pure_loopgrad[test]" in done.stderr.splitlines()[-1]


def test_casts_leave_the_users_tensors_alone():
    w = W.clone().requires_grad_()
    testing.assert_matches_full_graph(sound, {"w": w}.get("w"), XS, chunk_sizes=[1])
    assert w.grad is None
    assert w.dtype == torch.float32
    assert isinstance(tree_map(lambda t: t, w), Tensor)
