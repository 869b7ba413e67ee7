"""A sparse matrix that a body multiplies by, given or captured: a system matrix, a graph."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

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


TABLE = torch.randn(10, 3, generator=G, dtype=torch.float64)
ROWS = torch.randint(0, 10, (N, 4), generator=G)
LOOKUPS = {
    "embedding": lambda w, i: F.embedding(i, w, sparse=True).sin(),
    "bag": lambda w, i: F.embedding_bag(i, w, i.new_zeros(1), mode="sum", sparse=True).sin(),
}


def live_table(run):
    w = TABLE.clone().requires_grad_()
    run(w).backward()
    return w.grad


LOOKED_UP = {
    "map": lambda f, xs: live_table(lambda w: loss(plg.map(f, w, xs))),
    "sum": lambda f, xs: live_table(lambda w: plg.sum(lambda w, i: loss(f(w, i)), w, xs)),
    "scan": lambda f, xs: live_table(lambda w: plg.scan(lambda w, c, i: (c + loss(f(w, i)), None), w, ZERO, xs)[0]),
    "value_and_grad": lambda f, xs: plg.value_and_grad(f, lambda w, ys: loss(ys))(TABLE, xs)[1],
    "unchecked": lambda f, xs: plg.value_and_grad(f, lambda w, ys: loss(ys), run=plg.Run(check="off"))(TABLE, xs)[1],
    "kept": lambda f, xs: plg.value_and_grad(f, lambda w, ys: loss(ys), run=plg.Run(save="everything"))(TABLE, xs)[1],
    "one pass": lambda f, xs: plg.value_and_grad(lambda w, i: loss(f(w, i)), reduce="sum")(TABLE, xs)[1],
    "two numbers": lambda f, xs: plg.value_and_grad(
        lambda w, i: (loss(f(w, i)), 2 * loss(f(w, i))), lambda w, z: z[0] * 3 - z[1], reduce="sum"
    )(TABLE, xs)[1],
}
ZERO = torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, N])
@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("name", LOOKED_UP)
def test_the_sparse_gradient_of_an_embedding(name, lookup, n):
    f, xs = LOOKUPS[lookup], ROWS[:n]
    found = LOOKED_UP[name](f, xs)
    assert found.is_sparse
    assert_close(found.to_dense(), live_table(lambda w: loss(torch.stack([f(w, i) for i in xs]))).to_dense())
    assert found._nnz() <= 2 * len(TABLE) + xs[0].numel()  # what is added up does not grow with n


def test_a_table_that_is_also_used_whole():
    """Tied weights: the sum is dense from the first dense term on."""
    f = lambda w, i: F.embedding(i, w, sparse=True).sin() * (w.sum() if i[0] % 2 else 1.0)
    found = live_table(lambda w: loss(plg.map(f, w, ROWS)))
    assert_close(found.to_dense(), live_table(lambda w: loss(torch.stack([f(w, i) for i in ROWS]))).to_dense())
