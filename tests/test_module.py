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


@pytest.mark.parametrize("name", ["map", "chunks", "scan", "value_and_grad", "value_and_grad, no grad mode"])
def test_attention_takes_the_same_way_in_every_pass(name):
    """Torch's encoder layers set padded places to zero where nothing requires grad, as in a first pass."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, dtype=torch.float64)
    net = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    xs, padded = torch.randn(3, 2, 5, 8, dtype=torch.float64), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    weights = torch.randn(3, 2, 5, 8, dtype=torch.float64)
    params = dict(net.named_parameters())
    body = lambda p, x: torch.func.functional_call(net, p, (x,), {"src_key_padding_mask": padded})
    loss = lambda _, ys: (ys * weights).sum()

    plain = torch.stack([net(x, src_key_padding_mask=padded) for x in xs])
    expected = torch.autograd.grad(loss(None, plain), list(params.values()))
    if name.startswith("value_and_grad"):
        with torch.set_grad_enabled(not name.endswith("no grad mode")):
            ours = plg.value_and_grad(body, loss)(params, xs)[1].values()
    else:
        loops = {
            "map": lambda: plg.map(body, params, xs),
            "chunks": lambda: plg.map(lambda p, x: body(p, x), params, xs, chunk_size=3),
            "scan": lambda: plg.scan(lambda p, c, x: (c, body(p, x)), params, xs[0], xs)[1],
        }
        ys = loops[name]()
        torch.testing.assert_close(ys, plain, rtol=1e-10, atol=1e-12)
        ours = torch.autograd.grad(loss(None, ys), list(params.values()))
    torch.testing.assert_close(list(ours), list(expected), rtol=1e-9, atol=1e-12)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("check", ["first", "all", "off"])
@pytest.mark.parametrize("trained", ["nothing", "x", "value_and_grad"])
def test_attention_takes_the_way_of_the_plain_loop_where_nothing_is_trained(trained, check):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, dtype=torch.float64)
    net = torch.nn.TransformerEncoder(layer, 2).eval().requires_grad_(False)
    xs, padded = torch.randn(3, 2, 5, 8, dtype=torch.float64), torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]).bool()
    body = lambda p, x: torch.func.functional_call(net, p, (x,), {"src_key_padding_mask": padded})
    params = dict(net.named_parameters())
    xs.requires_grad_(trained == "x")
    if trained == "value_and_grad":
        plain_params = {k: t.detach().requires_grad_() for k, t in params.items()}
        plain = sum(body(plain_params, x).square().sum() for x in xs)
        expected = torch.autograd.grad(plain, list(plain_params.values()))
        f = plg.value_and_grad(lambda p, x: body(p, x).square().sum(), reduce="sum", run=plg.Run(check=check))
        ours, found = f(params, xs)
        torch.testing.assert_close(list(found.values()), list(expected), rtol=1e-9, atol=1e-12)
    else:
        ours, plain = plg.map(body, params, xs, run=plg.Run(check=check)), torch.stack([body(params, x) for x in xs])
        carried = plg.scan(lambda p, c, x: (c, body(p, x)), params, xs[0], xs, run=plg.Run(check=check))[1]
        torch.testing.assert_close(carried, plain, rtol=1e-10, atol=1e-12)
        assert bool((plain[:, 0, 4] == 0).all()) == (trained == "nothing")
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    if trained == "x":
        found, expected = (torch.autograd.grad(ys.square().sum(), xs)[0] for ys in (ours, plain))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
