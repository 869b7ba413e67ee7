"""from_module: the drop-in for a loop over net(x)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close

XS = torch.randn(6, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network():
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 4, 3), nn.SiLU(), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 3), nn.Dropout(0.3)
    return nn.Sequential(*layers).double()


def gradients(net, ys):
    net.zero_grad()
    torch.logsumexp(ys.flatten(), 0).backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("loop", ["map", "mean"])
def test_backward_fills_the_live_parameters(loop):
    net = network()
    torch.manual_seed(5)
    ref = torch.stack([net(x) for x in XS])
    ref = gradients(net, ref if loop == "map" else ref.mean(0))
    torch.manual_seed(5)  # the dropout masks of the plain loop
    found = gradients(net, getattr(plg, loop)(*plg.from_module(net), XS))
    assert_close(found, ref)


def test_an_optimiser_needs_no_change():
    net = network().eval()
    body, params = plg.from_module(net)
    opt = torch.optim.Adam(net.parameters(), lr=0.1)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = (plg.map(body, params, XS, chunk_size=4) - XS[..., 2:6, 2:6]).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def shared_layer():
    a = nn.Linear(3, 3)
    return nn.Sequential(a, nn.Tanh(), a)


def shared_weight():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight, net[2].bias = net[0].weight, net[0].bias
    return net


@pytest.mark.parametrize("make", [shared_layer, shared_weight])
def test_shared_parameters_count_once(make):
    net = make().double()
    own = [id(p) for p in net.parameters()]
    xs = torch.randn(5, 3, dtype=torch.float64)
    body, params = plg.from_module(net)
    assert sorted(params) == ["0.bias", "0.weight"]
    ref = gradients(net, torch.stack([net(x) for x in xs]))
    assert_close(gradients(net, plg.map(body, params, xs)), ref)
    assert [id(p) for p in net.parameters()] == own  # the module holds what it held


@pytest.mark.parametrize(
    ("value", "text"), [(lambda x: x, "not a function"), (nn.DataParallel(nn.Linear(1, 1)), r"\.module")]
)
def test_what_is_no_module(value, text):
    with pytest.raises(TypeError, match=text):
        plg.from_module(value)
