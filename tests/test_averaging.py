"""Averages of weights, against torch.optim.swa_utils; ensembles."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import swa_utils

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close


def walk(dtype=torch.float64, steps=7):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2).to(dtype)
    nets = []
    for _ in range(steps):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(torch.randn_like(p))
        nets.append(copy.deepcopy(net))
    return nets


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (plg.ema(0.9), swa_utils.get_ema_multi_avg_fn(0.9)),
        (plg.ema(0.0), swa_utils.get_ema_multi_avg_fn(0.0)),
        (plg.swa(), swa_utils.get_swa_multi_avg_fn()),
    ],
)
def test_agrees_with_torch(ours, theirs):
    nets = walk()
    model = swa_utils.AveragedModel(nets[0], multi_avg_fn=theirs)
    for net in nets:
        model.update_parameters(net)
    state = ours.init(dict(nets[0].named_parameters()))
    for net in nets[1:]:
        state = ours.update(state, dict(net.named_parameters()))
    # torch counts in float32, so that its swa has an error of 1e-8
    assert_close(ours.value(state), {k: p.detach() for k, p in model.module.named_parameters()}, rtol=1e-7)
    assert not any(t.requires_grad for t in ours.value(state).values())


def test_half_precision_is_averaged_in_float32():
    average = plg.ema(0.999)
    state = average.init(torch.zeros((), dtype=torch.bfloat16))
    for _ in range(100):
        state = average.update(state, torch.ones((), dtype=torch.bfloat16))
    assert abs(state.wide[0].item() - (1 - 0.999**100)) < 1e-5
    assert average.value(state).dtype == torch.bfloat16


def test_other_leaves_are_those_that_came_last():
    average = plg.swa()
    first = {"w": torch.tensor(1.0), "steps": torch.tensor(1), "name": "net", "nothing": None}
    state = average.update(average.init(first), {**first, "w": torch.tensor(3.0), "steps": torch.tensor(2)})
    assert average.value(state) == {"w": 2.0, "steps": 2, "name": "net", "nothing": None}


def test_the_state_does_not_follow_the_parameters():
    w = torch.ones(2)
    average = plg.ema(0.5)
    state = average.init(w)
    w.mul_(9)
    assert average.value(state).tolist() == [1, 1]


@pytest.mark.parametrize("run", [lambda: plg.ema(1.5), lambda: plg.swa().update(plg.swa().init({"a": 1}), {"b": 1})])
def test_what_is_refused(run):
    with pytest.raises(plg.LoopGradError):
        run()


@pytest.mark.parametrize("average", [plg.ema(0.5), plg.swa()])
@pytest.mark.parametrize("now", [torch.ones(3), torch.ones(()), torch.tensor([1])])
def test_a_leaf_that_changes(average, now):
    """It would be broadcast against its average."""
    state = average.init({"w": torch.zeros(1)})
    with pytest.raises(plg.errors.LoopValueError, match=r"params\['w'\] has .* average so far shape \(1,\)"):
        average.update(state, {"w": now})


def test_statistics_after_averaging():
    """As torch.optim.swa_utils.update_bn leaves them; the module given is not touched."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).double()
    params = {k: 2 * p.detach() for k, p in net.named_parameters()}
    batches = [torch.randn(8, 3, dtype=torch.float64) for _ in range(3)]
    ref = copy.deepcopy(net)
    ref.load_state_dict(params, strict=False)
    swa_utils.update_bn(batches, ref)
    before = {k: b.clone() for k, b in net.named_buffers()}
    assert_close(plg.recompute_statistics(net, params, batches), dict(ref.named_buffers()))
    assert_close(dict(net.named_buffers()), before)


def test_members_and_their_average():
    members = [{"w": torch.randn(3), "act": "tanh"} for _ in range(4)]
    stacked = plg.stack_params(members)
    assert stacked["w"].shape == (4, 3)
    assert stacked["act"] == "tanh"
    for a, b in zip(plg.unstack_params(stacked), members, strict=True):
        assert_close(a, b)


def test_average_of_members():
    stacked = {
        "w": torch.randn(5, 3, dtype=torch.float64),
        "h": torch.ones(5, 2, dtype=torch.bfloat16),
        "i": torch.arange(5),
    }
    found = plg.average_members(stacked, [1, 0, 2, 1, 0])
    assert_close(found["w"], (stacked["w"][0] + 2 * stacked["w"][2] + stacked["w"][3]) / 4)
    assert (found["h"].dtype, found["i"].item()) == (torch.bfloat16, 0)
    assert_close(plg.average_members(stacked)["w"], stacked["w"].mean(0))
    with pytest.raises(ValueError, match="for 5 members"):
        plg.average_members(stacked, [1, 1])


LOSS = lambda w, ys: torch.logsumexp(ys.flatten(), 0)
STEP = lambda w, c, x: (torch.tanh(w * c + x), c)
FUNCTIONS = {
    "map": lambda w, xs: plg.map(lambda w, x: torch.sin(w * x), w, xs, chunk_size=2),
    "sum": lambda w, xs: plg.sum(lambda w, x: torch.sin(w * x), w, xs),
    "mean": lambda w, xs: plg.mean(lambda w, x: torch.sin(w * x), w, xs, weights=[1, 0, 2, 1, 1]),
    "value_and_grad": lambda w, xs: plg.value_and_grad(lambda w, x: torch.sin(w * x), LOSS)(w, xs)[1],
    "vjp": lambda w, xs: plg.vjp(lambda w, x: torch.sin(w * x), w, xs)[1](torch.ones_like(xs))[0],
    "checkpoint": lambda w, xs: torch.func.grad(lambda w: plg.checkpoint(lambda w: torch.sin(w * xs[0]).sum())(w))(w),
    "scan": lambda w, xs: torch.func.grad(lambda w: plg.scan(STEP, w, xs[0], xs)[0].sum())(w),
    "per_iteration_grads": lambda w, xs: plg.per_iteration_grads(lambda w, x: torch.sin(w * x).sum(), w, xs),
    "fold_grads": lambda w, xs: plg.fold_grads(lambda w, x: torch.sin(w * x).sum(), w, xs, plg.folds.moments()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ensembles_of_every_function(name):
    """torch.func.vmap over stacked parameters is the loop over members."""
    members = torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    xs = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    run = FUNCTIONS[name]
    found = torch.func.vmap(lambda w: run(w, xs))(plg.stack_params(list(members)))
    assert_close(found, plg.stack_params([run(w, xs) for w in members]))


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([], "no members"),
        ([{"w": torch.ones(2)}, {"w": torch.ones(3)}], r"params\['w'\] of member 1 has shape \(3,\)"),
        ([{"w": torch.ones(2), "a": 1}, {"w": torch.ones(2), "a": 2}], "member 1 has another structure"),
        ([{"w": torch.ones(2)}, {"v": torch.ones(2)}], "member 1 has another structure"),
    ],
)
def test_members_that_differ(members, text):
    with pytest.raises(plg.errors.LoopValueError, match=text):
        plg.stack_params(members)
