"""A sparse matrix that a body multiplies by, given or captured: a system matrix, a graph."""

from __future__ import annotations

import pytest
import torch

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close, peak_bytes, saved_bytes

N = 8
G = torch.Generator().manual_seed(0)
DENSE = torch.randn(6, 6, generator=G, dtype=torch.float64).relu()
W = torch.randn(5, 4, generator=G, dtype=torch.float64)
XS = torch.randn(N, 6, 5, generator=G, dtype=torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # "in beta state"


def body(p, x):
    return p["A"] @ (x @ p["w"])


def first(p, x):
    """The product with the sparse matrix is not the last one."""
    return torch.tanh(p["A"] @ x) @ p["w"]


def loss(ys):
    return ys.sin().square().sum()


def expected(f, a):
    """By autograd through the plain loop."""
    live = {"A": a.clone().requires_grad_(), "w": W.clone().requires_grad_()}
    loss(torch.stack([f(live, x) for x in XS])).backward()
    return live["A"].grad.to_dense(), live["w"].grad


@pytest.fixture(params=["to_sparse_coo", "to_sparse_csr"])
def sparse(request):
    return getattr(DENSE, request.param)()


@pytest.mark.parametrize("f", [body, first])
@pytest.mark.parametrize("check", ["first", "off"])
def test_a_captured_matrix(f, check, sparse):
    captured = lambda p, x: f({"A": sparse, "w": p}, x)
    gradient = plg.value_and_grad(captured, lambda _, ys: loss(ys), run=plg.Run(check=check))
    assert_close(gradient(W, XS)[1], expected(f, sparse)[1], rtol=1e-12)


@pytest.mark.parametrize("f", [body, first])
@pytest.mark.parametrize("save", ["nothing", 10**6])
def test_a_matrix_in_params(f, save, sparse):
    """Frozen, beside a parameter that is differentiated."""
    p = {"A": sparse, "w": W.clone().requires_grad_()}
    loss(plg.map(f, p, XS, run=plg.Run(save=save))).backward()
    assert_close(p["w"].grad, expected(f, sparse)[1], rtol=1e-12)


@pytest.mark.parametrize("f", [body, first])
def test_the_gradient_of_a_sparse_matrix(f, sparse):
    found = plg.value_and_grad(f, lambda _, ys: loss(ys))({"A": sparse, "w": W}, XS)[1]
    dense, dw = expected(f, sparse)
    assert_close(found["A"].to_dense(), dense, rtol=1e-12)
    assert_close(found["w"], dw, rtol=1e-12)


def test_a_sum_and_a_scan(sparse):
    live = W.clone().requires_grad_()
    plg.sum(lambda p, x: loss(body(p, x)), {"A": sparse, "w": live}, XS).backward()
    assert_close(live.grad, expected(body, sparse)[1], rtol=1e-12)

    def step(p, carry, x):
        carry = torch.tanh(p["A"] @ carry + x * p["s"])
        return carry, carry.sum()

    s, plain_s = torch.tensor([0.5, 0.5], dtype=torch.float64).requires_grad_().unbind()
    p = {"A": sparse, "s": s}
    found = torch.autograd.grad(loss(plg.scan(step, p, XS[0], XS)[1]), s)
    carry, ys = XS[0], []
    for x in XS:
        carry, y = step({"A": sparse, "s": plain_s}, carry, x)
        ys.append(y)
    assert_close(found, torch.autograd.grad(loss(torch.stack(ys)), plain_s), rtol=1e-12)


def test_the_memory_of_what_is_dense_counts(sparse):
    product = lambda: sparse @ XS[0]
    assert peak_bytes(product) >= product().numel() * 8
    live = W.clone().requires_grad_()
    x = XS[0].clone()
    assert saved_bytes(lambda: body({"A": sparse, "w": live}, x)) == x.numel() * 8
