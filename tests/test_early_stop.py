"""A recomputation leaves its last contraction out, and nothing that a body may do with it changes a gradient."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pure_loopgrad as plg
from pure_loopgrad import _early_stop
from pure_loopgrad.testing import assert_close

N = 8
G = torch.Generator().manual_seed(0)
XS = torch.randn(N, 3, 4, generator=G, dtype=torch.float64)
PARAMS = {
    "a": torch.randn(4, 5, generator=G, dtype=torch.float64),
    "b": torch.randn(5, 6, generator=G, dtype=torch.float64),
    "bias": torch.randn(6, generator=G, dtype=torch.float64),
    "kernel": torch.randn(2, 5, 3, generator=G, dtype=torch.float64),
}


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(_early_stop, "WORTHWHILE", {"cpu": 0, "other": 0})


class Counted(TorchDispatchMode):
    """How often each kind of operation runs."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] = self.calls.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


class Saving(torch.autograd.Function):
    """x to x, with a derivative that looks at x, though it is one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.ones_like(x)


class SavingArray(Saving):
    """The same by way of numpy."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.from_numpy(x.detach().numpy() * 0 + 1)


def hidden(p, x):
    return torch.tanh(x @ p["a"])


def linear(p, x):
    return F.linear(hidden(p, x), p["b"].T, p["bias"])


def branching_on_a_list(p, x):
    y = hidden(p, x) @ p["b"]
    return y * 2 if y.detach().view(-1).tolist()[0] > 0 else y


def branching_on_a_view(p, x):
    y = hidden(p, x) @ p["b"]
    return y * 3 if y.view(-1)[0].tolist() > 0 else y


def catching(p, x):
    y = hidden(p, x) @ p["b"]
    try:
        large = bool(y.sum() > 0)
    except Exception:
        large = False
    return y * 2 if large else y


def reading_memory(p, x):
    y = hidden(p, x) @ p["b"]
    return y * 2 if ctypes.c_double.from_address(y.data_ptr()).value > 0 else y


def two_outputs(p, x):
    h = hidden(p, x)
    return h.exp(), h @ p["b"]


STOPPED = {
    "mm": lambda p, x: hidden(p, x) @ p["b"],
    "addmm": linear,
    "a sum of it": lambda p, x: (hidden(p, x) @ p["b"]).sum(),
    "a mean of it": lambda p, x: linear(p, x).mean(0),
    "a residual": lambda p, x: x.sum() + linear(p, x),
    "transposed": lambda p, x: linear(p, x).T.unsqueeze(0)[:, 1:],
    "in another precision": lambda p, x: linear(p, x).float(),
    "bmm": lambda p, x: torch.bmm(hidden(p, x).unsqueeze(0), p["b"].unsqueeze(0)),
    "convolution": lambda p, x: F.conv1d(hidden(p, x).T.unsqueeze(0), p["kernel"]),
    "two outputs": two_outputs,
}
NOT_STOPPED = {
    "its value is saved": lambda p, x: torch.exp(hidden(p, x) @ p["b"]),
    "times a tensor": lambda p, x: linear(p, x) * p["bias"],
    "in place": lambda p, x: linear(p, x).add_(1),
    "no contraction": lambda p, x: x * p["a"].sum(),
    "a function that saves it": lambda p, x: Saving.apply(linear(p, x)),
    "a function that has its array": lambda p, x: SavingArray.apply(linear(p, x)),
    "a branch on a list": branching_on_a_list,
    "a branch on a view": branching_on_a_view,
    "caught": catching,
    "its memory is read": reading_memory,
}


def gradients(loop, params=PARAMS, xs=XS):
    params = {k: p.clone().requires_grad_() for k, p in params.items()}
    xs = xs.clone().requires_grad_()
    ys = loop(params, xs)
    loss = sum(y.double().sin().sum() for y in (ys if isinstance(ys, tuple) else (ys,)))
    return torch.autograd.grad(loss, [*params.values(), xs], materialize_grads=True)


def plain(body):
    def loop(p, xs):
        ys = [body(p, x) for x in xs]
        return tuple(map(torch.stack, zip(*ys, strict=True))) if isinstance(ys[0], tuple) else torch.stack(ys)

    return loop


def products(calls):
    return sum(n for func, n in calls.items() if func in _early_stop.CONTRACTIONS)


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize("name", STOPPED)
def test_the_last_product_is_left_out(name, chunk_size, monkeypatch):
    body = STOPPED[name]
    loop = lambda p, xs: plg.map(body, p, xs, chunk_size=chunk_size)
    with Counted() as stopped:
        found = gradients(loop)
    assert_close(found, gradients(plain(body)), rtol=1e-12 if name != "in another precision" else 1e-6)
    monkeypatch.setattr(_early_stop, "FEWEST_CHUNKS", N + 1)
    with Counted() as full:
        gradients(loop)
    left_out = N // chunk_size - 1  # the first chunk is recorded
    assert products(full.calls) - products(stopped.calls) == left_out


@pytest.mark.parametrize("name", NOT_STOPPED)
def test_what_needs_the_value_gets_it(name):
    body = NOT_STOPPED[name]
    loop = lambda p, xs: plg.map(body, p, xs)
    assert_close(gradients(loop), gradients(plain(body)), rtol=1e-12)


@pytest.mark.parametrize("reduce", [plg.sum, plg.mean])
def test_reductions_and_batched_bodies(reduce):
    body = STOPPED["addmm"]
    scale = N if reduce is plg.mean else 1
    expected = gradients(lambda p, xs: plain(body)(p, xs).sum(0) / scale)
    assert_close(gradients(lambda p, xs: reduce(body, p, xs)), expected, rtol=1e-12)
    assert_close(gradients(lambda p, xs: reduce(body, p, xs, chunk_size=2, batched=True)), expected, rtol=1e-12)


def guarded(y):
    try:
        return y * 2 if bool(y.abs().sum() > 0) else y
    except Exception:
        return y


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (lambda y: y, lambda y: y * y),
        (lambda y: y, guarded),
        (lambda y: y.sum(0), lambda y: y.sum(1)),
        (lambda y: y.sum(0), lambda y: y.mean(0)),
        (lambda y: y, lambda y: y + (y @ y)),
    ],
)
@pytest.mark.parametrize("after", [2, 5])
def test_a_branch_that_comes_late(early, late, after):
    """The chunk that was recorded ends in one way, and later ones in another."""

    def body(p, x):
        end = late if x["i"] >= after else early
        h = hidden(p, x["x"])
        y = (h.T @ h) @ p["b"][:, :5]
        return end(y)

    loop = lambda p, x: plg.map(body, p, {"x": x, "i": torch.arange(N)})
    expected = gradients(lambda p, x: torch.stack([body(p, {"x": x[i], "i": i}) for i in range(N)]))
    assert_close(gradients(loop), expected, rtol=1e-12)


def test_a_refusal_that_the_body_catches():
    """Nothing follows that could raise once more."""

    def body(p, x):
        end = guarded if x["i"][0] >= 4 else (lambda y: y)
        return end(hidden(p, x["x"]) @ p["b"])

    one = lambda p, x: body(p, {"x": x[None], "i": torch.tensor([N])})[0]
    loop = lambda p, x: plg.map(body, p, {"x": x, "i": torch.arange(N)}, chunk_size=1, batched=True)
    halves = lambda p, x: torch.cat([plain(STOPPED["mm"])(p, x[:4]), plain(one)(p, x[4:])])
    assert_close(gradients(loop), gradients(halves), rtol=1e-12)


def test_an_error_of_the_user_is_raised_as_ever():
    calls = []

    def body(p, x):
        calls.append(1)
        y = linear(p, x)
        if len(calls) >= N + 5:
            raise ZeroDivisionError("mine")
        return y

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        gradients(lambda p, xs: plg.map(body, p, xs, run=plg.Run(check="off")))
    assert "iteration" in str(caught.value.__notes__)


def test_an_output_that_the_body_kept_says_so():
    kept = []

    def body(p, x):
        kept.append(linear(p, x))
        return kept[-1]

    gradients(lambda p, xs: plg.map(body, p, xs))
    assert len(kept) == 2 * N
    with pytest.raises(plg.errors.ImpureBodyError, match=r"kept its output somewhere.*check='all'"):
        kept[-1] + 1
    with pytest.raises(plg.errors.ImpureBodyError, match="leaves out"):
        kept[-1].data_ptr()


def test_a_body_that_draws_replays_what_it_drew():
    torch.manual_seed(0)
    body = lambda p, x: F.dropout(hidden(p, x), 0.5) @ p["b"]
    found = gradients(lambda p, xs: plg.map(body, p, xs))
    torch.manual_seed(0)
    assert_close(found, gradients(plain(body)), rtol=1e-12)


def test_second_derivatives_compute_everything():
    body = STOPPED["mm"]

    def loss(loop):
        return lambda a: loop({**PARAMS, "a": a}, XS).square().sum()

    found, expected = (
        torch.func.hessian(loss(lambda p, xs: plg.map(body, p, xs))),
        torch.func.hessian(loss(plain(body))),
    )
    assert_close(found(PARAMS["a"]), expected(PARAMS["a"]), rtol=1e-11)
