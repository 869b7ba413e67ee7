"""Buffers of a module: updated once, in order, by the first pass; a recomputation works on copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pure_loopgrad as plg
from pure_loopgrad.errors import ImpureBodyError
from pure_loopgrad.testing import assert_close

XS = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def batch_norm():
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Dropout(0.3))


class Reader(nn.Module):
    """Reads a buffer that every call replaces, and counts its calls in place."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.register_buffer("level", torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x):
        self.level = 0.8 * self.level + 0.2 * x.detach().abs().mean(0)
        self.calls += 1
        return torch.tanh(x * self.w * self.level + self.table / (1 + self.calls))


NETS = [batch_norm, spectral, Reader]


def make(kind):
    torch.manual_seed(3)
    return kind().double()


def plain(kind):
    """The plain loop: the gradient, and the module afterwards."""
    net = make(kind)
    torch.manual_seed(7)
    torch.stack([net(x) for x in XS]).square().sum().backward()
    return [p.grad for p in net.parameters()], dict(net.named_buffers()), torch.get_rng_state()


def by_map(net):
    plg.map(*plg.from_module(net), XS).square().sum().backward()
    return [p.grad for p in net.parameters()]


def by_value_and_grad(net):
    body, params = plg.from_module(net)
    return list(plg.value_and_grad(body, lambda p, ys: ys.square().sum())(params, XS)[1].values())


def by_one_pass(net):
    body, params = plg.from_module(net)
    return list(plg.value_and_grad(lambda p, x: body(p, x).square().sum(), reduce="sum")(params, XS)[1].values())


def by_func_grad(net):
    body, params = plg.from_module(net)
    return list(torch.func.grad(lambda p: plg.map(body, p, XS).square().sum())(params).values())


def by_checkpoint(net):
    body, params = plg.from_module(net)
    call = plg.checkpoint(lambda p, x: body(p, x))
    torch.stack([call(params, x) for x in XS]).square().sum().backward()
    return [p.grad for p in net.parameters()]


def by_scan(net):
    body, params = plg.from_module(net)
    step = lambda p, c, x: (c + 1, body(p, x))
    plg.scan(step, params, torch.zeros(()), XS, checkpoints=2)[1].square().sum().backward()
    return [p.grad for p in net.parameters()]


def by_while_loop(net):
    body, params = plg.from_module(net)

    def step(p, carry):
        i, total = carry
        return i + 1, total + body(p, XS[i]).square().sum()

    start = torch.tensor(0), torch.tensor(0.0, dtype=torch.float64)
    plg.while_loop(lambda p, c: c[0] < len(XS), step, params, start)[1].backward()
    return [p.grad for p in net.parameters()]


def nested(net):
    """A loop over columns of a loop over rows; the inner one is recomputed inside the recomputation of the outer."""
    body, params = plg.from_module(net)
    outer = lambda p, xs: plg.map(body, p, xs)
    plg.map(outer, params, XS[:, None]).square().sum().backward()
    return [p.grad for p in net.parameters()]


class Patience(nn.Module):
    """A score, and a buffer that counts how often it was asked for where `counting` is set."""

    def __init__(self, counting):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("asked", torch.zeros((), dtype=torch.float64))
        self.counting = counting

    def forward(self, x):
        if self.counting:
            self.asked = self.asked + 1
        return self.w * x + self.asked


@pytest.mark.parametrize("training", [True, False])
def test_a_condition_that_updates_buffers_is_refused_where_a_gradient_is_asked_for(training):
    net = Patience(counting=True).train(training)
    body, params = plg.from_module(net)
    cond, step = lambda p, c: body(p, c) < 7, lambda p, c: c + p["w"]
    start = torch.tensor(1.0, dtype=torch.float64)
    with pytest.raises(ImpureBodyError, match=r"condition.*'asked'.*'frozen'.*carry what decides"):
        plg.while_loop(cond, step, params, start)
    assert net.asked == 0
    with torch.no_grad():
        found = plg.while_loop(cond, step, params, start)
        ref, c = Patience(counting=True), start
        while ref(c) < 7:
            c = c + ref.w
    assert_close((found, net.asked), (c, ref.asked))


@pytest.mark.parametrize("buffers", ["update", "frozen"])
def test_a_condition_that_calls_a_module_and_updates_nothing(buffers):
    net = Patience(counting=buffers == "frozen")
    body, params = plg.from_module(net, buffers=buffers)
    start = torch.tensor(1.0, dtype=torch.float64)
    found = plg.while_loop(lambda p, c: body(p, c) < 3, lambda p, c: c + body(p, c), params, start)
    more, c = float(net.counting), start
    while net.w * c + more < 3:
        c = c + net.w * c + more
    assert_close([found, torch.autograd.grad(found, net.w)[0]], [c, torch.autograd.grad(c, net.w)[0]])


class Growing(nn.Module):
    """Grows what it is given by a buffer that grows itself, where `growing` is set; else it looks what is left."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("h", torch.tensor(1.0, dtype=torch.float64))
        self.growing = True

    def forward(self, x):
        if not self.growing:
            return 20 - x - self.h
        self.h = self.h + 1
        return x + self.w * self.h


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 1, 2])
def test_steps_that_call_a_module_twice(checkpoints, check):
    net, ref = Growing(), Growing()
    body, params = plg.from_module(net)
    xs = torch.tensor([0.1, 5.0, 1.0, -2.0, 0.7], dtype=torch.float64)
    step = lambda p, c, x: (c, body(p, body(p, x)) * x)
    run = plg.Run(check=check)
    found = plg.scan(step, params, torch.zeros(()), xs, checkpoints=checkpoints, run=run)[1]
    expected = torch.stack([ref(ref(x)) * x for x in xs])
    assert_close(torch.autograd.grad(found.square().sum(), net.w), torch.autograd.grad(expected.square().sum(), ref.w))
    assert_close(net.h, ref.h)


@pytest.mark.parametrize("way", [plg.map, "vjp", "scan"])
@pytest.mark.parametrize("asks", ["nobody", "itself", "another"])
def test_a_while_loop_in_the_body_of_another_loop(asks, way):
    """The outer recomputation counts steps from the buffers that the first pass found, and skips what was asked."""
    starts = torch.tensor([0.1, 5.0, 1.0], dtype=torch.float64)
    net, ref, other = Growing(), Growing(), Growing()
    other.growing = False

    def asked(grow, ask, c):
        if asks == "nobody":
            return c < 15
        if asks == "another":
            return ask(c) > 0
        return grow(c, growing=False) > 0

    def called(module, call):
        def with_setting(c, *, growing=True):
            module.growing = growing
            return call(c)

        return with_setting

    (body, params), (look, others) = plg.from_module(net), plg.from_module(other)
    ask = lambda c: look({"w": others["w"].detach()}, c)

    def iteration(p, x):
        cond = lambda p, c: asked(called(net, lambda c: body(p, c)), ask, c)
        return plg.while_loop(cond, lambda p, c: called(net, lambda c: body(p, c))(c), p, x)

    if way == "vjp":
        ys, pullback = plg.vjp(iteration, params, starts)
        found = pullback(2 * ys)[0]["w"]
    else:
        through = lambda: plg.scan(lambda p, c, x: (c, iteration(p, x)), params, torch.zeros(()), starts)[1]
        ys = through() if way == "scan" else way(iteration, params, starts)
        (found,) = torch.autograd.grad(ys.square().sum(), net.w)
    expected = []
    for x in starts:
        c = x
        while asked(called(ref, ref), other, c):
            c = called(ref, ref)(c)
        expected.append(c)
    expected = torch.stack(expected)
    assert_close(ys.detach(), expected.detach())
    assert_close([found], torch.autograd.grad(expected.square().sum(), ref.w))
    assert_close(net.h, ref.h)


WAYS = [by_map, by_value_and_grad, by_one_pass, by_func_grad, by_checkpoint, by_scan, by_while_loop, nested]


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("way", WAYS)
def test_updated_once(way, kind):
    """CASES 10, and the same where buffers are read: gradients and buffers are those of the plain loop."""
    grads, buffers, rng = plain(kind)
    net = make(kind)
    torch.manual_seed(7)
    assert_close(way(net), grads)
    assert_close(dict(net.named_buffers()), buffers)
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("kind", NETS)
def test_a_second_backward_and_later_forwards(kind):
    """The recomputation starts from what its own first pass found, whatever the module holds by then."""
    grads, _, _ = plain(kind)
    net = make(kind)
    torch.manual_seed(7)
    body, params = plg.from_module(net)
    ys, pullback = plg.vjp(body, params, XS)
    plg.map(body, params, XS + 1)
    for _ in range(2):
        assert_close(list(pullback(2 * ys)[0].values()), grads)


def test_hessian():
    net = make(Reader)
    body, params = plg.from_module(net)
    found = torch.func.hessian(lambda p: plg.map(body, p, XS).square().sum())(params)["w"]["w"]
    assert net.calls == len(XS)

    ref, kept = make(Reader), []
    for x in XS:
        kept.append({name: t.clone() for name, t in ref.named_buffers()})
        ref(x)
    loss = lambda w: sum(
        torch.func.functional_call(make(Reader), {"w": w, **copy.deepcopy(s)}, (x,)).square().sum()
        for s, x in zip(kept, XS, strict=True)
    )
    assert_close(found, torch.autograd.functional.hessian(loss, params["w"].detach()))


@pytest.mark.parametrize("kind", NETS)
def test_carried(kind):
    """from_stateful_module under scan: the pure form, which leaves the module alone."""
    grads, buffers, _ = plain(kind)
    net = make(kind)
    before = copy.deepcopy(dict(net.named_buffers()))
    body, params, state = plg.from_stateful_module(net)
    torch.manual_seed(7)
    state, ys = plg.scan(body, params, state, XS, checkpoints=2)
    ys.square().sum().backward()
    assert_close([p.grad for p in net.parameters()], grads)
    assert_close(dict(net.named_buffers()), before)
    assert_close(state, buffers)


def test_vmapped_chunks_are_refused_before_anything_is_touched():
    net = make(batch_norm)
    before = copy.deepcopy(dict(net.named_buffers()))
    body, params = plg.from_module(net)
    with pytest.raises(plg.errors.LoopValueError, match=r"'1\.num_batches_tracked'.*chunk_size=1.*'frozen'"):
        plg.map(body, params, XS, chunk_size=2)
    with pytest.raises(plg.errors.LoopValueError, match="in order"):
        torch.func.vmap(lambda p: plg.map(body, p, XS))({k: torch.stack([v, v]) for k, v in params.items()})
    assert_close(dict(net.named_buffers()), before)
    ys = plg.map(body, params, XS.flatten(0, 1), chunk_size=8, batched=True)  # statistics of each chunk
    assert_close(ys.reshape(5, 8, 3), torch.stack([make(batch_norm)(x) for x in XS]))
    assert net[1].num_batches_tracked == 5


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
@pytest.mark.parametrize("kind", [batch_norm, Reader])
def test_frozen(kind, chunk_size):
    """Every iteration starts from the same buffers, and nothing comes of what it does to them."""
    net, ref = make(kind), make(kind)
    body, params = plg.from_module(net, buffers="frozen")
    plg.map(body, params, XS, chunk_size=chunk_size).square().sum().backward()
    torch.stack([_once(ref, x) for x in XS]).square().sum().backward()
    assert_close([p.grad for p in net.parameters()], [p.grad for p in ref.parameters()])
    assert_close(dict(net.named_buffers()), dict(make(kind).named_buffers()))


def _once(net, x):
    buffers = {k: t.clone() for k, t in net.named_buffers()}
    return torch.func.functional_call(net, buffers, (x,))


def test_frozen_buffers_are_inputs_without_a_gradient():
    net = nn.BatchNorm1d(3).double().eval()
    body, params = plg.from_module(net, buffers="frozen")
    grads = plg.value_and_grad(body, lambda p, ys: ys.square().sum())(params, XS)[1]
    assert [k for k, g in grads.items() if g is not None] == ["weight", "bias"]
    moved = {k: v.detach() + (1.0 if k == "running_mean" else 0) for k, v in params.items()}
    assert not torch.allclose(plg.map(body, moved, XS), plg.map(body, params, XS))
    assert net.running_mean.abs().max() == 0


def test_no_iterations_touch_nothing():
    net = make(batch_norm)
    assert plg.map(*plg.from_module(net), XS[:0]).shape == (0, 8, 3)
    assert net[1].num_batches_tracked == 0


def test_constant_buffers_are_held_once():
    """A buffer that does not change costs one copy, whatever n."""
    net = make(Reader)
    body, params = plg.from_module(net)
    plg.map(body, params, XS).sum().backward()
    assert body.held.known["table"][1] == 0


def test_a_raise_leaves_the_buffers_of_the_iterations_before():
    net, ref = make(batch_norm), make(batch_norm)
    body, params = plg.from_module(net)

    def failing(p, x):
        if torch.equal(x, XS[3]):
            raise KeyError("mine")
        return body(p, x)

    with pytest.raises(KeyError):
        plg.map(failing, params, XS)
    for x in XS[:3]:
        ref(x)
    assert_close(dict(net.named_buffers()), dict(ref.named_buffers()))


def test_unknown_policy():
    with pytest.raises(ValueError, match="'update' or 'frozen'"):
        plg.from_module(make(batch_norm), buffers="carry")
