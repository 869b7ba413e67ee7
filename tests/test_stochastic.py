"""Bodies that draw random numbers: at the same seed, every loop equals the plain one, and leaves the same state."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import pure_loopgrad as plg
from pure_loopgrad._rng import source_of
from pure_loopgrad.testing import assert_close
from pure_loopgrad.testing.transforms import Flat, gradient_by_backward, transformed

D = 3


def _sometimes(h, p):
    return F.dropout(h, 0.5) if h.detach().sum() > 0 else h


def _fresh(h, p):
    return h * torch.rand(D, generator=torch.Generator().manual_seed(4), dtype=h.dtype)


def _in_place(h, p):
    return h + torch.empty_like(h).uniform_() + h.detach().clone().normal_()


# name -> (h, params -> h); those of SERIAL cannot run under torch.vmap
NOISE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "dropout": lambda h, p: F.dropout(h, 0.5),
    "alpha": lambda h, p: F.alpha_dropout(h, 0.3, training=True),
    "normal": lambda h, p: h * torch.randn_like(h),
    "rand": lambda h, p: torch.sin(h + torch.rand(D, dtype=h.dtype)),
    "bernoulli": lambda h, p: h * (torch.rand(D, dtype=h.dtype) < 0.4),
    "gumbel": lambda h, p: F.gumbel_softmax(h, tau=2.0),
    "none": lambda h, p: torch.tanh(h * p["w"]),
    "linear": lambda h, p: p["A"] @ h,
}
SERIAL: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "rrelu": lambda h, p: F.rrelu(h, training=True),
    "generator": lambda h, p: h * torch.rand(D, generator=p["g"], dtype=h.dtype),
    "permutation": lambda h, p: h[torch.randperm(D)],
    "choice": lambda h, p: h * h[torch.multinomial(torch.full((D,), 0.3), 1)],
    "sometimes": _sometimes,
    "fresh generator": _fresh,
    "in place": _in_place,
}


@dataclass(frozen=True)
class Noisy:
    """A drawn body. `inside` wraps its first half: a checkpoint of ours, or nothing for the oracle."""

    ops: tuple[str, ...]
    nested: bool

    def __call__(self, params: Any, x: Tensor, inside: Callable[[Any], Any] = plg.checkpoint) -> Tensor:
        half = len(self.ops) // 2 if self.nested else 0
        first = inside(lambda p, h: self.run(self.ops[:half], p, h))
        h = first(params, x) if half else x
        return self.run(self.ops[half:], params, h)

    def run(self, ops: tuple[str, ...], params: Any, h: Tensor) -> Tensor:
        for name in ops:
            h = (NOISE | SERIAL)[name](h, params)
        return h * params["w"]

    def plain(self, params: Any, x: Tensor) -> Tensor:
        """The same without any call of the library."""
        return self(params, x, inside=lambda f: f)


def noisy_bodies(ops: dict[str, Any]) -> st.SearchStrategy[Noisy]:
    return st.builds(Noisy, st.lists(st.sampled_from(sorted(ops)), min_size=1, max_size=4).map(tuple), st.booleans())


def inputs(n: int, seed: int) -> tuple[dict[str, Any], Tensor]:
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    return {"w": normal(D), "A": normal(D, D), "g": torch.Generator().manual_seed(seed)}, normal(n, D)


def plain_loop(body, params, xs):
    return torch.stack([body.plain(params, x) for x in xs])


def plain_scan(body, params, xs):
    c, ys = params["w"] * 0.1, []
    for x in xs:
        c = torch.tanh(c + body.plain(params, x))
        ys.append(c * x)
    return torch.cat([c[None], torch.stack(ys)])


def our_scan(checkpoints):
    def run(body, params, xs):
        def step(p, c, x):
            c = torch.tanh(c + body(p, x))
            return c, c * x

        c, ys = plg.scan(step, params, params["w"] * 0.1, xs, checkpoints=checkpoints)
        return torch.cat([c[None], ys])

    return run


def our_while(body, params, xs):
    def step(p, carry):
        i, c, ys = carry
        c = torch.tanh(c + body(p["p"], p["xs"][i]))
        return i + 1, c, torch.cat([ys[1:], (c * p["xs"][i])[None]])

    start = torch.tensor(0), params["w"] * 0.1, torch.zeros_like(xs)
    given = {"p": params, "xs": xs}
    _, c, ys = plg.while_loop(lambda p, c: c[0] < len(xs), step, given, start, checkpoints=3)
    return torch.cat([c[None], ys])


LOOPS = {
    "map": (plg.map, plain_loop),
    "sum": (plg.sum, lambda *a: plain_loop(*a).sum(0)),
    "mean": (plg.mean, lambda *a: plain_loop(*a).mean(0)),
    "nested": (
        lambda body, p, xs: plg.map(lambda p, x: plg.sum(body, p, torch.stack([x, x])), p, xs),
        lambda body, p, xs: torch.stack([body.plain(p, x) + body.plain(p, x) for x in xs]),
    ),
    "checkpoint": (lambda body, p, xs: plg.checkpoint(body)(p, xs[0]), lambda body, p, xs: body.plain(p, xs[0])),
    "scan all": (our_scan("all"), plain_scan),
    "scan sqrt": (our_scan("sqrt"), plain_scan),
    "scan 2": (our_scan(2), plain_scan),
    "while": (our_while, plain_scan),
}
# those that run the plain loop once, outside of torch.vmap, in which it could not draw
STACKS = st.lists(st.sampled_from(["grad", "vjp", "jvp", "jacrev"]), max_size=2).map(tuple)


def found_by(loop, body, stack, n, seed):
    """Value and gradient under the transforms, and where the global generator and that of params stand afterwards."""
    params, xs = inputs(n, seed)
    torch.manual_seed(seed)
    flat = Flat((params, xs))

    def scalar(v):
        p, x = flat.unravel(v)
        return torch.logsumexp(loop(body, p, x).flatten(), 0)

    value, grad = gradient_by_backward(transformed(scalar, stack), flat.start())
    return (value, grad), (torch.get_rng_state(), params["g"].get_state())


@given(
    st.sampled_from(sorted(LOOPS)), noisy_bodies(NOISE | SERIAL), STACKS, st.sampled_from([1, 2, 3, 5]),
    st.integers(0, 2**16),
)  # fmt: skip
def test_one_at_a_time(name, body, stack, n, seed):
    # torch has no batching rule for rrelu, and a scan under jacrev steps back under vmap: that raises
    assume(not ("rrelu" in body.ops and "jacrev" in stack and name.startswith(("scan", "while"))))
    ours, plain = LOOPS[name]
    ref, states = found_by(plain, body, stack, n, seed)
    found, after = found_by(ours, body, stack, n, seed)
    assert_close(found, ref)
    assert all(map(torch.equal, after, states))


def vmapped_loop(chunk_size, randomness):
    """The plain loop over chunks, each under torch.vmap."""

    def run(body, params, xs):
        w, A = params["w"], params["A"]
        one = lambda w, A, x: body.plain({"w": w, "A": A, "g": params["g"]}, x)
        over = torch.func.vmap(one, (None, None, 0), randomness=randomness)
        return torch.cat([over(w, A, chunk) for chunk in xs.split(chunk_size)])

    return run


@given(
    noisy_bodies(NOISE), STACKS, st.sampled_from([2, 3, 5]), st.sampled_from([2, 3, 7]),
    st.sampled_from(["different", "same"]), st.integers(0, 2**16),
)  # fmt: skip
def test_vmapped_chunks(body, stack, n, chunk_size, randomness, seed):
    """As torch.vmap would draw for each chunk, and the same in every recomputation."""
    ours = lambda body, p, xs: plg.map(body, p, xs, chunk_size=chunk_size, randomness=randomness)
    ref, states = found_by(vmapped_loop(chunk_size, randomness), body, stack, n, seed)
    found, after = found_by(ours, body, stack, n, seed)
    assert_close(found, ref)
    assert all(map(torch.equal, after, states))


@given(noisy_bodies(NOISE | SERIAL), st.sampled_from(["stack", "sum", "mean"]), st.sampled_from([1, 2, 5]),
       st.integers(0, 2**16))  # fmt: skip
def test_gradient_transforms(body, reduce, n, seed):
    """value_and_grad and vjp, each against the plain loop's backward."""
    reduced = {"stack": lambda y: y, "sum": lambda y: y.sum(0), "mean": lambda y: y.mean(0)}[reduce]
    params, xs = inputs(n, seed)
    torch.manual_seed(seed)
    live = {k: t.clone().requires_grad_() if k != "g" else t for k, t in params.items()}
    y = reduced(plain_loop(body, live, xs))
    y.square().sum().backward()
    ref = {k: torch.zeros_like(t) if t.grad is None else t.grad for k, t in live.items() if k != "g"}
    state = torch.get_rng_state()

    params, xs = inputs(n, seed)
    torch.manual_seed(seed)
    f = plg.value_and_grad(body, lambda p, y: y.square().sum(), reduce=reduce)
    value, grads = f(params, xs)
    assert_close(value, y.square().sum().detach())
    assert_close({k: torch.zeros_like(params[k]) if g is None else g for k, g in grads.items() if k != "g"}, ref)
    assert torch.equal(torch.get_rng_state(), state)

    params, xs = inputs(n, seed)
    torch.manual_seed(seed)
    ys, pullback = plg.vjp(body, params, xs, reduce=reduce)
    torch.rand(3)  # what happens between the passes does not matter
    for _ in range(2):
        grads = pullback(2 * ys)[0]
        assert_close({k: torch.zeros_like(params[k]) if g is None else g for k, g in grads.items() if k != "g"}, ref)


def test_jacrev_runs_the_body_outside_of_vmap():
    """Only cotangents are batched: the body is recomputed once an iteration, and may do what has no batching rule."""
    calls = []

    def body(w, x):
        calls.append(torch._C._functorch.maybe_current_level())
        return F.rrelu(w * x, training=True) if x.sum() > 0 else w * x

    w, xs = torch.randn(3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    torch.manual_seed(2)
    ref = torch.func.jacrev(lambda w: torch.stack([body(w, x) for x in xs]))(w)
    torch.manual_seed(2)
    calls.clear()
    assert_close(torch.func.jacrev(lambda w: plg.map(body, w, xs))(w), ref)
    assert len(calls) == 8


@pytest.mark.parametrize("randomness", ["different", "error", "same"])
@pytest.mark.parametrize("loop", ["map", "scan", "checkpoint", "vjp"])
def test_a_batch_that_does_not_reach_the_loop(loop, randomness):
    """Torch leaves the level out, so that one draw would serve all entries: only "same" asks for that."""
    xs, w = torch.ones(3, 2), torch.ones(2)
    noisy = lambda w, x: w * x * torch.rand(2)
    runs = {
        "map": lambda w: plg.map(noisy, w, xs),
        "scan": lambda w: plg.scan(lambda w, c, x: (c + noisy(w, x), None), w, torch.zeros(2), xs)[0],
        "checkpoint": lambda w: plg.checkpoint(noisy)(w, xs[0]),
        "vjp": lambda w: plg.vjp(noisy, w, xs)[0],
    }
    run = lambda: torch.func.vmap(lambda k: runs[loop](w).sum() * k, randomness=randomness)(torch.ones(4))
    if randomness == "same":
        assert run().unique().numel() == 1
        return
    torchs_own = "randomness error mode"  # of a scan that runs right here
    with pytest.raises((plg.LoopGradError, RuntimeError), match=f"the loop is given is batched|{torchs_own}"):
        run()
    if randomness == "different":
        reached = torch.func.vmap(lambda k: runs[loop](w * k).sum(), randomness=randomness)(torch.ones(4))
        assert reached.unique().numel() == 4
    quiet = torch.func.vmap(lambda k: plg.map(lambda w, x: w * x, w, xs).sum() * k, randomness=randomness)
    assert quiet(torch.ones(4)).tolist() == [6.0] * 4


def test_jacfwd_of_a_body_that_draws():
    """Only tangents are batched there, and one draw is right."""
    w, xs = torch.ones(2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    f = lambda w: plg.map(lambda w, x: w * x * torch.rand(2, dtype=torch.float64), w, xs)
    torch.manual_seed(0)
    jacobian = torch.func.jacfwd(f)(w)
    torch.manual_seed(0)
    assert_close(jacobian, torch.diag_embed(f(w)))


def test_randomness_in_chunks_is_refused_by_default():
    with pytest.raises(RuntimeError, match="randomness error mode"):
        plg.map(lambda w, x: F.dropout(w * x), torch.ones(3), torch.ones(4, 3), chunk_size=2)


FOREIGN = {"random": random, "Random": random.Random(0), "Generator": numpy.random.default_rng(0)}


def drawing(generator):
    return lambda w, x: w * x * generator.random()


@pytest.fixture(params=FOREIGN)
def foreign(request):
    """A generator that is not torch's, with the function that brings it to its start, and its first six numbers."""
    generator = FOREIGN[request.param]
    source = source_of(generator)
    start = source.get()
    numbers = torch.tensor([generator.random() for _ in range(6)], dtype=torch.float64)
    source.put(start)
    return generator, numbers


ONE, SIX = torch.ones(2, dtype=torch.float64), torch.ones(6, 2, dtype=torch.float64)


@pytest.mark.parametrize("randomness", ["error", "different"])
@pytest.mark.parametrize("check", ["off", "first", "all"])
@pytest.mark.parametrize("chunk_size", [3, None])
def test_a_draw_that_vmapped_iterations_would_share(foreign, randomness, check, chunk_size):
    generator, _ = foreign
    options = {"chunk_size": chunk_size, "randomness": randomness, "run": plg.Run(generators=(generator,), check=check)}
    body = drawing(generator)
    total = lambda w, x: body(w, x).sum()
    for run in (
        lambda: plg.map(body, ONE, SIX, **options),
        lambda: plg.value_and_grad(total, reduce="sum", **options)(ONE, SIX),
        lambda: plg.per_iteration_grads(total, ONE, SIX, **options),
        lambda: plg.fold_grads(total, ONE, SIX, plg.folds.sum(), **options),
        lambda: torch.func.grad(lambda w: plg.sum(total, w, SIX, **options))(ONE),
    ):
        with pytest.raises(plg.errors.LoopValueError, match=r"one draw would serve them all\. Use chunk_size=1"):
            run()
    with torch.no_grad(), pytest.raises(plg.errors.LoopValueError, match="one draw would serve them all"):
        plg.map(body, ONE, SIX, **options)


def test_the_same_draw_for_vmapped_iterations_where_that_is_asked_for(foreign):
    generator, numbers = foreign
    w = ONE.clone().requires_grad_()
    run = plg.Run(generators=(generator,), check="all")
    ys = plg.map(drawing(generator), w, SIX, chunk_size=3, randomness="same", run=run)
    expected = numbers[[0, 0, 0, 1, 1, 1]]
    assert_close(ys[:, 0], expected)
    ys.sum().backward()
    assert_close(w.grad, expected.sum().expand(2))


@pytest.mark.parametrize("loop", [plg.map, plg.sum])
def test_auto_runs_one_at_a_time_what_draws_elsewhere(foreign, loop):
    """And looking for the chunk moves no generator."""
    generator, numbers = foreign
    run = plg.Run(generators=(generator,), check="all")
    body = lambda w, x: w * x * generator.random()  # a code of its own: sizes are kept by it
    ys = loop(body, ONE, SIX, chunk_size="auto", run=run)
    assert_close(ys[..., 0], numbers if loop is plg.map else numbers.sum())


def test_a_global_generator_that_nobody_gives():
    """Without gradients it may be drawn from, one iteration at a time."""
    state = random.getstate()
    numbers = [random.random() for _ in range(6)]
    random.setstate(state)
    body = lambda w, x: w * x * random.random()
    plg.plan(body, ONE, SIX)
    with torch.no_grad():
        assert plg.map(body, ONE, SIX, chunk_size="auto")[:, 0].tolist() == numbers
        with pytest.raises(plg.errors.ImpureBodyError, match="the iterations of a vmapped chunk the same ones"):
            plg.map(body, ONE, SIX, chunk_size=2)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_given_torch_generator_in_vmapped_chunks(chunk_size):
    """Torch itself draws for each iteration."""
    g = torch.Generator().manual_seed(0)
    numbers = torch.rand(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    body = lambda w, x: w * x * torch.rand((), generator=g, dtype=torch.float64)
    run = plg.Run(generators=(g,))
    ys = plg.map(body, ONE, SIX, chunk_size=chunk_size, randomness="different", run=run)
    assert_close(ys[:, 0], numbers)


def test_rrelu_gradient_is_the_slope_of_the_forward():
    """CASES 8."""
    x = torch.full((4,), -1.0, requires_grad=True)
    y = plg.checkpoint(lambda x: F.rrelu(x, training=True))(x)
    y.sum().backward()
    assert torch.equal(x.grad, -y.detach())


def test_a_body_that_draws_nothing_keeps_no_state():
    """And one that draws in some iterations keeps the state of those."""

    def tape(body):
        prepared = plg._reduce.prepare(body, torch.ones(3), torch.arange(5.0), plg._reduce.Options())
        prepared.run()
        return sorted(prepared.loop.tape.states)

    assert tape(lambda w, x: w * x) == []
    assert tape(lambda w, x: F.dropout(w * x) if x in (1, 4) else w * x) == [1, 4]
