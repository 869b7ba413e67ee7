"""Loops over the ranks of a gloo group: the numbers of one process, two collectives a call, faults that all hear of."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import pure_loopgrad as plg
from pure_loopgrad import _sharded_map, distributed
from pure_loopgrad._channel import _capacity, _flat, _unflat
from pure_loopgrad._identity import contents_of
from pure_loopgrad.errors import LoopValueError
from pure_loopgrad.testing import assert_close
from tests import sharded_cases as cases
from tests.ranks import on_ranks

WORLDS = [1, 2, 3]
N = cases.N


def reference(reduce, sizes):
    live, xs = cases.live_params(), cases.XS[: sum(sizes)].clone().requires_grad_()
    value = cases.loss(live, cases.plain(live, xs, reduce))
    dw, db, dxs = torch.autograd.grad(value, [live["W"], live["b"][0], xs])
    return value.detach(), dw, db, dxs


def run(world, fn, *args):
    results = on_ranks(world, fn, *args)
    assert not any(isinstance(r, str) for r in results), next(r for r in results if isinstance(r, str))
    assert not any(r is None for r in results), "a rank hangs"
    return results


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_gets_what_one_process_gets(world):
    """CASES 33: for stack, sum, mean and weighted mean, by both ways, with shards of any size."""
    found = run(world, cases.gradients, world, {})
    for rank, results in enumerate(found):
        assert len(results) == 2 * len(cases.SHARDS[world]) * len(cases.REDUCES)
        for (_, sizes, reduce), (value, dw, db, dxs) in results.items():
            ref = reference(reduce, sizes)
            assert_close((value, dw, db, dxs), (*ref[:3], ref[3][cases.own(sizes, rank)]), rtol=1e-10)


@pytest.mark.parametrize(
    "options", [{"chunk_size": 2}, {"deterministic": True}, {"chunk_size": None, "run": plg.Run(save="everything")}]
)
def test_options_change_nothing(options):
    for rank, results in enumerate(run(2, cases.gradients, 2, options)):
        for (_, sizes, reduce), (value, dw, db, dxs) in results.items():
            ref = reference(reduce, sizes)
            assert_close((value, dw, db, dxs), (*ref[:3], ref[3][cases.own(sizes, rank)]), rtol=1e-10)


def test_every_transform():
    found = run(2, cases.transforms, [3, 2])
    for results in found:
        for reduce, outs in results.items():

            def f(b, reduce=reduce):
                p = {**cases.P, "b": [b]}
                return cases.loss(p, cases.plain(p, cases.XS, reduce))

            assert_close(outs, cases.derivatives(f), rtol=1e-10)


def test_two_collectives_a_call():
    """CASES 34: an all_gather of outputs and an all_reduce of gradients; sums need two all_reduces."""
    stacked = {"all_gather_single": 1, "all_reduce": 1}
    expected = {"stack": stacked, "sum": {"all_reduce": 2}}
    for results in run(2, cases.collectives, [3, 2]):
        for reduce, calls in expected.items():
            assert results[reduce, "second"] == calls
            assert results[reduce, "larger again"] == calls
            assert results[reduce, "loop"] == calls
            assert results[reduce, "first"]["all_gather_object"] == 1  # the handshake
        assert results["stack", "larger"][0] == {"all_gather_single": 2, "all_reduce": 1}
        tripled = torch.cat([cases.XS[part] for part in (slice(0, 3),) * 3 + (slice(3, 5),) * 3])
        ref = cases.loss(cases.P, cases.plain(cases.P, tripled, "stack"))
        assert_close(results["stack", "larger"][1], ref, rtol=1e-10)


def test_one_pass_takes_one_collective():
    scalar = lambda p, x: cases.body(p, x)["y"].sum()
    loss = lambda p, z: -torch.nn.functional.logsigmoid(z) + p["W"].sum()
    for sizes in ([3, 2], [5, 0]):
        for results in run(2, cases.one_pass, sizes):
            for reduce in ("sum", "mean"):
                ref = plg.value_and_grad(scalar, loss, reduce=reduce, plan="two_pass")(cases.P, cases.XS)
                assert_close(results[reduce], ref, rtol=1e-10)
                assert results[reduce, "calls"] == {"all_reduce": 1}


@pytest.mark.parametrize("sizes", [[3, 2], [5, 0]])
def test_sparse_gradients_of_an_embedding(sizes):
    """Added up over ranks they are dense."""
    for results in run(2, cases.sparse_gradients, sizes):
        for reduce, grads in results.items():
            table = cases.TABLE.clone().requires_grad_()
            ys = torch.stack([cases.embedded(table, x, sparse=False) for x in cases.TOKENS])
            (ys if reduce == "stack" else ys.sum(0)).square().sum().backward()
            for grad in grads:
                assert_close(grad.to_dense(), table.grad, rtol=1e-10)


def test_ranks_draw_from_streams_of_their_own_which_replay():
    first, second = run(2, cases.streams, 2)
    ys = first[0]
    assert_close(first, second)  # the stacks, the gradients, and the default generator
    assert not torch.equal(ys[:2], ys[2:])  # seeded alike, the masks differ
    assert not torch.equal(ys[0], ys[1])
    assert_close(first[1], ys.sum(0))  # d(m w x)/dw = m x, which is y at w = 1


def test_orders_of_addition():
    found = run(3, cases.orders, 3)
    parts = [sum(xs) for xs, *_ in found]
    in_order = parts[0] + parts[1] + parts[2]
    exact = sum(xs.double().sum(0) for xs, *_ in found)
    scale = sum(xs.double().abs().sum(0) for xs, *_ in found)
    for _, fixed, default, half in found:
        assert all(torch.equal(total, in_order) for total in fixed)
        assert ((default.double() - exact).abs() <= 1e-6 * scale).all()
        assert torch.equal(half, half.bfloat16().float())
        assert ((half.double() - exact).abs() <= 2**-7 * scale).all()


def test_faults_are_heard_by_all():
    """Two ranks, one of which fails; then the shapes differ; then all is well."""
    first, second = run(2, cases.faults, 2)
    phases = [
        (reduce, name)
        for reduce in ("stack", "sum")
        for name in ("first call", "later call", "backward", "backward of a loop")
    ]
    for phase in phases:
        assert second[phase] == ("ValueError", second[phase][1])
        assert "the disk is full" in second[phase][1]
        assert first[phase][0] == "DistributedError"
        assert "rank 1 raised ValueError: the disk is full" in first[phase][1]
    for seen in (first, second):
        assert seen["xs"][0] == "LoopValueError"
        assert "rank 0 has xs: shape (3,)" in seen["xs"][1]
        assert "rank 1 has xs: shape (2,)" in seen["xs"][1]
        assert "rank 0 has output: shape (2,)" in seen["outputs"][1]
        assert "rank 1 has output: shape (1,)" in seen["outputs"][1]
        assert_close(seen["after"], cases.XS[:3].sum(0))


@pytest.mark.parametrize("sizes", [[5, 0], [0, 5], [3, 2]])
def test_closures_of_one_code_with_other_outputs(sizes):
    """Also on the rank that has no iterations, and has to know what the others do."""
    w = cases.P["b"][0]
    for rank, (found, failed, after, calls) in enumerate(run(2, cases.heads, sizes)):
        for k, outs in zip((3, 2, 3), found, strict=True):
            live = w.clone().requires_grad_()
            ys = torch.stack([(live * x)[:k] for x in cases.XS])
            value = ys.sum(0).square().sum()
            assert_close(outs, (ys.detach(), ys.sum(0).detach(), value.detach(), *torch.autograd.grad(value, live)))
        for name, text in failed:
            assert name == ("DistributedError", "ValueError")[rank]
            assert "the disk is full" in text
        assert_close(after, (w * cases.XS)[:, :2].sum(0))
        assert calls == {"all_reduce": 1}  # a closure like one before needs no comparison


@pytest.mark.parametrize("sizes", [[3, 2], [5, 0]])
def test_sums_of_every_dtype(sizes):
    xs = cases.XS
    live = {"a": cases.P["b"][0].clone(), "c": cases.P["W"][0, :2] * (1 + 2j)}
    live = {k: t.requires_grad_() for k, t in live.items()}
    torch.stack([cases.of_complex(live, x) for x in xs]).square().sum().backward()
    for outs, *grads in run(2, cases.dtypes, sizes):
        assert_close(outs[0], xs[:, :1].sum(0))
        assert_close(outs[1], xs.sum(0) * 1j)
        assert outs[2].tolist() == (xs > 0).sum(0).tolist()
        assert [int(t) for t in outs[3:5]] == [5 * (2**53 + 1), -5 * (2**53 + 1)]
        assert (outs[5].item(), outs[5].dtype) == (5, plg.sum(lambda p, x: x, None, torch.ones(1).int()).dtype)
        for grad in grads:
            assert_close(grad, {k: t.grad for k, t in live.items()})


def test_ranks_that_differentiate_other_leaves():
    """Their gradients have equal shapes, and would be added to one another."""
    for seen in run(2, cases.marks, 2):
        for name, text in seen:
            assert name == "LoopValueError"
            assert "rank 0 has params['a']: shape (3,) and dtype torch.float64, differentiated" in text
            assert "rank 1 has params['a']: shape (3,) and dtype torch.float64, constant" in text


def test_a_killed_rank_is_reported():
    survivor, dead = on_ranks(2, cases.killed, 2)
    assert dead is None
    name, text, seconds = survivor
    assert name == "DistributedError"
    assert "could not reach the others" in text
    assert seconds < 30


def test_other_kinds_of_distribution():
    """CASES 34: a DDP-wrapped module gets a message; so do params that are DTensors."""
    for seen in run(2, cases.foreign, 2):
        by_from_module, as_body, works, as_params = seen
        assert by_from_module[0] == as_body[0] == as_params[0] == "LoopTypeError"
        assert ".module" in by_from_module[1]
        assert ".module" in as_body[1]
        assert works == (2 * N, 2)
        assert "params['w'].full_tensor()" in as_params[1]


def test_without_a_group():
    with pytest.raises(LoopValueError, match="init_process_group"):
        distributed.map(lambda p, x: x, None, torch.ones(3))


def test_shards_are_consecutive_and_leave_nothing_out(monkeypatch):
    xs = {"a": torch.arange(7), "b": (torch.arange(14).view(7, 2), "name")}
    monkeypatch.setattr(_sharded_map, "group_of", lambda group: group)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(_sharded_map, "Channel", lambda group, rank=rank: type("C", (), {"rank": rank, "world": 3}))
        parts.append(distributed.shard(xs))
    assert [len(p["a"]) for p in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([p["a"] for p in parts]), xs["a"])
    assert torch.equal(torch.cat([p["b"][0] for p in parts]), xs["b"][0])
    assert parts[0]["b"][1] == "name"


def test_one_flat_buffer_holds_all_dtypes():
    tensors: list[Tensor] = [
        torch.randn(2, 3).bfloat16(),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([2**40 + 1, -(2**62), -1]),
        torch.tensor([True, False]),
        torch.randn(()),
    ]
    flat = _flat(tensors, failed=False)
    assert flat.dtype == torch.float64
    back = _unflat(flat, tensors)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back, tensors, strict=True))
    assert _flat(tensors[:2], failed=True).dtype == torch.float32
    assert _flat([], failed=True)[-1] == 1


def test_what_decides_about_the_shapes_of_a_closure():
    def make(k, captured=None):
        return lambda p, x: (p * x, captured)[:k]

    config, net = {"width": 2, "act": torch.tanh}, torch.nn.Linear(2, 2)
    assert contents_of(make(2)) == contents_of(make(2)) != contents_of(make(3))
    assert contents_of(make(2, torch.ones(3))) == contents_of(make(2, torch.zeros(3))) != contents_of(make(2))
    assert contents_of(make(2, 0.5)) == contents_of(make(2, 0.25)) != contents_of(make(2, 1))
    assert contents_of(make(2, net)) == contents_of(make(2, net)) != contents_of(make(2, torch.nn.Linear(2, 2)))
    assert contents_of(make(2, config)) == contents_of(make(2, dict(config)))
    assert contents_of(make(2, config)) != contents_of(make(2, {**config, "width": 3}))
    assert contents_of(make(2, make(1))) == contents_of(make(2, make(1))) != contents_of(make(2, make(0)))
    assert contents_of(partial(make, 1)) == contents_of(partial(make, 1)) != contents_of(partial(make, k=1))
    first, again = plg.from_module(net)[0], plg.from_module(net)[0]
    assert contents_of(first) == contents_of(again)
    assert contents_of(net.forward) == contents_of(net.forward)
    assert len({contents_of(make(2, net)), contents_of(make(2, net))}) == 1
    assert contents_of(itself := lambda: itself)


@pytest.mark.parametrize(("needed", "before", "after"), [(8, 0, 8), (8, 8, 8), (7, 8, 8), (3, 8, 3), (0, 0, 0)])
def test_the_room_in_a_gather(needed, before, after):
    assert _capacity(needed, before) == after
