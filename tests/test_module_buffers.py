"""Modules whose buffers do what those of torch's own layers do not: each as the plain loop has it, or refused."""

from __future__ import annotations

import copy
import functools
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import pure_loopgrad as plg
from pure_loopgrad.errors import ImpureBodyError, LoopTypeError, LoopValueError
from pure_loopgrad.testing import assert_close

XS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weight():
    return nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64))


class Stateful(nn.Module):
    """A weight, a buffer h, and in each call what `step(self, x)` does to it."""

    def __init__(self, step, h=None):
        super().__init__()
        self.w = weight()
        self.register_buffer("h", torch.ones(4, dtype=torch.float64) if h is None else h)
        self.step = step

    def forward(self, x):
        return self.step(self, x)


def recurrent(m, x):
    m.h = torch.tanh(m.w * m.h + x)
    return m.h


def recurrent_in_place(m, x):
    m.h.copy_(torch.tanh(m.w * m.h.clone() + x))
    return m.h.clone()


def detached(m, x):
    m.h = torch.tanh(m.w * m.h + x)
    y = m.h * m.w
    m.h = m.h.detach()
    return y


def averaged(m, x):
    """As torch's own layers do it: squared first, which keeps h where h needs a gradient, and then written into."""
    y = m.w * x / (1 + m.h.square())
    with torch.no_grad():
        m.h.lerp_((m.w * x).abs(), 0.3)
    return y


def logged(m, x):
    m.h = m.w * x  # never read
    return m.h.tanh()


def tracked(m, x):
    """Statistics that nobody detaches, and that train mode does not read but to update them."""
    y = m.w * x
    m.h = 0.9 * m.h + 0.1 * y.abs()
    return y.tanh()


def counted(m, x):
    m.h = m.h + 1
    return m.w * x * m.h


def counted_in_place(m, x):
    m.h += 1
    return m.w * x * m.h.clone()


def spectral():
    torch.manual_seed(2)
    return spectral_norm(nn.Linear(4, 3)).double()


def loss(ys):
    return torch.logsumexp(ys.flatten(), 0) + ys.square().sum()


def grads(net):
    return [p.grad for p in net.parameters()]


def plain(net, xs=XS):
    """The plain loop: its gradients, and the buffers afterwards."""
    net = copy.deepcopy(net) if not isinstance(net, Stateful) else Stateful(net.step, net.h.clone()).train(net.training)
    loss(torch.stack([net(x) for x in xs])).backward()
    return grads(net), {name: t.detach() for name, t in net.named_buffers()}


def assert_as_the_plain_loop(net, run, xs=XS):
    expected, buffers = plain(net, xs)
    loss(run(net)).backward()
    assert_close(grads(net), expected)
    assert_close(dict(net.named_buffers()), buffers)


def mapped(net, **options):
    return plg.map(*plg.from_module(net), XS, **options)


def scanned(net, **options):
    body, params, buffers = plg.from_stateful_module(net)
    buffers, ys = plg.scan(body, params, buffers, XS, **options)
    net.load_state_dict({k: t.detach() for k, t in buffers.items()}, strict=False)
    return ys


@pytest.mark.parametrize("first", ["no iterations", "plan"])
def test_a_body_that_was_measured_runs_on_its_buffers(first):
    net = spectral()
    body, params = plg.from_module(net)
    if first == "plan":
        plg.plan(body, params, XS)
    else:
        plg.map(body, params, XS[:0])
    assert_as_the_plain_loop(net, lambda _: plg.map(body, params, XS))


def test_auto_runs_on_the_buffers():
    assert_as_the_plain_loop(spectral(), lambda net: mapped(net, chunk_size="auto"))


# gradients through a buffer


@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 2])
@pytest.mark.parametrize("step", [recurrent, recurrent_in_place, detached, averaged, logged, tracked, counted])
def test_carried_buffers_pass_gradient_on_as_in_the_plain_loop(step, checkpoints):
    assert_as_the_plain_loop(Stateful(step), lambda net: scanned(net, checkpoints=checkpoints))


@pytest.mark.parametrize("make", [spectral, lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()])
def test_carried_buffers_of_torchs_own_layers(make):
    net = make()
    xs = ROWS if isinstance(net, nn.Sequential) else XS
    expected, after = plain(net, xs)
    body, params, buffers = plg.from_stateful_module(net)
    buffers, ys = plg.scan(body, params, buffers, xs)
    loss(ys).backward()
    assert_close(grads(net), expected)
    assert_close(buffers, after)


def test_hessian_through_a_carried_buffer():
    body, params, buffers = plg.from_stateful_module(Stateful(recurrent))

    def ours(w):
        return loss(plg.scan(body, {"w": w}, buffers, XS)[1])

    def direct(w):
        h, ys = buffers["h"], []
        for x in XS:
            h = torch.tanh(w * h + x)
            ys.append(h)
        return loss(torch.stack(ys))

    w = params["w"].detach()
    assert_close(torch.func.hessian(ours)(w), torch.func.hessian(direct)(w))


def test_a_carried_buffer_that_needs_data_is_one_that_may_pass_gradient_on():
    def step(m, x):
        m.h = torch.tanh(m.w * m.h + x) if x.detach().sum() > 0 else m.h * m.w
        return m.h

    assert_as_the_plain_loop(Stateful(step), scanned)


def test_a_carried_buffer_that_starts_to_pass_gradient_on_later_is_refused():
    calls = []

    def step(m, x):
        calls.append(0)
        m.h = torch.tanh(m.w * m.h + x)
        y = m.h
        if len(calls) < 4:
            m.h = m.h.detach()
        return y

    with pytest.raises(ImpureBodyError, match=r"'h'.*in iteration 5.*detach"):
        loss(scanned(Stateful(step), run=plg.Run(check="off"))).backward()


@pytest.mark.parametrize("loop", [plg.map, plg.sum, plg.mean])
@pytest.mark.parametrize("step", [recurrent, recurrent_in_place])
def test_a_cut_gradient_is_refused(step, loop):
    ys = loop(*plg.from_module(Stateful(step)), XS)
    with pytest.raises(LoopValueError, match=r"'h'.*in iteration 0.*from_stateful_module with plg.scan.*detach"):
        ys.sum().backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.func.hessian])
def test_a_cut_gradient_is_refused_under_transforms(transform):
    body, params = plg.from_module(Stateful(recurrent))
    with pytest.raises(LoopValueError, match="from_stateful_module"):
        transform(lambda w: loss(plg.map(body, {"w": w}, XS)))(params["w"].detach())


def test_a_cut_tangent_is_refused_with_the_buffer_untouched():
    net = Stateful(recurrent)
    body, params = plg.from_module(net)
    w = params["w"].detach()
    with pytest.raises(LoopValueError, match="from_stateful_module"):
        torch.func.jvp(lambda w: loss(plg.map(body, {"w": w}, XS)), (w,), (w,))
    assert_close(net.h, torch.ones(4, dtype=torch.float64))


def test_so_in_a_dual_level_where_a_body_is_called_as_it_is():
    net = Stateful(recurrent)
    body, params = plg.from_module(net)
    w = params["w"].detach()
    with forward_ad.dual_level(), pytest.raises(LoopValueError, match="from_stateful_module"):
        body({"w": forward_ad.make_dual(w, w)}, XS[0])
    assert_close(net.h, torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("grad_mode", [True, False])
def test_carried_buffers_pass_tangents_on_in_a_dual_level(grad_mode):
    body, params, buffers = plg.from_stateful_module(Stateful(recurrent))
    w = params["w"].detach()
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        dual = forward_ad.make_dual(w, w.cos())
        found = forward_ad.unpack_dual(plg.scan(body, {"w": dual}, buffers, XS)[1]).tangent
        h, ys = buffers["h"], []
        for x in XS:
            h = torch.tanh(dual * h + x)
            ys.append(h)
        assert_close(found, forward_ad.unpack_dual(torch.stack(ys)).tangent)


@pytest.mark.parametrize("save", ["nothing", "everything"])
@pytest.mark.parametrize("step", [detached, averaged, logged, tracked, counted, counted_in_place])
def test_a_buffer_through_which_no_gradient_flows_is_not_refused(step, save):
    assert_as_the_plain_loop(Stateful(step), lambda net: mapped(net, run=plg.Run(save=save)))


@pytest.mark.parametrize("step", [detached, averaged, logged, tracked, counted])
def test_nor_in_forward_mode(step):
    body, params = plg.from_module(Stateful(step))
    w = params["w"].detach()
    found = torch.func.jacfwd(lambda w: loss(plg.map(body, {"w": w}, XS)))(w)
    assert_close([found], plain(Stateful(step))[0])


def test_without_a_gradient_nothing_is_refused():
    net, ref = Stateful(recurrent), Stateful(recurrent)
    with torch.no_grad():
        assert_close(mapped(net), torch.stack([ref(x) for x in XS]))
    assert_close(net.h, ref.h)


# settings of a module that change


def switched(m, x):
    """Reads h only where `m.reads`, and leaves gradient in it only where `m.passes`."""
    y = m.w * x + (m.h if m.reads else 0)
    h = torch.tanh(m.w * x + y)
    m.h = h if m.passes else h.detach()
    return y


def switch(reads, passes):
    net = Stateful(switched)
    net.reads, net.passes = reads, passes
    return net


@pytest.mark.parametrize(("reads", "passes"), [(True, False), (False, True)])
def test_a_cut_gradient_is_refused_once_a_setting_has_changed(reads, passes):
    net = switch(reads, passes)
    body, params = plg.from_module(net)
    loss(plg.map(body, params, XS)).backward()
    net.reads = net.passes = True
    with pytest.raises(LoopValueError, match="from_stateful_module"):
        loss(plg.map(body, params, XS)).backward()


@pytest.mark.parametrize("where", ["module", "elsewhere"])
def test_carried_buffers_pass_gradient_on_once_a_setting_has_changed(where):
    settings = SimpleNamespace(passes=False)

    def step(m, x):
        m.passes = settings.passes if where == "elsewhere" else m.passes
        return switched(m, x)

    net, ref = switch(True, False), switch(True, False)
    net.step = ref.step = step
    body, params, buffers = plg.from_stateful_module(net)
    plg.scan(body, params, buffers, XS)[1].sum().backward()
    net.zero_grad()
    net.passes = ref.passes = settings.passes = True
    loss(plg.scan(body, params, buffers, XS)[1]).backward()
    loss(torch.stack([ref(x) for x in XS])).backward()
    assert_close(grads(net), grads(ref))


def test_a_setting_that_the_body_changes_between_two_calls():
    """One call sets what the other one reads."""

    def both(net, call, x):
        net.reads, net.passes = False, True
        call(x)
        net.reads, net.passes = True, False
        return call(x)

    net, ref = switch(False, True), switch(False, True)
    body, params, buffers = plg.from_stateful_module(net)

    def step(p, h, x):
        def call(x):
            nonlocal h
            h, y = body(p, h, x)
            return y

        return h, both(net, call, x)

    loss(plg.scan(step, params, buffers, XS)[1]).backward()
    loss(torch.stack([both(ref, ref, x) for x in XS])).backward()
    assert_close(grads(net), grads(ref))


def test_to_look_at_a_module_leaves_its_attributes_alone():
    def step(m, x):
        if not getattr(m, "begun", False):
            m.begun, m.h = True, x.detach()
        m.h = torch.tanh(m.w * m.h + x)
        return m.h

    net, ref = Stateful(step), Stateful(step)
    body, params, buffers = plg.from_stateful_module(net)
    ys = plg.scan(body, params, buffers, XS)[1]
    assert_close(ys.detach(), torch.stack([ref(x) for x in XS]).detach())


# two calls in an iteration


def left_then_read(m, x):
    """Reads h or leaves gradient in it."""
    if m.reads:
        return m.w * x * m.h
    m.h = torch.tanh(m.w * x)
    return m.w * x


@pytest.mark.parametrize("reads_first", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_gradient_cut_between_two_calls_is_refused(same, reads_first):
    net = Stateful(left_then_read)
    other = net if same else Stateful(left_then_read, net.h)
    (leave, params), (read, _) = plg.from_module(net), plg.from_module(other)

    def step(p, x):
        calls = [(read, other, True), (leave, net, False)]
        ys = []
        for call, module, reads in calls if reads_first else reversed(calls):
            module.reads = reads
            ys.append(call(p, x))
        return ys[0] + ys[1]

    message = r"'h'.*reads in iteration \d was set by another call in iteration \d.*from_stateful_module"
    with pytest.raises(LoopValueError, match=message):
        loss(plg.map(step, params, XS)).backward()
    with pytest.raises(LoopValueError, match=message):
        torch.func.grad(lambda p: loss(plg.map(step, p, XS)))({"w": params["w"].detach()})


@pytest.mark.parametrize(
    "phases",
    [["leave", "read without gradient"], ["leave", "detach", "read"], ["leave", "overwrite", "read"], ["read"]],
)
def test_a_call_that_gets_no_gradient_from_another_one_is_not_refused(phases):
    def step(m, x):
        if m.phase.startswith("read"):
            return m.w * x * m.h
        m.h = {"leave": torch.tanh(m.w * x), "detach": m.h.detach(), "overwrite": x.detach()}[m.phase]
        return m.w * x

    def iteration(net, call, x):
        y = 0
        for phase in phases:
            net.phase = phase
            with torch.set_grad_enabled(phase != "read without gradient"):
                out = call(x)
            y = y + out
        return y

    net, ref = Stateful(step), Stateful(step)
    body, params = plg.from_module(net)
    loss(plg.map(lambda p, x: iteration(net, lambda x: body(p, x), x), params, XS)).backward()
    loss(torch.stack([iteration(ref, ref, x) for x in XS])).backward()
    assert_close(grads(net), grads(ref))
    assert_close(net.h, ref.h.detach())


# weights that torch caches


def cacheable():
    torch.manual_seed(3)
    return weight_norm(nn.Linear(4, 2)).double()


def test_the_cache_of_parametrizations_is_put_aside():
    expected, _ = plain(cacheable())
    net = cacheable()
    with parametrize.cached():
        own = net.weight
        loss(mapped(net)).backward()
        assert net.weight is own
    assert_close(grads(net), expected)


def test_so_for_a_body_of_the_user():
    net = cacheable()
    expected, _ = plain(net)
    params = dict(net.named_parameters())
    with parametrize.cached():
        loss(plg.map(lambda p, x: torch.func.functional_call(net, p, (x,)), params, XS)).backward()
    assert_close(grads(net), expected)


def test_a_plan_leaves_nothing_in_the_cache():
    net = cacheable()
    with parametrize.cached():
        plg.plan(*plg.from_module(net), XS)
        assert type(net.weight) is torch.Tensor


# iterations at once


@pytest.mark.parametrize("chunk_size", [2, None])
@pytest.mark.parametrize("make", [lambda: Stateful(counted), lambda: Stateful(counted_in_place), spectral])
def test_chunks_of_a_module_that_updates_buffers_are_refused_with_nothing_touched(make, chunk_size):
    net = make()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(LoopValueError, match=r"buffer '.*' in every iteration.*chunk_size=1.*'frozen'"):
        mapped(net, chunk_size=chunk_size)
    assert_close(net.state_dict(), before)


def test_chunks_of_a_module_that_writes_batched_values_are_refused_with_nothing_touched():
    net = Stateful(averaged)
    with pytest.raises(RuntimeError, match="vmap"):
        mapped(net, chunk_size=2)
    assert_close(net.h, torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("step", [counted, counted_in_place, detached, averaged])
def test_auto_takes_one_iteration_at_a_time_then(step):
    assert_as_the_plain_loop(Stateful(step), lambda net: mapped(net, chunk_size="auto"))


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_constant_buffers_go_through_chunks(chunk_size):
    net = Stateful(lambda m, x: m.w * x * m.h)
    assert_as_the_plain_loop(net, lambda net: mapped(net, chunk_size=chunk_size))


def test_an_ensemble_is_refused():
    body, params = plg.from_module(Stateful(counted))
    with pytest.raises(LoopValueError, match="in order"):
        torch.func.vmap(lambda w: plg.map(body, {"w": w}, XS))(params["w"].detach().expand(2, 4))


# other shapes and dtypes


@pytest.mark.parametrize(
    ("start", "change"),
    [
        (torch.zeros(0, 4), lambda h, x: torch.cat([h, x[None]])),
        (torch.zeros(4), lambda h, x: x.mean()),
        (torch.zeros(4, dtype=torch.int64), lambda h, x: h * 0.5 + x),
        (torch.zeros(4, dtype=torch.float32), lambda h, x: h + x),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_of_another_kind_is_refused(training, start, change):
    def step(m, x):
        m.h = change(m.h, x.detach())
        return m.w * x + m.h.sum()

    net = Stateful(step, start).train(training)
    with pytest.raises(
        LoopTypeError, match=r"'h' \(shape .* and dtype .* by one with shape .* in iteration 0.*plg.scan"
    ):
        mapped(net)
    assert net.h is start
    assert_close(start, torch.zeros_like(start))


@pytest.mark.parametrize("training", [True, False])
def test_a_buffer_that_is_none_at_first_is_refused(training):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = weight()
            self.register_buffer("h", None)

        def forward(self, x):
            self.h = self.w * x if self.h is None else self.h
            return self.w * x + self.h

    net = Late().train(training)
    with pytest.raises(LoopValueError, match=r"'h', which is None in iteration 0.*once before"):
        mapped(net)
    assert net.h is None


# eval mode


@pytest.mark.parametrize("step", [counted, detached])
def test_a_buffer_replaced_in_eval_mode(step):
    assert_as_the_plain_loop(Stateful(step).eval(), mapped)
    assert_as_the_plain_loop(Stateful(step).eval(), lambda net: mapped(net, run=plg.Run(check="all")))


def test_a_buffer_replaced_in_eval_mode_and_a_body_made_anew():
    """The recomputation of the outer loop makes a body that has seen nothing yet."""

    def step(p, x):
        return plg.from_module(net)[0](p, x)

    net = Stateful(counted).eval()
    params = plg.from_module(net)[1]
    assert_as_the_plain_loop(net, lambda _: plg.map(step, params, XS))


def test_a_gradient_cut_in_eval_mode_is_refused():
    with pytest.raises(LoopValueError, match="from_stateful_module"):
        loss(mapped(Stateful(recurrent).eval())).backward()


@pytest.mark.parametrize("check", ["first", "off"])
def test_a_buffer_written_into_in_eval_mode_is_refused(check):
    with pytest.raises(ImpureBodyError, match=r"'h'.*in place in iteration 0, in eval mode.*'frozen'"):
        mapped(Stateful(counted_in_place).eval(), run=plg.Run(check=check))


def test_chunks_in_eval_mode_are_refused_where_a_buffer_is_replaced():
    net = Stateful(counted).eval()
    with pytest.raises(LoopValueError, match="in order"):
        mapped(net, chunk_size=3)
    assert_close(net.h, torch.ones(4, dtype=torch.float64))


def test_constant_buffers_in_eval_mode_are_not_copied():
    seen = []

    def step(m, x):
        seen.append(m.h)
        return m.w * x * m.h

    net = Stateful(step).eval()
    loss(mapped(net)).backward()
    assert len(seen) == 12
    assert all(t is net.h for t in seen)


# what happens to the module beside


def test_a_module_moved_after_from_module():
    """`module.double()` puts other tensors in the places of its buffers."""
    net, ref = nn.BatchNorm1d(4), nn.BatchNorm1d(4).double()
    body, params = plg.from_module(net)
    net.double()
    plg.map(body, params, ROWS)
    for x in ROWS:
        ref(x)
    assert_close(dict(net.named_buffers()), dict(ref.named_buffers()))


def test_inference_mode():
    net, ref = Stateful(averaged), Stateful(averaged)
    with torch.inference_mode():
        assert_close(mapped(net), torch.stack([ref(x) for x in XS]))
    assert_close(net.h, ref.h)


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("first", [True, False])
def test_the_mode_of_the_first_pass_holds_in_the_recomputation(first, check):
    def make():
        torch.manual_seed(4)
        layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        return nn.Sequential(*layers).double().train(first)

    net, ref = make(), make()
    torch.manual_seed(5)
    expected = torch.stack([ref(x) for x in ROWS])
    torch.manual_seed(5)
    ys = plg.map(*plg.from_module(net), ROWS, run=plg.Run(check=check))
    for m in (net, ref):
        m.train(not first)
    loss(ys).backward()
    loss(expected).backward()
    assert_close(grads(net), grads(ref))
    assert_close(dict(net.named_buffers()), dict(ref.named_buffers()))
    assert all(layer.training is not first for layer in net.modules())


def test_a_body_that_sets_the_mode_itself():
    net, ref = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double() for _ in range(2))
    ref.load_state_dict(net.state_dict())
    body, params = plg.from_module(net)

    def both(call, m, x):
        return call(m.train(), x) + call(m.eval(), x)

    torch.manual_seed(6)
    loss(torch.stack([both(lambda m, x: m(x), ref, x) for x in XS])).backward()
    torch.manual_seed(6)
    loss(plg.map(lambda p, x: both(lambda m, x: body(p, x), net, x), params, XS)).backward()
    assert_close(grads(net), grads(ref))


COMPILED = plg.Run(compile=functools.partial(torch.compile, backend="aot_eager", fullgraph=True), check="off")


@pytest.fixture
def no_warning():
    """What cannot be compiled says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("make", [lambda: Stateful(recurrent), lambda: Stateful(detached), spectral])
def test_compiled_steps_that_carry_buffers(make):
    assert_as_the_plain_loop(make(), lambda net: scanned(net, run=COMPILED))


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [spectral, lambda: Stateful(lambda m, x: m.w * x * m.h)])
def test_compiled_chunks_of_a_module(make, training):
    assert_as_the_plain_loop(make().train(training), lambda net: mapped(net, run=COMPILED))


# gradients of single iterations


def scores():
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    body, params = plg.from_module(net)
    return net, lambda p, x: body(p, x).square().sum(), params


def test_per_iteration_gradients_of_a_module_with_running_statistics():
    ref, _, _ = scores()
    expected = []
    for x in ROWS:
        ref.zero_grad()
        ref(x).square().sum().backward()
        expected.append(grads(ref))
    net, body, params = scores()
    found = plg.per_iteration_grads(body, params, ROWS)
    assert_close(list(found.values()), [torch.stack(g) for g in zip(*expected, strict=True)])
    assert_close(dict(net.named_buffers()), dict(ref.named_buffers()))
    net, body, params = scores()
    stats = plg.grad_stats(body, params, ROWS)
    assert_close(stats.mean, {k: g.mean(0) for k, g in found.items()})
    assert_close(dict(net.named_buffers()), dict(ref.named_buffers()))


def test_a_gradient_inside_the_body():
    net, body, params = scores()
    loss(plg.map(lambda p, x: torch.func.grad(body)(p, x)["0.weight"], params, ROWS)).backward()
    found = grads(net)
    ref, _, _ = scores()
    ys = [torch.autograd.grad(ref(x).square().sum(), ref[0].weight, create_graph=True)[0] for x in ROWS]
    loss(torch.stack(ys)).backward()
    assert_close([found[0], found[2]], [ref[0].weight.grad, ref[1].weight.grad])
    assert_close(dict(net.named_buffers()), dict(ref.named_buffers()))
