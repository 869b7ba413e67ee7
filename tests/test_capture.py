"""A tensor that needs a gradient and is not given to the body is refused, however it is reached."""

from __future__ import annotations

import functools
from contextvars import ContextVar

import pytest
import torch

import pure_loopgrad as plg
from pure_loopgrad._capture import find_name
from tests import conftest

XS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
GLOBAL = torch.ones(4, requires_grad=True)


def closure(w):
    return lambda p, x: p * x * w, "w"


def closure_in_a_container(w):
    box = {"a": [None, w]}
    return lambda p, x: p * x * box["a"][1], r"box\['a'\]\[1\]"


def default_argument(w):
    return lambda p, x, extra=w: p * x * extra, "extra"


def keyword_default(w):
    def body(p, x, *, extra=w):
        return p * x * extra

    return body, "extra"


def partial_argument(w):
    return functools.partial(lambda w, p, x: p * x * w, w), r"\w*partial argument 0"


def partial_keyword(w):
    return functools.partial(lambda p, x, extra: p * x * extra, extra=w), "extra"


def bound_self(w):
    class Model:
        def __init__(self):
            self.weight = w

        def body(self, p, x):
            return p * x * self.weight

    return Model().body, r"self\.weight"


def callable_object(w):
    class Model:
        def __init__(self):
            self.weight = w

        def __call__(self, p, x):
            return p * x * self.weight

    return Model(), r"\w+\.weight"


def nested_function(w):
    def inner(x):
        return x * w

    return lambda p, x: p * inner(x), "w"


def attribute_of_an_object(w):
    class Config:
        scale = 1.0

    config = Config()
    config.deep = w
    return lambda p, x: p * x * config.deep, r"config\.deep"


def intermediate(w):
    y = w.exp()
    return lambda p, x: p * x * y, "y"


WAYS = [
    closure, closure_in_a_container, default_argument, keyword_default, partial_argument, partial_keyword, bound_self,
    callable_object, nested_function, attribute_of_an_object, intermediate,
]  # fmt: skip
P = torch.ones(4)
CALLS = {
    "map": lambda body: plg.map(body, P, XS).sum(),
    "map in chunks": lambda body: plg.map(body, P, XS, chunk_size=2).sum(),
    "sum": lambda body: plg.sum(body, P, XS).sum(),
    "mean": lambda body: plg.mean(body, P, XS).sum(),
    "checkpoint": lambda body: plg.checkpoint(body)(P, XS[0]).sum(),
    "vjp": lambda body: plg.vjp(body, P, XS)[0].sum(),
    "one pass": lambda body: plg.value_and_grad(lambda p, x: body(p, x).sum(), reduce="sum")(P, XS)[0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", CALLS)
def test_live_parameter(call, way):
    body, name = way(torch.ones(4, requires_grad=True))
    with pytest.raises(plg.errors.CapturedTensorError, match=rf"uses {name} \(shape \(4,\) and dtype torch.float32\)"):
        CALLS[call](body)


OUTER = {
    "grad": lambda f, w: torch.func.grad(f)(w),
    "jvp": lambda f, w: torch.func.jvp(f, (w,), (w,)),
    "vmap": lambda f, w: torch.func.vmap(f)(w[None]),
    "vjp": lambda f, w: torch.func.vjp(f, w),
    "grad of grad": lambda f, w: torch.func.grad(lambda w: torch.func.grad(f)(w).sum())(w),
    "vmap of grad": lambda f, w: torch.func.vmap(torch.func.grad(f))(w[None]),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", ["map", "map in chunks", "checkpoint", "one pass"])
def test_tensor_of_an_outer_transform(call, way, outer):
    with pytest.raises(plg.errors.CapturedTensorError, match=rf"uses {way(P)[1]} \(shape"):
        OUTER[outer](lambda w: CALLS[call](way(w)[0]), torch.ones(4))


def test_global_and_module():
    with pytest.raises(plg.errors.CapturedTensorError, match="uses GLOBAL "):
        plg.map(lambda p, x: p * x * GLOBAL, P, XS)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    with pytest.raises(plg.errors.CapturedTensorError, match=r"uses net\.0\.weight .*net\.0\.bias .*from_module"):
        plg.map(lambda p, x: net(x), P, XS)
    with pytest.raises(plg.errors.CapturedTensorError, match=r"Sequential\.0\.weight|0\.weight"):
        plg.checkpoint(net)(XS)


class Scale(torch.autograd.Function):
    """An old-style function, whose inside no function mode sees."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


def test_through_a_function_of_its_own():
    w = torch.ones(4, requires_grad=True)
    with pytest.raises(plg.errors.CapturedTensorError):
        plg.map(lambda p, x: Scale.apply(p * x, w), P, XS)


@pytest.mark.parametrize("outer", ["grad", "vmap"])
def test_a_tensor_that_no_name_leads_to(outer):
    hidden = ContextVar("hidden")

    def f(w):
        hidden.set(w)
        return plg.map(lambda p, x: p * x * hidden.get(), P, XS).sum()

    with pytest.raises(plg.errors.CapturedTensorError, match=r"uses a tensor \(shape \(4,\)"):
        OUTER[outer](f, torch.ones(4))


# What is no mistake must pass.


def test_constants_are_welcome():
    w = torch.ones(4)
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    ys = plg.map(lambda p, x: frozen(p * x * w), P.clone().requires_grad_(), XS)
    assert ys.requires_grad


def test_a_teacher_under_no_grad_or_detached():
    teacher = torch.nn.Linear(4, 4)

    def body(p, x):
        with torch.no_grad():
            target = teacher(x)
        return (p * x - target - teacher.bias.detach()).square().sum()

    p = P.clone().requires_grad_()
    plg.map(body, p, XS).sum().backward()
    q = P.clone().requires_grad_()
    torch.stack([body(q, x) for x in XS]).sum().backward()
    torch.testing.assert_close(p.grad, q.grad)
    plg.value_and_grad(body, reduce="sum")(p, XS)  # the one-pass rule runs it below an ordinary graph


def test_without_a_gradient_nothing_is_refused():
    net = torch.nn.Linear(4, 4)
    with torch.no_grad():
        ys = plg.map(lambda p, x: net(x), P, XS)
    torch.testing.assert_close(ys, net(XS).detach())


def test_a_body_with_transforms_of_its_own():
    """Their wrapped tensors are made inside, at levels that may have the numbers of those around the loop."""

    def body(p, x):
        inner = torch.func.grad(lambda y: torch.func.grad(lambda z: (p * z).sin().sum())(y).sum())(x)
        rows = torch.func.vmap(lambda a: torch.func.jvp(torch.sin, (a * p,), (a,))[1])(torch.stack([x, inner]))
        return rows.sum() + torch.func.hessian(lambda y: (p * y).sin().sum())(x).sum()

    f = lambda loop: lambda p: loop(body, p, XS.double()).sum()
    plain = lambda body, p, xs: torch.stack([body(p, x) for x in xs])
    p = P.double()
    for transform in (
        lambda f: f,
        torch.func.grad,
        torch.func.hessian,
        lambda f: lambda p: torch.func.vmap(f)(p[None]),
    ):
        ref = transform(f(plain))(p)
        torch.testing.assert_close(transform(f(plg.map))(p), ref, rtol=1e-12, atol=1e-12)
        chunked = lambda body, p, xs: plg.map(body, p, xs, chunk_size=2)
        torch.testing.assert_close(transform(f(chunked))(p), ref, rtol=1e-12, atol=1e-12)


def test_the_check_can_be_turned_off():
    w = torch.ones(4, requires_grad=True)
    with plg.run(check="off"):
        assert not plg.map(lambda p, x: p * x * w, P, XS).requires_grad
    with pytest.raises(ValueError, match="check='never'"):
        plg.Run(check="never")


W = torch.full((4,), 2.0)
INDICES = torch.arange(6)
LATE_LOOPS = {
    "map": lambda body, p: plg.map(body, p, INDICES).sum(),
    "map, all saved": lambda body, p: plg.map(body, p, INDICES, run=plg.Run(save="everything")).sum(),
    "sum of two": lambda body, p: plg.sum(lambda p, i: (body(p, i), p), p, INDICES)[0].sum(),
    "batched": lambda body, p: plg.map(lambda p, i: body(p, i[0])[None], p, INDICES, batched=True).sum(),
    "scan, carry": lambda body, p: plg.scan(lambda p, c, i: (c + body(p, i), None), p, torch.zeros(4), INDICES)[
        0
    ].sum(),
    "scan, ys": lambda body, p: plg.scan(lambda p, c, i: (c, body(p, i)), p, torch.zeros(4), INDICES)[1].sum(),
    "one pass": lambda body, p: plg.value_and_grad(lambda p, i: body(p, i).sum(), reduce="sum")(p, INDICES)[0],
    "two passes": lambda body, p: plg.value_and_grad(body, lambda p, y: y.sum())(p, INDICES)[0],
    "each": lambda body, p: plg.per_iteration_grads(lambda p, i: body(p, i).sum(), p, INDICES).sum(),
    "inside another": lambda body, p: plg.map(lambda p, _: plg.sum(body, p, INDICES), p, torch.ones(2)).sum(),
}


@pytest.mark.parametrize("loop", LATE_LOOPS.values(), ids=LATE_LOOPS)
@pytest.mark.parametrize("transform", ["backward", "grad", "jvp", "vmap"])
def test_a_tensor_that_is_captured_by_a_later_iteration_is_refused(loop, transform):
    def f(w):
        weights = [torch.ones(4), torch.ones(4), w]
        return loop(lambda p, i: p * weights[int(i) % 3], P)

    calls = {
        "backward": lambda: f(W.clone().requires_grad_()),
        "grad": lambda: torch.func.grad(f)(W),
        "jvp": lambda: torch.func.jvp(f, (W,), (W,)),
        "vmap": lambda: torch.func.vmap(f)(torch.stack([W, W])),
    }
    with pytest.raises(plg.errors.CapturedTensorError, match=r"weights\[2\]"):
        calls[transform]()


@pytest.mark.parametrize("check", ["first", "all"])
def test_a_leaf_that_the_body_makes_is_no_captured_one(check):
    def force(p, x):  # as in models of energies: a derivative by x inside the body
        x = x.detach().requires_grad_()
        return torch.autograd.grad((p * x).sin().sum(), x, create_graph=True)[0]

    p, xs = P.double().requires_grad_(), XS.double()
    (ours,) = torch.autograd.grad(plg.map(force, p, xs, run=plg.Run(check=check)).square().sum(), p)
    (plain,) = torch.autograd.grad(torch.stack([force(p, x) for x in xs]).square().sum(), p)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


CONSTANTS = {
    "map": lambda body, w, xs: plg.map(body, w, xs),
    "chunks": lambda body, w, xs: plg.map(body, w, xs, chunk_size=2),
    "sum": lambda body, w, xs: plg.sum(body, w, xs),
    "scan": lambda body, w, xs: plg.scan(lambda w, c, x: (c + body(w, x), c * w), w, w, xs)[0],
    "value_and_grad": lambda body, w, xs: plg.value_and_grad(
        lambda w, x: body(w, x).square().sum(), lambda p, y: (y * torch.arange(3)).sum()
    )(w, xs)[1],
    "inside another": lambda body, w, xs: plg.map(lambda w, x: plg.sum(lambda w, y: body(w, x * y), w, xs), w, xs),
}
PLAIN = {
    "map": lambda body, w, xs: torch.stack([body(w, x) for x in xs]),
    "sum": lambda body, w, xs: sum(body(w, x) for x in xs),
    "scan": lambda body, w, xs: w + sum(body(w, x) for x in xs),
    "value_and_grad": lambda body, w, xs: torch.func.grad(
        lambda w: sum(i * body(w, x).square().sum() for i, x in enumerate(xs))
    )(w),
    "inside another": lambda body, w, xs: torch.stack([sum(body(w, x * y) for y in xs) for x in xs]),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian", "grad of jvp", "vmap of grad"])
def test_what_is_made_inside_a_transform_is_a_constant(name, transform):
    xs, w = XS.double(), torch.linspace(0.5, 1, 4, dtype=torch.float64)

    def through(loop):
        def f(w):
            order, mask, scale, still = torch.tensor([2, 0, 1, 3]), torch.arange(4) > 0, torch.ones(4) * 3, w.detach()
            return loop(lambda w, x: (w[order] * x * scale).sin() * mask + still * x * w, w, xs).square().sum()

        transforms = {
            "grad": lambda: torch.func.grad(f)(w),
            "jvp": lambda: torch.func.jvp(f, (w,), (w.sin(),))[1],
            "hessian": lambda: torch.func.hessian(f)(w),
            "grad of jvp": lambda: torch.func.grad(lambda w: torch.func.jvp(f, (w,), (w.sin(),))[1])(w),
            "vmap of grad": lambda: torch.func.vmap(lambda t: torch.func.grad(lambda w: f(w) * t)(w))(w),
        }
        return transforms[transform]()

    ours, plain = through(CONSTANTS[name]), through(PLAIN["map" if name == "chunks" else name])
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)


def test_a_generator_that_a_later_iteration_draws_from_is_refused():
    generator = torch.Generator().manual_seed(0)
    body = lambda p, i: p if i < 2 else p * torch.rand(4, generator=generator)
    with pytest.raises(plg.errors.ImpureBodyError, match="the generator generator"):
        plg.map(body, P, INDICES)


INNER_LOOPS = {
    "map": lambda body, zs: plg.map(body, None, zs).sum(0),
    "sum": lambda body, zs: plg.sum(body, None, zs),
    "chunks": lambda body, zs: plg.sum(body, None, zs, chunk_size=2),
    "scan": lambda body, zs: plg.scan(lambda _, c, z: (c + body(None, z), None), None, torch.zeros_like(zs[0]), zs)[0],
    "value_and_grad": lambda body, zs: plg.value_and_grad(lambda q, z: (q * body(None, z)).sum(), reduce="sum")(W, zs)[
        1
    ],
}


@pytest.mark.parametrize("inner", INNER_LOOPS.values(), ids=INNER_LOOPS)
@pytest.mark.parametrize("outer", ["map", "sum", "checkpoint", "value_and_grad"])
def test_an_inner_loop_that_captures_what_the_outer_one_is_given_is_refused(inner, outer):
    body = lambda p, x: inner(lambda _, z: torch.sin(p * z * x), XS)
    calls = {
        "map": lambda p: plg.map(body, p, XS).sum().backward(),
        "sum": lambda p: plg.sum(body, p, XS).sum().backward(),
        "checkpoint": lambda p: plg.checkpoint(lambda p: body(p, XS[0]))(p).sum().backward(),
        "value_and_grad": lambda p: plg.value_and_grad(body, lambda p, y: y.sum())(p, XS),
    }
    with pytest.raises(plg.errors.CapturedTensorError, match="the body uses p "):
        calls[outer](P.clone().requires_grad_())


def test_nothing_is_left_behind_after_a_refusal():
    state, w = torch.get_rng_state(), torch.ones(4, requires_grad=True)
    with pytest.raises(plg.errors.CapturedTensorError):
        torch.func.grad(lambda p: plg.map(lambda p, x: p * x * w, p, XS).sum())(P)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.func.grad(lambda p: plg.map(lambda p, x: p * x, p, XS).sum())(P).shape == (4,)


def test_the_search_for_a_name_is_bounded_and_survives_cycles():
    loop: list[object] = []
    loop.append(loop)
    assert find_name(lambda p, x: loop, torch.ones(1)) is None
    unassigned = None
    del unassigned
    assert find_name(lambda p, x: p, torch.ones(1)) is None


class Registry:
    """Where a program may keep its net; the body names none of the tensors."""

    net = None
    __slots__ = ("kept",)


def in_a_class(net):
    Registry.net = net
    return lambda: Registry.net, r"Registry\.net\.weight"


def in_a_slot(net):
    registry = Registry()
    registry.kept = net
    return lambda: registry.kept, r"registry\.kept\.weight"


def in_a_python_module(net):
    conftest.net = net
    return lambda: conftest.net, r"conftest\.net\.weight"


def where_no_search_finds_it(net):
    hidden = ContextVar("hidden")
    hidden.set(net)
    return lambda: hidden.get(), "a tensor"


@pytest.mark.parametrize("place", [in_a_class, in_a_slot, in_a_python_module, where_no_search_finds_it])
@pytest.mark.parametrize("loop", LATE_LOOPS.values(), ids=LATE_LOOPS)
def test_a_leaf_that_later_iterations_capture_is_refused(loop, place):
    get, name = place(torch.nn.Linear(4, 4, bias=False))
    with pytest.raises(plg.errors.CapturedTensorError, match=f"uses {name} "):
        loop(lambda p, i: get()(p) if i % 3 > 0 else p, P.clone().requires_grad_())


def test_new_leaves_that_no_name_leads_to_are_made_inside():
    def body(p, x):
        where = x.detach().requires_grad_()
        slope = torch.autograd.grad((p * where).sin().sum(), where, create_graph=True)[0]
        return slope * where

    p, xs = P.double().requires_grad_(), XS.double()
    for keep in ("nothing", "everything"):
        (ours,) = torch.autograd.grad(plg.map(body, p, xs, run=plg.Run(save=keep)).sum(), p)
        (plain,) = torch.autograd.grad(torch.stack([body(p, x) for x in xs]).sum(), p)
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
