"""map, sum, mean: arguments, containers, precision, what they refuse."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import optree
import pytest
import torch

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close, plain_map, plain_sum
from pure_loopgrad.testing.grammar import WIDTH as D

W = torch.randn(D, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
XS = torch.randn(7, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tanh(W, x):
    return torch.tanh(W @ x)


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Record:
    a: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "wrap",
    [
        lambda h: h,
        lambda h: [h, h.sum()],
        lambda h: {"b": h, "a": (h * 2, None)},
        lambda h: OrderedDict(z=h, a=h.sum()),
        lambda h: Pair(h, h.sum()),
    ],
)
@pytest.mark.parametrize("chunk_size", [1, 3])
def test_containers_come_back_as_they_were(wrap, chunk_size):
    body = lambda W, x: wrap(tanh(W, x))
    found = plg.map(body, W, XS, chunk_size=chunk_size)
    ref = plain_map(body, W, XS)
    assert type(found) is type(ref)
    assert_close(found, ref)


def test_a_dataclass_is_a_container_when_it_holds_tensors():
    body = lambda p, x: Record(tanh(p.a, x.a), 1)
    ys = plg.map(body, Record(W, "params"), Record(XS, "xs"))
    assert isinstance(ys, Record)
    assert_close(ys.a, plain_map(tanh, W, XS))
    grads = plg.value_and_grad(lambda p, x: tanh(p.a, x).sum(), reduce="sum")(Record(W, "w"), XS)[1]
    assert (type(grads), grads.name) == (Record, None)


class Node:
    """A pytree node for torch alone."""

    def __init__(self, a, name):
        self.a, self.name = a, name


torch.utils._pytree.register_pytree_node(Node, lambda n: ([n.a], n.name), lambda values, name: Node(*values, name))


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_what_is_a_node_for_torch_is_one(chunk_size):
    """As a leaf that is no tensor it would have no gradient, and nobody would say so."""
    body = lambda p, x: Node(tanh(p.a, x.a), p.name)
    ys = plg.map(body, Node(W, "net"), Node(XS, "xs"), chunk_size=chunk_size)
    assert ys.name == "net"
    assert_close(ys.a, plain_map(tanh, W, XS))
    loss = lambda p, ys: ys.a.square().sum()
    grads = plg.value_and_grad(body, loss, chunk_size=chunk_size)(Node(W, "net"), Node(XS, "xs"))[1]
    expected = torch.func.grad(lambda W: plain_map(tanh, W, XS).square().sum())(W)
    assert_close(grads.a, expected)
    through = torch.func.grad(lambda p: plg.map(body, p, Node(XS, "xs"), chunk_size=chunk_size).a.square().sum())
    assert_close(through(Node(W, "net")).a, expected)
    assert not optree.all_leaves([Node(W, "net")], namespace="pure_loopgrad")
    assert optree.all_leaves([Node(W, "net")])  # elsewhere nothing has changed


@pytest.mark.parametrize("loop", [plg.map, plg.sum, plg.mean])
@pytest.mark.parametrize("chunk_size", [1, 3, None])
def test_a_batched_body_takes_the_chunk(loop, chunk_size):
    batched = lambda W, xs: torch.tanh(xs @ W.T)
    f = lambda W: loop(tanh, W, XS)
    g = lambda W: loop(batched, W, XS, chunk_size=chunk_size, batched=True)
    assert_close(g(W), f(W))
    assert_close(torch.func.jacrev(g)(W), torch.func.jacrev(f)(W))


def test_a_batched_body_that_returns_no_chunk():
    with pytest.raises(ValueError, match=r"output of a batched body has shape \(3,\).*a chunk of 7 iterations"):
        plg.sum(lambda W, xs: tanh(W, xs[0]), W, XS, batched=True, chunk_size=None)


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_nothing_is_shared_or_changed(name):
    """Outputs are tensors of their own: changing one moves no input and no other output."""
    W0, XS0 = W.clone(), XS.clone()
    body = (lambda W, x: (x, x, W)) if name == "inputs" else (lambda W, x: (h := tanh(W, x), h, h.expand(2, D)))
    for loop in (plg.map, plg.sum):
        for n in (1, 7):
            outs = loop(body, W, XS[:n])
            before = outs[1].clone()
            outs[0].add_(1)
            outs[2].add_(1)
            assert torch.equal(outs[1], before)
            assert torch.equal(W, W0)
            assert torch.equal(XS, XS0)


def test_a_constant_that_the_body_returns_is_not_added_into():
    constant = torch.ones(3)
    total = plg.sum(lambda p, x: constant, torch.ones(()), torch.arange(5.0))
    assert torch.equal(total, torch.full((3,), 5.0))
    assert torch.equal(constant, torch.ones(3))


@pytest.mark.parametrize("view", [lambda c: c, lambda c: c[1:], lambda c: c.detach(), torch.Tensor.t, lambda c: c.real])
def test_a_constant_that_the_body_returns_stays_what_it_is(view):
    """It neither moves with an output nor starts to require grad."""
    constant, W0 = torch.ones(3), W.clone().requires_grad_()
    body = lambda p, x: (tanh(p, x), view(constant))
    loops = [
        *(lambda n=n, loop=loop: loop(body, W0, XS[:n])[1] for n in (1, 7) for loop in (plg.map, plg.sum, plg.mean)),
        lambda: plg.checkpoint(lambda p: body(p, XS[0]))(W0)[1],
        lambda: plg.scan(lambda p, c, x: (tanh(p, x), view(constant)), W0, torch.ones(D).to(W), XS[:1])[1],
    ]
    for loop in loops:
        out = loop()
        assert not constant.requires_grad
        with torch.no_grad():
            out.add_(1)
        assert torch.equal(constant, torch.ones(3))


def test_what_the_body_makes_is_not_copied_on_its_way_out():
    made = []

    def body(p, x):
        made.append(p * x)
        return made[-1]

    for loop in (lambda: plg.map(body, W, XS[:1]), lambda: plg.checkpoint(body)(W, XS[0])):
        out = loop()
        assert out.untyped_storage().data_ptr() == made[-1].untyped_storage().data_ptr()


def test_a_constant_that_becomes_the_carry():
    """Each part of the scan returns it, and the next one is given it."""
    constant, W0 = torch.ones(D).to(W), W.clone().requires_grad_()
    step = lambda p, c, x: (constant, tanh(p, x) * c)
    grads = []
    for scan in (plg.scan, plain_scan):
        last, ys = scan(step, W0, torch.zeros(D).to(W), XS)
        assert torch.equal(last, constant)
        grads += torch.autograd.grad(ys.square().sum(), W0)
        assert not constant.requires_grad
    assert_close(*grads)


def plain_scan(step, p, carry, xs):
    ys = []
    for x in xs:
        carry, y = step(p, carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def test_a_body_that_writes_into_its_input_is_refused():
    body = lambda p, x: x.mul_(p)
    with pytest.raises(plg.errors.ImpureBodyError, match=r"changed an input in place \(shape \(7, 3\).*x\.clone"):
        plg.map(body, torch.tensor(2.0), XS.clone())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_in_float32_and_rounded_once(dtype):
    p, xs = torch.ones(4, dtype=dtype), torch.rand(3000, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    body = lambda p, x: p * x
    for chunk_size in (1, 7):
        total, g = plg.vjp(body, p, xs, reduce="sum", chunk_size=chunk_size)
        (dp, _) = g(torch.ones_like(p))
        exact = xs.double().sum(0)
        assert total.dtype == dp.dtype == dtype
        for found in (total, dp):
            assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact).all()
    assert plg.mean(body, p, xs).dtype == dtype


def test_complex_parameters_and_outputs():
    p = torch.complex(W[0], W[1])
    body = lambda p, x: torch.exp(1j * x) * p
    loss = lambda loop, **kw: lambda p: loop(body, p, XS, **kw).abs().square().sum().sqrt()
    for ours, plain in ((plg.map, plain_map), (plg.sum, plain_sum)):
        ref = torch.func.grad(loss(plain))(p)
        for chunk_size in (1, 3):
            assert_close(torch.func.grad(loss(ours, chunk_size=chunk_size))(p), ref)
    g = plg.value_and_grad(body, lambda p, z: z.abs().square().sum(), reduce="sum")(p, XS)[1]
    assert_close(g, torch.func.grad(lambda p: plain_sum(body, p, XS).abs().square().sum())(p))


BAD = {
    "xs has no tensor leaf": lambda: plg.map(tanh, W, {"a": 3}),
    "xs['b'] is a scalar": lambda: plg.map(tanh, W, {"a": XS, "b": torch.tensor(1.0)}),
    "xs['a'] has 7 iterations (shape (7, 3)), xs['b'] has 2 (shape (2,))": lambda: plg.map(
        tanh, W, {"a": XS, "b": torch.ones(2)}
    ),
    "body is a Tensor": lambda: plg.map(W, tanh, XS),
    "weights has shape (2,), but xs has 7 iterations": lambda: plg.mean(tanh, W, XS, weights=[1, 2]),
    "the mean of no iterations": lambda: plg.mean(tanh, W, XS[:0]),
    "randomness='no'": lambda: plg.map(tanh, W, XS, randomness="no"),
    "chunk_size=0": lambda: plg.map(tanh, W, XS, chunk_size=0),
    "output['y'] is a str": lambda: plg.map(lambda W, x: {"y": "text"}, W, XS),
    "could not be found without data": lambda: plg.map(lambda W, x: x * float(x[0]), W, XS[:0]),
}


@pytest.mark.parametrize("text", BAD)
def test_errors_say_what_and_where(text):
    with pytest.raises(plg.LoopGradError) as caught:
        BAD[text]()
    assert text in str(caught.value)
    assert isinstance(caught.value, (ValueError, TypeError))


def test_an_error_in_the_body_passes_with_its_iteration():
    def body(W, i):
        if i == 4:
            raise KeyError("mine")
        return W * i

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine") as caught:
        plg.map(body, W, torch.arange(7))
    assert any("iteration 4 of 7" in n for n in getattr(caught.value, "__notes__", ["iteration 4 of 7"]))
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_mode():
    with torch.inference_mode():
        xs = XS.clone()
        assert_close(plg.map(tanh, W, xs), plain_map(tanh, W, xs))
        last, _ = plg.scan(lambda W, c, x: (tanh(W, c + x), None), W, xs[0], xs)
        c = xs[0]
        for x in xs:
            c = tanh(W, c + x)
        assert_close(last, c)


def test_no_iterations():
    body = lambda W, x: {"y": tanh(W, x), "i": (x > 0).sum(), "half": x.to(torch.bfloat16)}
    ys = plg.map(body, W, XS[:0])
    assert [(tuple(y.shape), y.dtype) for y in ys.values()] == [
        ((0, D), torch.float64),
        ((0,), torch.int64),
        ((0, D), torch.bfloat16),
    ]
    total = plg.sum(body, W, XS[:0], chunk_size=3)
    assert [(tuple(y.shape), y.dtype, y.sum().item()) for y in total.values()] == [
        ((D,), torch.float64, 0.0),
        ((), torch.int64, 0),
        ((D,), torch.bfloat16, 0.0),
    ]
    batched = plg.map(lambda W, xs: xs @ W, W, XS[:0], batched=True, chunk_size=4)
    assert batched.shape == (0, D)


def test_no_iterations_and_the_body_sees_no_data():
    seen = []
    plg.map(lambda W, x: (seen.append(type(x).__name__), x)[1], W, XS[:0])
    assert seen == ["FakeTensor"]


VIEWS = {
    "part": lambda w, x: (w * x)[:2],
    "transposed": lambda w, x: (w[:, None] * x).t(),
    "conjugate": lambda w, x: torch.complex(w * x, w - x).conj(),
    "imaginary part": lambda w, x: torch.complex(w * x, w - x).imag,
    "whole": lambda w, x: (w * x).reshape(3, 1),
}


@pytest.mark.parametrize("body", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(("n", "chunk_size"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_what_a_loop_returns_may_be_changed_in_place(body, n, chunk_size):
    w = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    xs = torch.linspace(-1, 1, 3 * n, dtype=torch.float64).reshape(n, 3)
    loops = {
        "map": (plg.map(body, w, xs, chunk_size=chunk_size), torch.stack([body(w, x) for x in xs])),
        "sum": (plg.sum(body, w, xs, chunk_size=chunk_size), sum(body(w, x) for x in xs)),
        "checkpoint": (plg.checkpoint(lambda w: body(w, xs[0]))(w), body(w, xs[0])),
    }
    for ours, plain in loops.values():
        torch.testing.assert_close(ours.mul_(2), 2 * plain, rtol=1e-12, atol=1e-12)
        grads = (torch.autograd.grad(y.abs().square().sum(), w)[0] for y in (ours, 2 * plain))
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
