"""Later chunks run in fewer layers than the first one, and with the same checks."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

import pure_loopgrad as plg
from pure_loopgrad.errors import ImpureBodyError, LoopValueError
from pure_loopgrad.testing import assert_close

N = 6
G = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, generator=G, dtype=torch.float64)
XS = torch.randn(N, 3, generator=G, dtype=torch.float64)
WAYS = [{"chunk_size": 1}, {"chunk_size": 2, "batched": True}]


def one_output(w, x):
    return torch.tanh(x @ w)


def several_outputs(w, x):
    h = torch.tanh(x @ w)
    return {"h": h, "more": (h * h, x.sum(-1))}


def total(_, ys):
    parts = (ys["h"], *ys["more"]) if isinstance(ys, dict) else (ys,)
    return sum((y**3).sum() for y in parts)


def plain_loop(body, w, reduce):
    live = w.clone().requires_grad_()
    ys = [body(live, x) for x in XS]
    stacked = torch.utils._pytree.tree_map(lambda *y: torch.stack(y), *ys)
    reduced = stacked if reduce == "stack" else torch.utils._pytree.tree_map(lambda y: y.sum(0), stacked)
    return torch.autograd.grad(total(live, reduced), live)[0]


@pytest.mark.parametrize("way", WAYS, ids=["one", "batched"])
@pytest.mark.parametrize("reduce", ["stack", "sum"])
@pytest.mark.parametrize("body", [one_output, several_outputs])
def test_gradient_of_the_plain_loop_in_fewer_layers(body, reduce, way):
    depths = []

    def seen(w, x):
        depths.append(len(inspect.stack(0)))
        return body(w, x)

    found = plg.value_and_grad(seen, total, reduce=reduce, **way)(W, XS)[1]
    assert_close(found, plain_loop(body, W, reduce), rtol=1e-12)
    n_chunks = N // way["chunk_size"]
    for first, *later in (depths[:n_chunks], depths[n_chunks:]):
        assert later
        assert max(later) <= first - 3


def from_call(k, what, otherwise=one_output):
    """A body that does something else from its k-th call on."""
    calls = []

    def body(w, x):
        calls.append(None)
        return what(w, x) if len(calls) >= k else otherwise(w, x)

    return body


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda w, x: one_output(w, x)[..., :2], "output changed in iterations? 4"),
        (lambda w, x: one_output(w, x).float(), "output changed in iterations? 4"),
        (lambda w, x: (one_output(w, x),), "changed its structure in iterations? 4"),
    ],
)
@pytest.mark.parametrize("way", WAYS, ids=["one", "batched"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_other_outputs_are_refused(what, message, way, recomputed):
    n_chunks, at = N // way["chunk_size"], 4 // way["chunk_size"]
    body = from_call(1 + at + recomputed * n_chunks, what)
    with pytest.raises(ImpureBodyError, match=message):
        plg.value_and_grad(body, total, **way)(W, XS)


def test_a_chunk_without_its_leading_axis_is_refused():
    body = from_call(3, lambda w, x: one_output(w, x)[:1])
    with pytest.raises(LoopValueError, match="needs a leading axis of 2"):
        plg.value_and_grad(body, total, chunk_size=2, batched=True)(W, XS)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an exception carries no notes")
@pytest.mark.parametrize("way", WAYS, ids=["one", "batched"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_an_error_names_its_iteration(way, recomputed):
    def fails(w, x):
        raise KeyError("mine")

    n_chunks, at = N // way["chunk_size"], 4 // way["chunk_size"]
    body = from_call(1 + at + recomputed * n_chunks, fails)
    with pytest.raises(KeyError, match="mine") as caught:
        plg.value_and_grad(body, total, **way)(W, XS)
    notes = " ".join(caught.value.__notes__)
    assert ("recomputed iteration" in notes) == recomputed
    assert "iteration 4" in notes if way["chunk_size"] == 1 else "iterations 4 to 5" in notes


@pytest.mark.parametrize("way", WAYS, ids=["one", "batched"])
def test_all_iterations_can_still_be_checked(way):
    n_chunks = N // way["chunk_size"]
    body = from_call(n_chunks + 2, lambda w, x: 2 * one_output(w, x))
    with pytest.raises(ImpureBodyError, match="other values"):
        plg.value_and_grad(body, total, run=plg.Run(check="all"), **way)(W, XS)


@pytest.mark.parametrize("way", WAYS, ids=["one", "batched"])
def test_the_grad_mode_is_that_of_the_caller(way):
    seen = []

    def body(w, x):
        seen.append(torch.is_grad_enabled())
        return one_output(w, x)

    plg.map(body, W, XS, **way)
    with torch.no_grad():
        plg.map(body, W, XS, **way)
    n_chunks = N // way["chunk_size"]
    assert seen == [True] * n_chunks + [False] * n_chunks
