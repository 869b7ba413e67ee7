"""value_and_grad and vjp: the one-pass rules by counting, what they return, what they refuse."""

from __future__ import annotations

import pytest
import torch

import pure_loopgrad as plg
from pure_loopgrad.testing import assert_close, plain_map, plain_mean, plain_sum

N = 6


class Counted:
    """A body that counts its calls."""

    def __init__(self, body):
        self.body, self.calls = body, 0

    def __call__(self, params, x):
        self.calls += 1
        return self.body(params, x)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W, XS = data(4, 3), data(N, 3, seed=1)
RULES = {
    "sum of scalars": (lambda W, x: torch.tanh(W @ x).sum(), None, "sum"),
    "mean of scalars": (lambda W, x: torch.tanh(W @ x).sum(), None, "mean"),
    "score": (lambda W, x: torch.tanh(W @ x).sum(), lambda W, z: -torch.nn.functional.logsigmoid(z), "sum"),
    "two numbers": (
        lambda W, x: (torch.tanh(W @ x).sum(), torch.ones((), dtype=torch.float64)),
        lambda W, z: z[0] / z[1],
        "sum",
    ),
}


def reference(body, loss, reduce, W=W, xs=XS):
    loop = {"sum": plain_sum, "mean": plain_mean, "stack": plain_map}[reduce]
    scalar = lambda W: loop(body, W, xs) if loss is None else loss(W, loop(body, W, xs))
    W = W.clone().requires_grad_()
    value = scalar(W)
    return value.detach(), torch.autograd.grad(value, W)[0]


@pytest.mark.parametrize("chunk_size", [1, 4])
@pytest.mark.parametrize("name", RULES)
def test_one_pass_runs_each_iteration_once(name, chunk_size):
    body, loss, reduce = RULES[name]
    counted, reports = Counted(body), []
    with plg.run(report=reports.append):
        found = plg.value_and_grad(counted, loss, reduce=reduce, chunk_size=chunk_size)(W, XS)
    assert counted.calls == (N if chunk_size == 1 else 2)
    assert [r.passes for r in reports] == [1]
    assert_close(found, reference(body, loss, reduce))


def test_the_question_that_started_it():
    """loss = -logsigmoid(z), z = sum_i net(x_i): the gradient is -(1 - sigmoid(z)) times the sum of net's gradients."""
    body = RULES["score"][0]
    z, dz = reference(body, None, "sum")
    _, found = plg.value_and_grad(body, RULES["score"][1], reduce="sum")(W, XS)
    assert_close(found, -(1 - torch.sigmoid(z)) * dz)


@pytest.mark.parametrize("reduce", ["stack", "sum", "mean"])
def test_many_numbers_take_two_passes(reduce):
    body, loss = (lambda W, x: torch.tanh(W @ x)), (lambda W, ys: torch.logsumexp(ys.flatten(), 0))
    counted, reports = Counted(body), []
    found = plg.value_and_grad(counted, loss, reduce=reduce, run=plg.Run(report=reports.append))(W, XS)
    assert counted.calls == 2 * N
    assert (reports[0].rule, reports[0].passes) == ("two passes", 2)
    assert_close(found, reference(body, loss, reduce))


def test_a_plan_can_be_asked_for():
    body, loss = (lambda W, x: torch.tanh(W @ x)), (lambda W, z: torch.logsumexp(z, 0))
    counts = {}
    for plan in ("one_pass", "two_pass"):
        counted = Counted(body)
        found = plg.value_and_grad(counted, loss, reduce="sum", plan=plan)(W, XS)
        assert_close(found, reference(body, loss, "sum"))
        counts[plan] = counted.calls
    assert counts == {"one_pass": N, "two_pass": 2 * N}


def test_the_loss_runs_once_on_tensors_without_a_graph():
    """CASES 19: a contrastive loss that uses the outputs twice, or loops over rows."""
    n, d = 512, 16
    W, xs = data(d, d), data(n, d, seed=2)
    seen = []

    def loss(W, ys):
        seen.append(ys)
        z = torch.nn.functional.normalize(ys, dim=1)
        logits = z @ z.T / 0.1
        return torch.stack([torch.logsumexp(row, 0) for row in logits]).mean() - (z * z.roll(1, 0)).sum()

    body = lambda W, x: torch.tanh(W @ x)
    found = plg.value_and_grad(body, loss)(W, xs)
    assert len(seen) == 1
    assert_close(found, reference(body, loss, "stack", W, xs))


def test_parameters_used_by_the_loss_count_once():
    params = {"w": W, "t": torch.tensor(0.5, dtype=torch.float64)}
    body = lambda p, x: torch.tanh(p["w"] @ x) * p["t"]
    loss = lambda p, ys: torch.logsumexp((ys * p["t"]).flatten(), 0) + p["w"].square().sum()
    live = {k: v.clone().requires_grad_() for k, v in params.items()}
    value = loss(live, plain_map(body, live, XS))
    value.backward()
    for chunk_size in (1, 4, None):
        found_value, found = plg.value_and_grad(body, loss, chunk_size=chunk_size)(params, XS)
        assert_close([found_value, found], [value.detach(), {k: v.grad for k, v in live.items()}])


def test_frozen_parameters_and_token_ids():
    """CASES 9: integer inputs, an embedding that is frozen. Among live parameters, requires_grad decides."""
    ids = torch.randint(0, 5, (N, 4), generator=torch.Generator().manual_seed(0))
    body = lambda p, x: (p["frozen"][x] * p["w"]).sum(0).tanh()
    loss = lambda p, ys: torch.logsumexp(ys.flatten(), 0)
    plain = {"w": data(3), "frozen": data(5, 3)}
    live = {"w": plain["w"].clone().requires_grad_(), "frozen": plain["frozen"]}
    loss(live, plain_map(body, live, ids)).backward()

    found = plg.value_and_grad(body, loss)(live, ids)[1]
    assert_close(found["w"], live["w"].grad)
    assert found["frozen"] is None
    functional = plg.value_and_grad(body, loss)(plain, ids)[1]  # nothing requires grad: every float leaf is meant
    assert_close(functional["w"], live["w"].grad)
    assert functional["frozen"].shape == (5, 3)


def test_any_leaves():
    """CASES 30: the gradient has the structure of params, with None where there can be none."""
    params = {"w": data(3), "n": torch.tensor(2), "cfg": None, "s": 3.0, "act": "relu"}
    body = lambda p, x: getattr(torch, p["act"])(p["w"] * x * p["s"]).sum() * p["n"]
    _, grads = plg.value_and_grad(body, reduce="sum")(params, XS)
    assert sorted(grads) == sorted(params)
    assert [k for k, g in grads.items() if g is not None] == ["w"]
    live = {**params, "w": params["w"].clone().requires_grad_()}
    plain_sum(body, live, XS).backward()
    assert_close(grads["w"], live["w"].grad)


def test_argnums():
    body, loss = (lambda W, x: torch.tanh(W @ x)), (lambda W, ys: torch.logsumexp(ys.flatten(), 0))
    both = plg.value_and_grad(body, loss, argnums=(0, 1))(W, XS)[1]
    assert_close(plg.value_and_grad(body, loss, argnums=1)(W, XS)[1], both[1])
    assert_close(plg.value_and_grad(body, loss)(W, XS)[1], both[0])
    assert both[1].shape == XS.shape


def test_vjp_mirrors_torch():
    body = lambda W, x: {"y": torch.tanh(W @ x), "i": (x > 0).sum()}
    ys, pullback = plg.vjp(body, W, XS, chunk_size=4)
    dy = data(N, 4, seed=3)
    plain = lambda W, xs: plain_map(body, W, xs)["y"]
    ref_y, ref_pullback = torch.func.vjp(plain, W, XS)
    assert_close(ys["y"], ref_y)
    for scale in (1.0, 2.0):  # a pullback can be called again
        assert_close(pullback({"y": scale * dy, "i": None}), ref_pullback(scale * dy))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_vjp_of_a_reduction(reduce):
    body = lambda W, x: torch.tanh(W @ x)
    loop = plain_sum if reduce == "sum" else plain_mean
    y, pullback = plg.vjp(body, W, XS, reduce=reduce)
    ref, ref_pullback = torch.func.vjp(lambda W, xs: loop(body, W, xs), W, XS)
    assert_close([y, pullback(y)], [ref, ref_pullback(ref)])


def test_no_graph_outside_of_a_transform():
    live = W.clone().requires_grad_()
    value, g = plg.value_and_grad(RULES["score"][0], RULES["score"][1], reduce="sum")(live, XS)
    ys, pullback = plg.vjp(lambda W, x: W @ x, live, XS)
    assert not any(t.requires_grad for t in (value, g, ys, *pullback(ys)))


def test_ensembles_by_vmap():
    stack = torch.stack([W, 2 * W, -W])
    f = plg.value_and_grad(*RULES["score"][:2], reduce="sum")
    values, grads = torch.func.vmap(f, in_dims=(0, None))(stack, XS)
    each = [f(w, XS) for w in stack]
    assert_close([values, grads], [torch.stack([v for v, _ in each]), torch.stack([g for _, g in each])])


BAD = {
    "a stack is no scalar": (lambda: plg.value_and_grad(RULES["score"][0]), ValueError),
    "reduce='max'": (lambda: plg.value_and_grad(RULES["score"][0], reduce="max"), ValueError),
    "plan='fast'": (lambda: plg.value_and_grad(RULES["score"][0], reduce="sum", plan="fast"), ValueError),
    "the jacobian of a stack": (
        lambda: plg.value_and_grad(RULES["score"][0], lambda p, y: y.sum(), plan="one_pass"),
        ValueError,
    ),
    "argnums=2": (lambda: plg.value_and_grad(RULES["score"][0], reduce="sum", argnums=2), ValueError),
    "shape (4,)": (lambda: plg.value_and_grad(lambda W, x: W @ x, reduce="sum")(W, XS), TypeError),
    "the loss has shape (6, 4)": (lambda: plg.value_and_grad(lambda W, x: W @ x, lambda p, y: y)(W, XS), TypeError),
    "the loss is a float": (lambda: plg.value_and_grad(lambda W, x: W @ x, lambda p, y: 1.0)(W, XS), TypeError),
    "dys has shape (6, 3)": (lambda: plg.vjp(lambda W, x: W @ x, W, XS)[1](XS), ValueError),
    "structure of the outputs": (lambda: plg.vjp(lambda W, x: (x, x), W, XS)[1](XS), ValueError),
    "weights= goes with a mean": (
        lambda: plg.value_and_grad(RULES["score"][0], reduce="sum", weights=[1.0] * N),
        ValueError,
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_errors_say_what_and_what_to_do(text):
    call, kind = BAD[text]
    with pytest.raises(plg.LoopGradError) as caught:
        call()
    assert isinstance(caught.value, kind)
    assert text in str(caught.value)


def test_a_loss_that_captures_a_parameter_is_refused():
    head = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(plg.errors.CapturedTensorError, match=r"the loss uses head \(shape \(4,\)"):
        plg.value_and_grad(lambda W, x: W @ x, lambda W, ys: (ys * head).sum())(W, XS)


def test_the_gradient_of_xs_has_zeros_where_an_iteration_weighs_nothing():
    """Iterations of weight zero are not run, but their rows are there."""
    g = torch.Generator().manual_seed(0)
    w, xs = torch.randn(3, generator=g, dtype=torch.float64), torch.randn(4, 3, generator=g, dtype=torch.float64)
    weights = torch.tensor([1.0, 0.0, 2.0, -0.5], dtype=torch.float64)
    body, loss = (lambda p, x: torch.tanh(p * x)), (lambda p, y: y.square().sum())
    live = xs.clone().requires_grad_()
    mean = (torch.stack([body(w, x) for x in live]) * weights[:, None]).sum(0) / weights.sum()
    (ref,) = torch.autograd.grad(loss(w, mean), live)
    assert_close(plg.value_and_grad(body, loss, reduce="mean", weights=weights, argnums=1)(w, xs)[1], ref)
    ys, pullback = plg.vjp(body, w, xs, reduce="mean", weights=weights)
    assert_close(pullback(2 * ys)[1], ref)
    f = plg.value_and_grad(lambda p, x: body(p, x).sum(), reduce="mean", weights=weights, argnums=1)
    scalar = torch.autograd.grad((torch.stack([body(w, x).sum() for x in live]) * weights).sum() / weights.sum(), live)
    assert_close(f(w, xs)[1], scalar[0])


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"reduce": "sum"}, {"reduce": "mean"}], ids=str)
def test_a_loss_may_work_in_place(options):
    w, xs = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
    body = lambda w, x: torch.tanh(w * x)
    loss = lambda w, y: y.mul_(2).add_(w).square().sum()
    reductions = {"stack": torch.stack, "sum": sum, "mean": lambda ys: sum(ys) / 4}
    reduced = reductions[options.get("reduce", "stack")]
    gradient, value = torch.func.grad_and_value(lambda w: loss(w, reduced([body(w, x) for x in xs]).clone()))(w)
    found = plg.value_and_grad(body, loss, **options)(w, xs)
    torch.testing.assert_close(found, (value, gradient), rtol=1e-12, atol=1e-12)


def test_a_loss_in_place_does_not_write_into_graphs_that_are_kept():
    loss = lambda w, y: y.mul_(2).sum()
    f = plg.value_and_grad(lambda w, x: torch.tanh(w * x), loss, run=plg.Run(save="everything"))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        f(torch.ones(2), torch.ones(1, 2))
