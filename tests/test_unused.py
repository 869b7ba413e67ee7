"""What an iteration does not use has a gradient of zero there, for which nothing is allocated or added."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_matches_full_graph

G = torch.Generator().manual_seed(0)
N = 9  # enough chunks of one or two for a pass that stops early
XS = torch.randn(N, 3, generator=G, dtype=torch.float64)
PARAMS = {
    "w": torch.randn(3, generator=G, dtype=torch.float64),
    "head": torch.randn(7, generator=G, dtype=torch.float64),
}


class OfTheHead(TorchDispatchMode):
    """How many operations compute something of the head's shape."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        like_head = isinstance(out, torch.Tensor) and out.shape == PARAMS["head"].shape
        self.count += like_head and func is not torch.ops.aten.detach.default
        return out


def body(p, x):
    return torch.tanh(p["w"] @ x)


def loss(p, ys):
    return (p["head"][:3].sum() * ys).square().sum()


def operations_on_the_head(n):
    with OfTheHead() as seen:
        plg.value_and_grad(body, loss)(PARAMS, XS[:1].expand(n, 3))
    return seen.count


def test_a_head_that_only_the_loss_uses_costs_nothing_in_an_iteration():
    assert operations_on_the_head(8) == operations_on_the_head(32) > 0


@pytest.mark.parametrize("user", [0, 1, N - 1])
def test_a_parameter_that_one_iteration_alone_uses(user):
    xs = torch.cat([XS, torch.arange(N)[:, None] == user], 1)

    def sometimes(p, x):
        y = torch.tanh(p["w"] @ x[:3])
        return y * p["head"].prod() if x[3] else y

    assert_equal(sometimes, PARAMS, xs)


@pytest.mark.parametrize("user", [0, 1, N - 1])
def test_an_entry_of_xs_that_one_iteration_alone_uses(user):
    def sometimes(p, x):
        entry, uses = x
        y = torch.tanh(p["w"]).sum()
        return y * entry.sum() if uses else y

    assert_equal(sometimes, {"w": PARAMS["w"]}, (XS, torch.arange(N) == user))


def assert_equal(body, params, xs):
    squares = lambda p, ys: ys.square().sum()
    assert_matches_full_graph(body, params, xs, squares, chunk_sizes=(1,), rtol=1e-10)


def root_of_nothing(u):
    """At zero, where its derivative is infinite, so that a cotangent of zero comes back as NaN."""
    return u.sqrt()


def steps(p, c, x):
    return (c[0] * p * torch.tanh(x), root_of_nothing(c[1] * 0)), c[0]


LOOPS_THAT_USE_W_ALONE = {
    "map": lambda w, u: plg.map(lambda p, x: p[0] * x, (w, root_of_nothing(u)), XS),
    "map over xs": lambda w, u: plg.map(lambda p, x: p * x[0], w, (XS, root_of_nothing(u).expand(N, 3))),
    "sum of chunks": lambda w, u: plg.sum(lambda p, x: p[0] * x, (w, root_of_nothing(u)), XS, chunk_size=2),
    "saved": lambda w, u: plg.map(lambda p, x: p[0] * x, (w, root_of_nothing(u)), XS, run=plg.Run(save="everything")),
    "checkpoint": lambda w, u: plg.checkpoint(lambda a, b: (a * 2, b * 2))(w, root_of_nothing(u))[0],
    "scan, all carries": lambda w, u: plg.scan(steps, w, (w, u), XS, checkpoints="all")[0][0],
    "scan, few carries": lambda w, u: plg.scan(steps, w, (w, u), XS, checkpoints=2)[0][0],
    "scan, its ys": lambda w, u: plg.scan(steps, w, (w, u), XS)[1],
    "fori_loop": lambda w, u: plg.fori_loop(0, 5, lambda p, i, c: steps(p, c, XS[i])[0], w, (w, u))[0],
}
PLAIN_LOOPS = {
    **dict.fromkeys(["map", "map over xs", "saved"], lambda w, u: torch.stack([w * x for x in XS])),
    "sum of chunks": lambda w, u: torch.stack([w * x for x in XS]).sum(0),
    "checkpoint": lambda w, u: w * 2,
}


def plain_scan(w, u, n=N):
    carry, ys = (w, u), []
    for x in XS[:n]:
        carry, y = steps(w, carry, x)
        ys.append(y)
    return carry[0], torch.stack(ys)


PLAIN_LOOPS |= {
    **dict.fromkeys(["scan, all carries", "scan, few carries"], lambda w, u: plain_scan(w, u)[0]),
    "scan, its ys": lambda w, u: plain_scan(w, u)[1],
    "fori_loop": lambda w, u: plain_scan(w, u, 5)[0],
}
W, U = PARAMS["w"], torch.zeros(3, dtype=torch.float64)


def second(loop):
    def value(w, u):
        return loop(w, u).square().sum()

    return [
        outer(torch.func.jacrev(value, argnums=(0, 1)), argnums=(0, 1))
        for outer in (torch.func.jacrev, torch.func.jacfwd)
    ]


@pytest.mark.parametrize("name", LOOPS_THAT_USE_W_ALONE)
def test_no_zero_goes_on_where_nothing_leads(name):
    """As in the full graph, where what nothing leads to is not walked."""
    found = []
    for loop in (PLAIN_LOOPS[name], LOOPS_THAT_USE_W_ALONE[name]):
        w, u = W.clone().requires_grad_(), U.clone().requires_grad_()
        loop(w, u).square().sum().backward()
        found.append([w.grad, torch.zeros_like(u) if u.grad is None else u.grad])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", LOOPS_THAT_USE_W_ALONE)
def test_nor_in_a_second_derivative(name):
    for ours, plain in zip(second(LOOPS_THAT_USE_W_ALONE[name]), second(PLAIN_LOOPS[name]), strict=True):
        torch.testing.assert_close(ours(W, U), plain(W, U), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", ["auto", "one_pass", "two_pass"])
def test_a_summed_output_that_the_loss_does_not_use(plan):
    def two(p, x):
        return (p * x).sum(), root_of_nothing((p * x * 0).sum())

    value, grad = plg.value_and_grad(two, lambda p, z: z[0] ** 2, reduce="sum", plan=plan)(W, XS)
    w = W.clone().requires_grad_()
    ref = sum((w * x).sum() for x in XS) ** 2
    ref.backward()
    torch.testing.assert_close((value, grad), (ref.detach(), w.grad), rtol=1e-12, atol=0)


FORGETFUL = {
    "its carry": lambda p, c, x: (p * x[0] if x[1] else c * x[0] * p, None),
    "its carry and its x": lambda p, c, x: (p * (torch.ones_like(c) if x[1] else c * x[0]), None),
}


def plain_loop(step, w, c, xs):
    for x in zip(*xs, strict=True):
        c, _ = step(w, c, x)
    return c, None


@pytest.mark.parametrize("name", FORGETFUL)
def test_steps_without_any_cotangent(name):
    """A late step forgets what was before, so that nothing of it counts: there the gradient of xs is zero."""
    forgets = torch.arange(N) == 4
    found = []
    for scan in (plg.scan, plain_loop):

        def value(w, xs, scan=scan):
            return scan(FORGETFUL[name], w, torch.ones_like(w), (xs, forgets))[0].square().sum()

        w, xs = W.clone().requires_grad_(), XS.clone().requires_grad_()
        value(w, xs).backward()
        grad = torch.func.grad(value, argnums=(0, 1))
        found.append([w.grad, xs.grad, *torch.func.vmap(grad, (0, None))(torch.stack([W, 2 * W]), XS)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)
