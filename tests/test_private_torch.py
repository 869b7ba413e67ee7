"""Canaries: each private thing of torch that the library uses, so that a release that moves one says so here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._functorch.eager_transforms import enable_inplace_requires_grad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode

from pure_loopgrad._accumulate import same_memory, with_storage
from pure_loopgrad._batched_grads import is_batched_by_autograd, level_of_autograd, vmapped
from pure_loopgrad._capture import unwatched
from pure_loopgrad._dual_level import has_tangent, in_dual_level
from pure_loopgrad._early_stop import Layout, NotComputed, Recording
from pure_loopgrad._forward_mode import SingleLevelFunction, apply_at_one_level, below_one_level
from pure_loopgrad._levels import (
    active_levels,
    batched_like,
    below_all_levels,
    draws_for_nobody,
    innermost_in_forward_mode,
    is_batched,
    is_batched_here,
    is_wrapped,
    level_of,
)
from pure_loopgrad._linearise import ENGINE, records
from pure_loopgrad._nodes import children_of
from pure_loopgrad._parametrize import uncached
from pure_loopgrad._tracing import is_traced
from pure_loopgrad.errors import ImpureBodyError


def test_levels():
    x = torch.ones(3)
    assert (active_levels(), level_of(x) < 1, is_wrapped(x)) == (0, True, False)

    def inside(y):
        assert (active_levels(), level_of(y), is_wrapped(y)) == (1, 1, True)
        torch.func.vmap(lambda z: (check(z), z.sin())[1])(y)
        return y.sum()

    def check(z):
        assert (active_levels(), level_of(z)) == (2, 2)

    torch.func.grad(inside)(x)
    assert active_levels() == 0


def test_a_block_below_all_levels():
    def inside(x):
        with below_all_levels():
            assert active_levels() == 0
            assert torch.ones(2).add(1).tolist() == [2, 2]
        assert active_levels() == 1
        return x.sum()

    assert torch.func.grad(inside)(torch.ones(3)).sum() == 3


def test_fake_tensors_have_a_shape_and_no_data():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = mode.from_tensor(torch.ones(2, 3)) @ torch.ones(3, 5)
    assert y.shape == (2, 5)


def test_a_tangent_known_to_be_zero():
    zero = torch._efficientzerotensor((2,))
    assert zero._is_zerotensor()
    assert with_storage(zero).untyped_storage().nbytes() == 8


def test_what_vjp_has_recorded_can_be_walked_by_autograd_afterwards():
    """torch.func.vjp calls a function on wrapped tensors, whose graph is there as long as they are."""
    inside = []

    def fn(x, unused):
        inside.extend((x, unused, x.exp()))
        return inside[-1], ()

    x = torch.ones(3)
    torch.func.vjp(fn, x, x, has_aux=True)
    dx, none = torch.autograd.grad(inside[2], inside[:2], x, retain_graph=False, create_graph=False, allow_unused=True)
    assert none is None
    assert not dx.requires_grad
    torch.testing.assert_close(dx, x.exp())


def test_the_engine_of_autograd():
    """Called as `gradients` does, it gives what torch.autograd.grad gives, and looks at shapes itself."""
    w, x = torch.arange(3.0).requires_grad_(), torch.ones(3, requires_grad=True)
    y = w * w
    for keep_graph in (True, False):
        dw, dx = ENGINE.run_backward((y,), (torch.ones(3),), keep_graph, False, (w, x), True, accumulate_grad=False)
        assert (dw.tolist(), dx, w.grad) == ([0, 2, 4], None, None)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, w, torch.ones(3))
    with pytest.raises(RuntimeError, match="invalid gradient"):
        ENGINE.run_backward((w * w,), (torch.ones(4),), False, False, (w,), True, accumulate_grad=False)


def test_unwrapping_keeps_identity():
    x = torch.ones(3)
    seen = []
    torch.func.grad(lambda y: (seen.append(torch.func.debug_unwrap(y) is x), y.sum())[1])(x)
    assert seen == [True]


def test_what_vmap_asks_for():
    seen = []

    def f(x):
        seen.append((draws_for_nobody([x]), draws_for_nobody([torch.ones(3)]), is_batched(x)))
        return x.sum()

    torch.func.vmap(f, randomness="different")(torch.ones(2, 3))
    torch.func.vmap(torch.func.grad(f))(torch.ones(2, 3))
    torch.func.jacfwd(f)(torch.ones(3))
    assert seen == [(None, "different", True), (None, "error", True), (None, None, False)]


def test_the_batches_of_autograd():
    """Its own vmap, not that of torch.func, which takes its place inside."""
    seen = []

    def inside(dy):
        seen.append((level_of_autograd(), is_batched_by_autograd(dy), is_batched(dy), dy.shape))
        return (dy.exp(),)

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append((level_of_autograd(), is_batched_by_autograd(dy), is_batched(dy), dy.shape))
            (dx,) = vmapped(inside, [dy])
            seen.append((level_of_autograd(), is_batched_by_autograd(dx), is_batched(dx), dx.shape))
            return dx

    x = torch.ones(3, requires_grad=True)
    cotangents = torch.arange(6.0).view(2, 3)
    (dx,) = torch.autograd.grad(Exp.apply(x), x, cotangents, is_grads_batched=True)
    torch.testing.assert_close(dx, cotangents.exp())
    assert seen == [(1, True, False, (3,)), (0, False, True, (3,)), (1, True, False, (3,))]
    assert level_of_autograd() == 0


def test_a_block_that_no_mode_sees():
    class Count(TorchFunctionMode):
        n = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.n += 1
            return func(*args, **(kwargs or {}))

    with Count() as mode:
        with unwatched():
            torch.ones(2).sin()
        assert mode.n == 0
        torch.ones(2)
    assert mode.n == 1


def test_a_tensor_without_data():
    x = torch.ones(2, 3, requires_grad=True)
    y = NotComputed(Layout.of(x))
    assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device)
    for read in (torch.Tensor.tolist, torch.Tensor.numpy, lambda t: t.data_ptr(), lambda t: t + 1):
        with pytest.raises((RuntimeError, ImpureBodyError)):
            read(y)


def test_the_work_of_a_product():
    with Recording(SimpleNamespace(comparing=False)) as recording:
        torch.ones(2, 3) @ torch.ones(3, 5)
    assert recording.tail[0].work == 2 * 2 * 3 * 5


def test_the_work_of_a_convolution():
    with Recording(SimpleNamespace(comparing=False)) as recording:
        torch.nn.functional.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), torch.ones(3))
    assert recording.tail[0].work == 2 * (3 * 3 * 3) * (2 * 3 * 3)


def test_a_function_of_a_single_level():
    """Its forward runs below the gradient, with the jvp innermost."""
    seen = []

    class Cube(SingleLevelFunction):
        @staticmethod
        def forward(static, x):
            def below(tensors):
                seen.append(
                    (innermost_in_forward_mode(), static, forward_ad.unpack_dual(tensors[0]).tangent is not None)
                )
                return (tensors[0] ** 3,)

            return below_one_level(below, (x,))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[1])

        @staticmethod
        def backward(ctx, cotangent):
            return None, 3 * ctx.saved_tensors[0] ** 2 * cotangent

    def f(x):
        seen.append(innermost_in_forward_mode())
        return apply_at_one_level(Cube, "static", [x])[0].sum()

    x = torch.full((2,), 2.0)
    g, dg = torch.func.jvp(torch.func.grad(f), (x,), (torch.ones(2),))
    assert seen == ["grad", ("jvp", "static", True)]
    torch.testing.assert_close((g, dg), (3 * x**2, 6 * x))


def test_which_transform_is_innermost_in_forward_mode():
    seen = []
    note = lambda x: (seen.append(innermost_in_forward_mode()), x.sin())[1]
    x = torch.ones(())
    torch.func.grad(note)(x)
    torch.func.jvp(note, (x,), (x,))
    torch.func.jacfwd(note)(x)
    torch.func.grad(lambda x: torch.func.jvp(note, (x,), (x,))[1])(x)
    torch.func.jvp(torch.func.vmap(note), (x[None],), (x[None],))
    assert (innermost_in_forward_mode(), *seen) == (None, None, "jvp", None, "jvp", None)


def test_a_dual_level_of_ordinary_autograd_is_seen():
    assert not in_dual_level()
    with forward_ad.dual_level():
        assert in_dual_level()
    seen = []
    torch.func.jvp(lambda x: (seen.append(in_dual_level()), x)[1], (torch.ones(2),), (torch.ones(2),))
    assert (seen, in_dual_level()) == ([False], False)


def test_a_tangent_is_seen_where_forward_mode_is_off():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with forward_ad._set_fwd_grad_enabled(False):
            assert has_tangent(dual)
            assert not has_tangent(torch.ones(2))
            assert forward_ad.unpack_dual(dual).tangent is None


def test_another_tensor_of_a_batch():
    def f(x):
        other = batched_like(x, torch.arange(6).view(3, 2))
        assert (is_batched_here(x), is_batched_here(other), is_batched_here(torch.ones(3))) == (True, True, False)
        return other

    assert torch.func.vmap(f, in_dims=1)(torch.ones(3, 2)).tolist() == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_graph_that_records_operations_is_seen(pre_dispatch):
    seen = []

    def f(x):
        seen.append(is_traced())
        return x.sin()

    make_fx(f, pre_dispatch=pre_dispatch)(torch.ones(2))
    make_fx(torch.func.functionalize(f), tracing_mode="fake", pre_dispatch=pre_dispatch)(torch.ones(2))
    torch.func.grad(lambda x: f(x).sum())(torch.ones(2))
    with FunctionalTensorMode():
        assert is_traced()
    assert (seen, is_traced()) == ([True, True, False], False)


def test_the_permission_to_make_a_leaf():
    def inside(x):
        with pytest.raises(RuntimeError, match=r"requires_grad_\(\)"):
            x.detach().requires_grad_()
        with enable_inplace_requires_grad(True):
            assert x.detach().requires_grad_().requires_grad
        return x.sum()

    torch.func.grad(inside)(torch.ones(3))


def test_views_are_known_and_lose_that():
    whole = torch.ones(2, 3)
    assert whole.t()._is_view()
    assert not same_memory(whole.t())._is_view()
    assert same_memory(whole.t()).data_ptr() == whole.data_ptr()


def test_inference_mode_is_seen_where_torch_func_leaves_half_of_it():
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, cotangent):
            with below_all_levels():
                seen.append((torch.is_inference_mode_enabled(), records()))
            return cotangent

    assert records()
    with torch.inference_mode():
        torch.func.grad(lambda x: Spy.apply(x).sum())(torch.ones(3))
    assert seen == [(False, False)]


def test_the_cache_of_parametrizations():
    net = weight_norm(nn.Linear(2, 2))
    with parametrize.cached():
        cached = net.weight
        with uncached():
            own = net.weight
            assert own is not cached
            assert net.weight is not own
        assert net.weight is cached
    assert net.weight is not cached


def test_nodes_of_torch():
    assert children_of({"a": 1}) == [1]
    assert children_of(object()) == []
