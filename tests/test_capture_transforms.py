"""What a body reaches of a torch.func transform around the loop: refused if its derivative would be lost, however late
it is used, and else taken as the constant that it is.
"""

from __future__ import annotations

import contextvars
import types
from collections import deque
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap

import pure_loopgrad as plg

F64 = torch.float64
XS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
W = torch.linspace(0.5, 1, 3, dtype=F64)
ONES = torch.ones(3, dtype=F64)
INDICES = torch.arange(4)


class OfTheClass:
    w = None


class InASlot:
    __slots__ = ("w",)


class Parent(InASlot):
    pass


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9, dtype=F64).view(3, 3).sin(), requires_grad=False)
        self.plain = ONES
        self.register_buffer("scale", ONES)

    def forward(self, x):
        return self.weight @ x * self.scale * self.plain


class Outer(nn.Module):
    """Its own loop runs over a part of it without saying so, from the third iteration on."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Cell()) for _ in range(2)])

    def forward(self, _):
        return plg.map(lambda p, i: p * XS[i] if i < 2 else self.blocks[1](p * XS[i]), ONES, INDICES)


def put_on_a_class(w):
    OfTheClass.w = w
    return lambda: OfTheClass.w, r"OfTheClass\.w"


def put_on_the_class_of_an_instance(w):
    OfTheClass.w = w
    config = OfTheClass()
    return lambda: config.w, r"config\.w"


def put_in_a_slot(w):
    box = Parent()
    box.w = w
    return lambda: box.w, r"box\.w"


def put_far_away(w):
    many = [*range(300), w]
    return lambda: many[-1], r"many\[300\]"


def put_in_a_queue(w):
    queue = deque([w])
    return lambda: queue[0], r"queue\[0\]"


def put_in_a_buffer(w):
    net = nn.Sequential(Cell())
    net[0].scale = w
    return lambda: net[0].scale, r"net\.0\.scale"


def put_in_an_attribute_of_a_module(w):
    net = nn.Sequential(Cell())
    net[0].plain = w
    return lambda: net[0].plain, r"net\.0\.plain"


def put_in_a_hook(w):
    net = nn.Identity()
    net.register_forward_hook(lambda module, args, out: out * w)
    return lambda: net(ONES), "w "


PLACES = [
    put_on_a_class, put_on_the_class_of_an_instance, put_in_a_slot, put_far_away, put_in_a_queue,
    put_in_a_buffer, put_in_an_attribute_of_a_module, put_in_a_hook,
]  # fmt: skip
TRANSFORMS = {
    "grad": lambda f, w: grad(f)(w),
    "jvp": lambda f, w: jvp(f, (w,), (w,)),
    "vmap": lambda f, w: vmap(f)(torch.stack([w, w])),
    "vmap of grad": lambda f, w: vmap(grad(f))(torch.stack([w, w])),
    "jvp without grad": lambda f, w: torch.no_grad()(jvp)(f, (w,), (w,)),
}
LOOPS = {
    "map": lambda body: plg.map(body, ONES, INDICES).sum(),
    "scan": lambda body: plg.scan(lambda p, c, i: (c + body(p, i), None), ONES, 0 * ONES, INDICES)[0].sum(),
    "value_and_grad": lambda body: plg.value_and_grad(body, lambda p, y: y.sum())(ONES, INDICES)[0],
    "inside another": lambda body: plg.map(lambda p, _: plg.sum(body, p, INDICES), ONES, ONES).sum(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_later_iteration_captures_is_refused(loop, transform, place):
    def f(w):
        get, _ = place(w)
        return LOOPS[loop](lambda p, i: p * get() if i > 1 else p)

    with pytest.raises(plg.errors.CapturedTensorError, match=f"uses {place(W)[1]}"):
        TRANSFORMS[transform](f, W)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap", "vmap of grad"])
def test_a_module_whose_parameters_are_swapped(transform):
    net = Outer()
    weight = net.blocks[1][0].weight.detach()
    f = lambda w: functional_call(net, {"blocks.1.0.weight": w}, (None,)).square().sum()
    with pytest.raises(plg.errors.CapturedTensorError, match=r"uses self\.blocks\.1\.0\.weight"):
        TRANSFORMS[transform](f, weight)


class Endless(Mapping):
    """Makes its values when asked, so that none of them is the one before."""

    def __getitem__(self, key):
        return torch.zeros(1)

    def __iter__(self):
        return iter(range(10**9))

    def __len__(self):
        return 10**9


@pytest.mark.parametrize("much", [[*range(30_000)], Endless()], ids=["list", "mapping"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_where_a_body_reaches_too_much_for_a_search_every_iteration_is_watched(transform, much):
    def f(w):
        far = [much, [[[w]]]]
        return plg.map(lambda p, i: p * far[1][0][0][0] if i > 1 else p, ONES, INDICES).sum()

    with pytest.raises(plg.errors.CapturedTensorError):
        TRANSFORMS[transform](f, W)


class Awkward:
    """Whoever asks it for an attribute that it does not have learns more than he wants."""

    __slots__ = ("empty",)

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_a_search_runs_no_code_of_the_user():
    awkward = Awkward()
    f = lambda loop: lambda w: loop(lambda p, x: (awkward, p * x)[1].sin(), w, XS).square().sum()
    torch.testing.assert_close(grad(f(plg.map))(W), grad(f(lambda b, p, xs: torch.stack([b(p, x) for x in xs])))(W))


@pytest.mark.parametrize(("transform", "chunk_size"), [("vmap", 1), ("vmap of grad", 1), ("grad", 2), ("jvp", 2)])
def test_without_a_name_torch_refuses_and_the_error_says_so(transform, chunk_size):
    hidden = contextvars.ContextVar("hidden")

    def f(w):
        hidden.set(w)
        seen = []
        body = lambda p, x: p * x * hidden.get() if len(seen) > 1 else (seen.append(x), p * x)[1]
        return plg.map(body, ONES, torch.cat([XS, XS]), chunk_size=chunk_size).sum()

    with pytest.raises(plg.errors.CapturedTensorError, match=r"of a torch\.func transform around the loop"):
        TRANSFORMS[transform](f, W)


def in_a_module(draw):
    net = nn.Sequential(nn.Identity())
    net[0].generator = torch.Generator().manual_seed(0)
    return lambda: draw(net[0].generator), r"net\.0\.generator"


def in_a_slot(draw):
    box = InASlot()
    box.w = torch.Generator().manual_seed(0)
    return lambda: draw(box.w), r"box\.w"


def in_a_class(draw):
    class Noise:
        generator = torch.Generator().manual_seed(0)

    return lambda: draw(Noise.generator), r"Noise\.generator"


@pytest.mark.parametrize("place", [in_a_module, in_a_slot, in_a_class])
def test_a_generator_that_a_later_iteration_draws_from_is_refused(place):
    draw, name = place(lambda generator: torch.rand(3, generator=generator, dtype=F64))
    with pytest.raises(plg.errors.ImpureBodyError, match=f"the generator {name}"):
        plg.map(lambda p, i: p * draw() if i > 1 else p, ONES, INDICES)


# Constants.

KINDS = {
    "grad": lambda f: grad(f)(W),
    "grad of grad": lambda f: grad(lambda w: grad(f)(w).square().sum())(W),
    "hessian": lambda f: hessian(f)(W),
    "jvp": lambda f: jvp(f, (W,), (W.sin(),))[1],
    "vmap of grad": lambda f: vmap(grad(f))(torch.stack([W, 2 * W])),
}
PLAIN = lambda body, p, xs: torch.stack([body(p, x) for x in xs])
OURS = {"map": plg.map, "chunks": lambda body, p, xs: plg.map(body, p, xs, chunk_size=2)}


def assert_agrees(make_body, kind, loop):
    """A loop around a body that is made inside the transform has the plain loop's derivative."""
    through = lambda loop: KINDS[kind](lambda w: loop(make_body(w), w, XS).square().sum())
    torch.testing.assert_close(through(OURS[loop]), through(PLAIN), rtol=1e-10, atol=1e-12)


def of_a_module(_):
    net = Cell()
    net.plain, net.scale = torch.tensor([1.0, 0.0, 2.0], dtype=F64), torch.arange(3, dtype=F64)
    return lambda p, x: net(p * x).tanh()


def far_away(_):
    many = [torch.tensor(float(i), dtype=F64) for i in range(300)]
    return lambda p, x: (p * x / many[-1] * many[3]).tanh()


def of_a_class(_):
    class Settings:
        mask = torch.arange(3) > 0

    return lambda p, x: (p * x).tanh() * Settings.mask


def end_of_a_slice(_):
    k = torch.tensor(2)
    return lambda p, x: (p * x).tanh()[:k] * x[k]


def given_to_a_vmap(_):
    rows = torch.arange(6, dtype=F64).view(2, 3)
    return lambda p, x: vmap(lambda r: (r * p * x).tanh(), in_dims=0)(rows)


def given_to_a_vmap_of_a_vmap(_):
    rows = torch.arange(6, dtype=F64).view(3, 2)
    return lambda p, x: vmap(vmap(lambda r, a: (r * a).tanh(), (0, None)), (1, 0))(rows, (p * x)[:2])


MADE_INSIDE = [of_a_module, far_away, of_a_class, end_of_a_slice, given_to_a_vmap, given_to_a_vmap_of_a_vmap]


@pytest.mark.parametrize("make_body", MADE_INSIDE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", OURS)
def test_what_is_made_inside_a_transform_is_a_constant(make_body, kind, loop):
    assert_agrees(make_body, kind, loop)


@pytest.mark.parametrize("kind", ["grad", "grad of grad", "hessian", "vmap of grad"])
@pytest.mark.parametrize("loop", OURS)
def test_a_constant_that_is_given_to_a_gradient_inside_the_body_is_refused(kind, loop):
    def make_body(_):
        points = torch.arange(3, dtype=F64)
        return lambda p, x: grad(lambda a: (a * p * x).tanh().sum())(points)

    with pytest.raises(plg.errors.CapturedTensorError, match=r"around the loop where torch takes none: points \("):
        assert_agrees(make_body, kind, loop)


# Dual tensors of ordinary autograd.


@pytest.mark.parametrize("loop", ["map", "scan", "inside another"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_dual_tensor_that_is_captured_is_refused(loop, first, grad_mode):
    with torch.set_grad_enabled(grad_mode), forward_ad.dual_level():
        box = types.SimpleNamespace(dual=forward_ad.make_dual(W, W.sin()))
        with pytest.raises(plg.errors.CapturedTensorError, match=r"uses box\.dual \("):
            LOOPS[loop](lambda p, i: p * box.dual if i >= first else p)


def test_inside_a_dual_level_constants_and_what_is_given_are_welcome():
    mask = torch.arange(3) > 0
    tangents = []
    for loop in (plg.map, PLAIN):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(W, W.sin())
            still = forward_ad.make_dual(W, W.cos())
            body = lambda p, x, still=still: (p * x * mask).tanh() * still.detach() + still.shape[0]
            tangents.append(forward_ad.unpack_dual(loop(body, dual, XS)).tangent)
    torch.testing.assert_close(*tangents, rtol=1e-12, atol=1e-12)
