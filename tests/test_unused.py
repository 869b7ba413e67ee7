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
