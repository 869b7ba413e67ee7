"""Beside other libraries: Opacus as an oracle for clipping, torchopt and torch.optim for functional training steps."""

from __future__ import annotations

import opacus
import pytest
import torch
import torchopt
from opacus.optimizers import DPOptimizer

import pure_loopgrad as plg
from pure_loopgrad._counting import LiveBytes
from pure_loopgrad.testing import assert_close


def classifier():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    return net, torch.randn(12, 5, dtype=torch.float64), torch.randint(0, 3, (12,))


def loss_of(body):
    return lambda p, x: torch.nn.functional.cross_entropy(body(p, x[0]), x[1])


@pytest.mark.filterwarnings("ignore")  # Opacus and its backward hooks
@pytest.mark.parametrize("limit", [0.05, 0.5, 100.0])
def test_the_clipped_sum_is_that_of_opacus(limit):
    net, xs, labels = classifier()
    body, params = plg.from_module(net)
    clip = plg.folds.clip_norm(limit)
    found = plg.fold_grads(loss_of(body), params, (xs, labels), plg.folds.sum(), transform=clip, chunk_size=5)
    found = {k: g.clone() for k, g in found.items()}
    sampled = opacus.GradSampleModule(net, loss_reduction="sum")
    optimiser = DPOptimizer(
        torch.optim.SGD(sampled.parameters(), 1.0),
        noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=1, loss_reduction="sum",
    )  # fmt: skip
    torch.nn.functional.cross_entropy(sampled(xs), labels, reduction="sum").backward()
    optimiser.clip_and_accumulate()
    assert_close(found, {k: p.summed_grad for k, p in net.named_parameters()})


def test_a_functional_step_with_torchopt():
    """params, state = step(params, state, xs); the same path as torch.optim.Adam on the full graph, in flat memory."""
    net, xs, labels = classifier()
    body, params = plg.from_module(net)
    params = {k: p.detach().clone() for k, p in params.items()}
    optimiser = torchopt.adam(0.05)
    gradient = plg.value_and_grad(loss_of(body), reduce="mean")

    def step(params, state, xs):
        _, grads = gradient(params, xs)
        updates, state = optimiser.update(grads, state, inplace=False)
        return torchopt.apply_updates(params, updates, inplace=False), state

    state, live = optimiser.init(params), []
    with LiveBytes() as mode:
        for _ in range(30):
            params, state = step(params, state, (xs, labels))
            live.append(mode.now)
    assert live[5] == live[-1]
    adam = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(30):
        adam.zero_grad()
        torch.stack(
            [torch.nn.functional.cross_entropy(net(x), t) for x, t in zip(xs, labels, strict=True)]
        ).mean().backward()
        adam.step()
    # torchopt corrects the bias in float32
    assert_close(params, {k: p.detach() for k, p in net.named_parameters()}, rtol=1e-5)


def test_a_step_of_torch_optim_from_returned_gradients():
    net, xs, labels = classifier()
    body, params = plg.from_module(net)
    gradient = plg.value_and_grad(loss_of(body), reduce="mean")
    optimiser = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    values = []
    for _ in range(20):
        value, grads = gradient(params, (xs, labels))
        for name, p in params.items():
            p.grad = grads[name]
        optimiser.step()
        values.append(value.item())
    assert values[-1] < 0.5 * values[0]


def test_meta_optimisation_through_torchopt():
    """A step of an optimiser inside the differentiated loop: the unrolled solver as a scan."""
    w0 = torch.tensor([1.0, -2.0], dtype=torch.float64)
    data = torch.randn(6, 2, dtype=torch.float64)
    inner = lambda w, x: (w * x).sin().sum()

    def plain(lr):
        w = w0
        for x in data:
            w = w - lr * torch.func.grad(inner)(w, x)
        return w.square().sum()

    def ours(lr):
        step = lambda lr, w, x: (w - lr * torch.func.grad(inner)(w, x), None)
        return plg.scan(step, lr, w0, data)[0].square().sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    assert_close(torch.func.grad(ours)(lr), torch.func.grad(plain)(lr))
