"""Per-iteration gradients and folds over them, against the stored gradients of the plain loop."""

from __future__ import annotations

import dataclasses
import math
import random

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pure_loopgrad as plg
from pure_loopgrad import folds
from pure_loopgrad.testing import assert_close, chunk_sizes, loops, peak_bytes
from pure_loopgrad.testing import plain as oracle

SCALARS = ("scalar",)


def scalar(body):
    return lambda p, x: torch.sin(oracle.leaves(body(p, x))[0].sum())


def stored(body, params, xs):
    """The gradient of each iteration by its own backward, stacked; a list of the float leaves of params."""
    rows = []
    for i in range(oracle.n_of(xs)):
        live = oracle.tree_map(
            lambda t: t.clone().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, params
        )
        floats = [t for t in oracle.leaves(live) if t.is_floating_point()]
        value = body(live, oracle.take(xs, i))
        if value.requires_grad:
            rows.append(torch.autograd.grad(value, floats, allow_unused=True, materialize_grads=True))
        else:
            rows.append([torch.zeros_like(t) for t in floats])
    return [torch.stack(g) for g in zip(*rows, strict=True)]


def flat(grads):
    return torch.cat([g.reshape(g.shape[0], -1) for g in grads], 1)


@given(loops(SCALARS, st.sampled_from([1, 2, 3, 7])))
def test_per_iteration_grads(case):
    body = scalar(case.body)
    found = plg.per_iteration_grads(body, case.params, case.xs, chunk_size=case.chunk_size)
    assert_close(oracle.leaves(found), stored(body, case.params, case.xs))
    spec = optree.tree_structure(case.params, none_is_leaf=True)
    assert optree.tree_structure(found, none_is_leaf=True) == spec


EVERYTHING = {
    "sum": folds.sum(),
    "mean": folds.mean(),
    "moments": folds.moments(),
    "variance": folds.variance(ddof=0),
    "norms": folds.norms(),
    "leaf_norms": folds.leaf_norms(),
    "gram": folds.gram(),
    "cosine": folds.cosine_to_mean(),
    "histogram": folds.histogram([0.0, 0.5, 1.0, 2.0, 1e9]),
    "noise": folds.noise_scale(),
    "top": folds.top_k(2),
    "extrema": folds.extrema(),
}


@given(loops(SCALARS, st.sampled_from([2, 3, 5, 7])))
def test_every_fold(case):
    """Each against its definition on the stored gradients."""
    body = scalar(case.body)
    grads = stored(body, case.params, case.xs)
    ones = plg.per_iteration_grads(body, case.params, case.xs)
    along = oracle.tree_map(lambda g: torch.cos(torch.arange(g[0].numel(), dtype=g.dtype)).reshape(g[0].shape), ones)
    fold = {**EVERYTHING, "inner": folds.inner(along)}
    found = plg.fold_grads(body, case.params, case.xs, fold, chunk_size=case.chunk_size)
    G, n = flat(grads), case.n
    leaves = oracle.leaves
    norms = G.norm(dim=1)
    assert_close(leaves(found["sum"]), [g.sum(0) for g in grads])
    assert_close(leaves(found["mean"]), [g.mean(0) for g in grads])
    assert_close(leaves(found["moments"].mean), [g.mean(0) for g in grads])
    assert_close(leaves(found["moments"].variance), [g.var(0) for g in grads])
    assert_close(leaves(found["variance"]), [g.var(0, correction=0) for g in grads])
    assert_close(found["norms"], norms)
    assert_close(leaves(found["leaf_norms"]), [g.reshape(n, -1).norm(dim=1) for g in grads])
    assert_close(found["gram"], G @ G.T)
    assert_close(found["inner"], G @ torch.cat([d.flatten() for d in leaves(along)]))
    scale = norms * G.mean(0).norm()
    assert_close(found["cosine"] * scale, G @ G.mean(0))  # where a norm is rounding alone, its direction is too
    assert found["cosine"].abs().max() <= 1 + 1e-12
    assert found["histogram"].sum() == n
    assert found["histogram"][0] == (norms < 0.5).sum()
    trace = G.var(0).sum()
    assert_close(found["noise"].trace, trace)
    assert_close(found["noise"].squared_norm, G.mean(0).square().sum() - trace / n)
    assert_close(found["top"].norms, norms.sort(descending=True).values[:2])
    assert_close(norms[found["top"].iterations], found["top"].norms)
    assert_close([leaves(e) for e in found["extrema"]], [[g.amin(0) for g in grads], [g.amax(0) for g in grads]])


def test_grad_stats():
    loss, params, xs = network()
    grads = stored(loss, params, xs)
    found = plg.grad_stats(loss, params, xs, chunk_size=4)
    G = flat(grads)
    assert_close(oracle.leaves(found.mean), [g.mean(0) for g in grads])
    assert_close(oracle.leaves(found.variance), [g.var(0) for g in grads])
    assert_close(found.norms, G.norm(dim=1))
    trace = G.var(0).sum()
    assert_close(found.noise_scale.simple, trace / (G.mean(0).square().sum() - trace / len(G)))


def test_case_28():
    """CASES 28: half the mean square of x p - t, at p = 0."""
    X, T = torch.ones(4, 1), torch.tensor([0.0, 2.0, 4.0, 6.0])
    loss = lambda p, x: (x[0] @ p - x[1]) ** 2 / 2
    p = torch.zeros(1)
    assert plg.per_iteration_grads(loss, p, (X, T), chunk_size=3).flatten().tolist() == [0, -2, -4, -6]
    found = plg.fold_grads(loss, p, (X, T), {"moments": folds.moments(0), "norms": folds.norms()}, chunk_size=3)
    assert found["norms"].tolist() == [0, 2, 4, 6]
    assert found["moments"].mean.item() == -3
    assert found["moments"].variance.item() + 9 == 14


@pytest.mark.parametrize("offset", [1e4, 2e6])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
def test_variance_is_stable_in_float32(chunk_size, offset):
    """CASES 28: gradients of 1e4 plus small noise, to 1e-4 of a float64 computation in two passes; also of 2e6, where
    neighbouring numbers are an eighth apart."""
    noise = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    xs = offset + noise
    loss = lambda w, x: (w * x).sum()
    found = plg.fold_grads(loss, torch.ones(3), xs, folds.variance(), chunk_size=chunk_size)
    assert_close(found.double(), xs.double().var(0), rtol=1e-4)


def test_histogram_edges():
    """A bin holds its lower edge, the last one its upper edge too; outside of all, a norm counts nowhere."""
    xs = torch.tensor([0.0, 1.0, 1.5, 2.0, 4.0, 5.0])
    found = plg.fold_grads(lambda w, x: w * x, torch.ones(()), xs, folds.histogram([1.0, 2.0, 4.0]), chunk_size=4)
    assert found.tolist() == [2, 2]


def test_half_precision_is_folded_in_float32():
    xs = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    found = plg.fold_grads(lambda w, x: w * x, torch.ones((), dtype=torch.bfloat16), xs, folds.sum(), chunk_size=64)
    assert found.dtype == torch.float32
    assert found == 4096  # in bfloat16 a sum of ones stops at 256


def network():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    body, params = plg.from_module(net)
    xs = torch.randn(10, 5, dtype=torch.float64), torch.randint(0, 3, (10,))
    return (lambda p, x: torch.nn.functional.cross_entropy(body(p, x[0]), x[1])), params, xs


@pytest.mark.parametrize("chunk_size", [1, 3, 10])
def test_dp_sgd(chunk_size):
    """The sum of clipped gradients by Opacus' formula: each times min(1, limit / (norm + 1e-6))."""
    loss, params, xs = network()
    grads = stored(loss, params, xs)
    norms = flat(grads).norm(dim=1)
    factors = (0.5 / (norms + 1e-6)).clamp(max=1.0)
    ref = [torch.einsum("n,n...->...", factors, g) for g in grads]
    clip = folds.clip_norm(0.5)
    found = plg.fold_grads(loss, params, xs, folds.sum(), transform=clip, chunk_size=chunk_size)
    assert_close(oracle.leaves(found), ref)
    assert (factors < 1).any()
    norms = plg.fold_grads(loss, params, xs, folds.norms(), transform=clip, chunk_size=chunk_size)
    assert norms.max() <= 0.5
    noisy = folds.noisy_sum(2.0, torch.Generator().manual_seed(3))
    again = folds.noisy_sum(2.0, torch.Generator().manual_seed(3))
    a, b = (plg.fold_grads(loss, params, xs, f, transform=clip, chunk_size=chunk_size) for f in (noisy, again))
    assert_close(a, b)
    noise = torch.cat([(x - y).flatten() for x, y in zip(oracle.leaves(a), ref, strict=True)])
    assert 1.5 < noise.std() < 2.5


def cosines(grads):
    m = grads.mean(0)
    return torch.nan_to_num(grads @ m / (grads.norm(dim=1) * m.norm()))


@pytest.mark.parametrize(("chunk_size", "randomness"), [(1, "error"), (4, "different"), (4, "same")])
def test_a_second_pass_draws_what_the_first_drew(chunk_size, randomness):
    """And the generator ends where one pass leaves it, so that what is drawn behind it is the same."""
    noisy = lambda w, x: torch.nn.functional.dropout(w * x, 0.5).square().sum()
    w, xs = torch.ones(4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    over = lambda chunk: torch.func.vmap(torch.func.grad(noisy), (None, 0), randomness=randomness)(w, chunk)
    torch.manual_seed(1)
    if chunk_size == 1:
        grads = torch.stack([torch.func.grad(noisy)(w, x) for x in xs])
    else:
        grads = torch.cat([over(chunk) for chunk in xs.split(chunk_size)])
    state = torch.get_rng_state()
    fold = {"cos": folds.cosine_to_mean(), "norms": folds.norms()}
    torch.manual_seed(1)
    found = plg.fold_grads(noisy, w, xs, fold, chunk_size=chunk_size, randomness=randomness)
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(found, {"cos": cosines(grads), "norms": grads.norm(dim=1)}, rtol=1e-9)


def test_a_second_pass_replays_a_given_generator():
    draw = random.Random(0)
    noisy = lambda w, x: (w * x).sin().sum() * draw.random()
    w, xs = torch.ones(4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    grads = torch.stack([torch.func.grad(noisy)(w, x) for x in xs])
    state = draw.getstate()
    draw.seed(0)
    found = plg.fold_grads(noisy, w, xs, folds.cosine_to_mean(), run=plg.Run(generators=(draw,)))
    assert_close(found, cosines(grads), rtol=1e-9)
    assert draw.getstate() == state


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_second_pass_under_transforms(chunk_size):
    """The derivative of a cosine, and an ensemble whose members draw masks of their own."""
    noisy = lambda w, x: torch.nn.functional.dropout(w * x, 0.5).square().sum()
    w, xs = torch.ones(16, dtype=torch.float64), torch.randn(6, 16, dtype=torch.float64)  # no mask leaves nothing
    fold = lambda w: plg.fold_grads(noisy, w, xs, folds.cosine_to_mean(), chunk_size=chunk_size, randomness="different")
    stored = lambda w: plg.per_iteration_grads(noisy, w, xs, chunk_size=chunk_size, randomness="different")
    for of in (
        torch.func.jacfwd,
        torch.func.jacrev,
        lambda f: lambda w: torch.func.vmap(f, randomness="different")(torch.stack([w, 2 * w])),
    ):
        torch.manual_seed(1)
        ref, state = of(lambda w: cosines(stored(w)))(w), torch.get_rng_state()
        torch.manual_seed(1)
        assert_close(of(fold)(w), ref, rtol=1e-9)
        assert torch.equal(torch.get_rng_state(), state)


def test_leaf_clipping():
    loss, params, xs = network()
    found = plg.fold_grads(loss, params, xs, folds.leaf_norms(), transform=folds.clip_leaf_norms(0.1), chunk_size=4)
    assert all(n.max() <= 0.1 for n in oracle.leaves(found))


HUGE = {torch.float16: 4e4, torch.bfloat16: 1e30, torch.float32: 1e30, torch.float64: 1e200}


@pytest.mark.parametrize("chunk_size", [1, 3])
@pytest.mark.parametrize(("dtype", "size"), [*HUGE.items(), *((d, 1e-5 / h) for d, h in HUGE.items() if h > 1e5)])
def test_no_square_overflows_or_vanishes(dtype, size, chunk_size):
    """Gradients of (size, size, size, size), whose norm is 2 size."""
    xs = torch.full((5, 4), size, dtype=torch.float64).to(dtype)
    w, size = torch.zeros(4, dtype=dtype), xs[0, 0].double()
    every = {"n": folds.norms(), "l": folds.leaf_norms(), "cos": folds.cosine_to_mean(), "top": folds.top_k(1)}
    found = plg.fold_grads(lambda w, x: (w * x).sum(), w, xs, every, chunk_size=chunk_size)
    rtol = 1e-6 if dtype != torch.float64 else 1e-12
    for norms in (found["n"], found["l"], found["top"].norms):
        assert norms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_close(norms.double() / size, torch.full_like(norms, 2).double(), rtol=rtol)
    assert_close(found["cos"].double(), torch.ones(5, dtype=torch.float64), rtol=rtol)
    for clip in (folds.clip_norm, folds.clip_leaf_norms):
        clipped = plg.fold_grads(
            lambda w, x: (w * x).sum(), w, xs, folds.sum(), transform=clip(1.0), chunk_size=chunk_size
        )
        each = 0.5 if size > 1 else size  # what is small is left alone
        assert_close(clipped.double() / each, torch.full((4,), 5.0, dtype=torch.float64), rtol=rtol)


def test_norms_of_many_and_of_no_entries():
    """More than are copied together; a leaf without any; a gradient that is not finite."""
    xs = torch.randn(3, 2**17 + 3, dtype=torch.float64)
    params = {"w": torch.zeros(2**17 + 3, dtype=torch.float64), "none": torch.zeros(0, 2, dtype=torch.float64)}
    loss = lambda p, x: (p["w"] * x).sum() + p["none"].sum()
    every = {"n": folds.norms(), "l": folds.leaf_norms()}
    found = plg.fold_grads(loss, params, xs, every, chunk_size=2)
    assert_close(found["n"], xs.norm(dim=1), rtol=1e-12)
    assert found["l"]["none"].tolist() == [0, 0, 0]
    odd = plg.fold_grads(lambda w, x: w * x, torch.ones(()), torch.tensor([torch.inf, torch.nan, 1.0]), folds.norms())
    assert [math.isinf(odd[0]), math.isnan(odd[1]), odd[2].item()] == [True, True, 1.0]


def test_argnums_and_wrt():
    loss, params, (xs, labels) = network()
    both = plg.per_iteration_grads(loss, params, (xs, labels), argnums=(0, 1), chunk_size=4)
    ref = torch.func.vmap(torch.func.grad(lambda x, t: loss(params, (x, t))))(xs, labels)
    assert_close(both[1][0], ref.detach())
    assert both[1][1] is None
    only = plg.per_iteration_grads(loss, params, (xs, labels), wrt={k: k.endswith("bias") for k in params})
    assert [k for k, g in only.items() if g is not None] == ["0.bias", "2.bias"]
    assert_close(only["0.bias"], both[0]["0.bias"])
    with pytest.raises(plg.LoopGradError, match="wrt is no upper part"):
        plg.per_iteration_grads(loss, params, (xs, labels), wrt={"nothing": True})


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_has_aux(chunk_size):
    xs = torch.arange(6.0).reshape(3, 2)
    body = lambda w, x: ((w * x).square().sum(), {"y": w * x, "n": 2, "nothing": None})
    w = torch.tensor([1.0, -1.0])
    grads, aux = plg.per_iteration_grads(body, w, xs, has_aux=True, chunk_size=chunk_size)
    assert_close(grads, 2 * w * xs * xs)
    assert_close(aux["y"], w * xs)
    assert aux["n"].tolist() == [2, 2, 2]
    assert aux["nothing"] is None
    assert not aux["y"].requires_grad
    with pytest.raises(TypeError, match=r"the body returns \(scalar, aux\), not a Tensor"):
        plg.per_iteration_grads(lambda w, x: w @ x, w, xs, has_aux=True)


def test_results_carry_no_graph_and_frozen_leaves_get_none():
    loss, params, xs = network()
    params["0.weight"].requires_grad_(False)
    found = plg.per_iteration_grads(loss, params, xs)
    assert found["0.weight"] is None
    assert not any(g.requires_grad for g in oracle.leaves(found))


@given(st.sampled_from([1, 2, 5]), chunk_sizes())
def test_under_transforms(n, chunk_size):
    """An ensemble's gradients by vmap, and the derivative of a statistic."""
    xs = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None] * torch.arange(1.0, 4.0, dtype=torch.float64)
    loss = lambda w, x: torch.sin(w * x).sum()
    ws = torch.randn(4, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    found = torch.func.vmap(lambda w: plg.per_iteration_grads(loss, w, xs, chunk_size=chunk_size))(ws)
    ref = torch.stack([torch.stack([x * torch.cos(w * x) for x in xs]) for w in ws])
    assert_close(found, ref)
    fold = {"sum": folds.sum(), "norms": folds.norms()}
    found = torch.func.vmap(lambda w: plg.fold_grads(loss, w, xs, fold, chunk_size=chunk_size))(ws)
    assert_close(found, {"sum": ref.sum(1), "norms": ref.norm(dim=2)})
    total = lambda w: plg.fold_grads(loss, w, xs, folds.norms(), chunk_size=chunk_size).square().sum()
    plain = lambda w: sum((x * torch.cos(w * x)).square().sum() for x in xs)
    assert_close(torch.func.grad(total)(ws[0]), torch.func.grad(plain)(ws[0]))


def test_a_fold_of_ones_own():
    """How many gradients point along the first axis more than not."""
    fold = folds.Fold(
        lambda grad, n: torch.zeros((), dtype=torch.int64),
        lambda state, g, iterations: state + (g[:, 0] > 0).sum(),
        lambda state: state,
    )
    xs = torch.tensor([[1.0, 2.0], [-1.0, 0.0], [3.0, 1.0]])
    assert plg.fold_grads(lambda w, x: w @ x, torch.ones(2), xs, {"mine": fold}, chunk_size=2) == {"mine": 2}


def test_what_is_refused():
    xs = torch.ones(3, 2)
    with pytest.raises(TypeError, match=r"fold\['a'\] is a int; expected a Fold"):
        plg.fold_grads(lambda w, x: w @ x, torch.ones(2), xs, {"a": 3})
    with pytest.raises(TypeError, match=r"the body's output has shape \(2,\)"):
        plg.per_iteration_grads(lambda w, x: w * x, torch.ones(2), xs)
    with pytest.raises(ValueError, match="a variance needs at least 2 iterations, not 1"):
        plg.fold_grads(lambda w, x: w @ x, torch.ones(2), xs[:1], folds.variance())
    with pytest.raises(ValueError, match="there is no gradient to fold"):
        plg.fold_grads(lambda w, x: w @ x, torch.ones(2), xs[:0], folds.sum())
    for run in (plg.grad_stats, lambda *a: plg.fold_grads(*a, folds.gram())):
        with pytest.raises(plg.errors.LoopValueError, match="the gradient has no leaf"):
            run(lambda p, x: x.sum(), {"i": torch.arange(2)}, xs)
    for edges in ([3.0, 1.0, 2.0], [1.0, 1.0], [0.0, torch.nan], [1.0]):
        with pytest.raises(plg.errors.LoopValueError, match="each larger than the one before"):
            folds.histogram(edges)


@pytest.mark.parametrize(
    ("direction", "message"),
    [
        ({"z": torch.ones(2, 4), "y": torch.ones(())}, r"'y': \*, 'z': \*}\), but the gradient PyTreeSpec\({'a'"),
        ({"a": torch.ones(4, 2), "b": torch.ones(())}, r"direction\['a'\] has shape \(4, 2\) .* shape \(2, 4\)"),
        ({"a": torch.ones(2, 4), "b": 1.0}, r"direction\['b'\] is a float"),
    ],
)
def test_a_direction_unlike_the_gradient(direction, message):
    params = {"a": torch.ones(2, 4), "b": torch.ones(())}
    with pytest.raises(plg.errors.LoopValueError, match=message):
        plg.fold_grads(lambda p, x: (p["a"] @ x).sum() * p["b"], params, torch.ones(3, 4), folds.inner(direction))


@pytest.mark.parametrize("chunk_size", [1, 2])
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda g: {"a": g["a"]}, r"structure .*{'a': \*}.* but it was given .*'b'"),
        (lambda g: {**g, "c": g["a"]}, r"structure .*'c'.* but it was given"),
        (lambda g: [g["b"], g["a"]], "structure"),
        (lambda g: {**g, "b": 1.0}, r"a float at gradient\['b'\]"),
    ],
)
def test_a_transform_that_changes_the_structure(transform, message, chunk_size):
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    loss = lambda p, x: p["a"] @ x + p["b"] @ x
    with pytest.raises(plg.errors.LoopTypeError, match=message):
        plg.fold_grads(loss, params, torch.ones(3, 2), folds.sum(), transform=transform, chunk_size=chunk_size)


@pytest.mark.parametrize("fold", ["moments and norms", "noise"])
def test_four_copies_of_the_parameters(fold):
    """Variance and norms of the gradients of a model of 1,000,000 parameters, in one leaf: the worst case."""
    W = torch.randn(1000, 1000) / 30
    xs = torch.randn(4096, 1000)
    picked = {"moments and norms": (folds.moments(), folds.norms()), "noise": (folds.noise_scale(),)}[fold]
    n = 64  # 4,096 take a minute and the same memory
    loss = lambda w, x: torch.tanh(w @ x).sum()
    assert peak_bytes(lambda: plg.fold_grads(loss, W, xs[:n], picked)) <= 4.1 * W.nbytes


def test_stacked_gradients_are_written_once():
    """The result, and one chunk's gradients; a final cat would need twice the result."""
    W, xs = torch.randn(64, 64), torch.randn(64, 64)
    loss = lambda w, x: torch.tanh(w @ x).sum()
    ours = peak_bytes(lambda: plg.per_iteration_grads(loss, W, xs, chunk_size=8))
    assert ours <= (64 + 2.5 * 8) * W.nbytes
    peer = torch.func.vmap(torch.func.grad(loss), (None, 0), chunk_size=8)
    assert ours < 0.7 * peak_bytes(lambda: peer(W, xs))


def test_clipping_at_zero_norm():
    found = plg.fold_grads(
        lambda w, x: w @ x, torch.ones(2), torch.zeros(3, 2), folds.sum(), transform=folds.clip_norm(1.0)
    )
    assert found.tolist() == [0, 0]
    assert math.isfinite(found.sum())


@dataclasses.dataclass
class Weights:
    w: torch.Tensor
    b: torch.Tensor


def test_folds_of_a_dataclass():
    """Its gradient is a dataclass that only the library's own pytrees know."""
    params = Weights(torch.tensor([1.0, 2.0]), torch.tensor(0.5))
    loss = lambda p, x: (p.w * x).sum() + p.b * x
    every = {**EVERYTHING, "clipped": folds.mean(), "noisy": folds.noisy_sum(0.0)}
    found = plg.fold_grads(loss, params, torch.arange(3.0), every, transform=folds.clip_norm(1e9))
    assert isinstance(found["sum"], Weights)
    assert_close([found["sum"].w, found["sum"].b], [torch.tensor([3.0, 3.0]), torch.tensor(3.0)], rtol=1e-6)
    assert_close(found["norms"], 3**0.5 * torch.arange(3.0), rtol=1e-6)
    assert isinstance(plg.grad_stats(loss, params, torch.arange(3.0)).variance, Weights)
