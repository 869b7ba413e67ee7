"""Memory by counting: live bytes at the peak and bytes saved for the backward, against the number of iterations."""

from __future__ import annotations

import functools

import pytest
import torch

import pure_loopgrad as plg
from pure_loopgrad._counting import LiveBytes
from pure_loopgrad.testing import peak_bytes, saved_bytes

D = 32


def deep(W, x):
    """Keeps five intermediates an iteration, each as large as its input."""
    for _ in range(5):
        x = torch.tanh(W @ x)
    return x


def setup(n):
    g = torch.Generator().manual_seed(0)
    return torch.randn(D, D, generator=g), torch.randn(n, D, 8, generator=g)


def backward(loop, n):
    W, xs = setup(n)
    W.requires_grad_()
    return lambda: loop(W, xs).square().sum().backward()


def vjp(loop, n):
    W, xs = setup(n)
    return lambda: torch.func.grad(lambda W: loop(W, xs).square().sum())(W)


def forward_over_reverse(loop, n):
    W, xs = setup(n)
    return lambda: torch.func.jvp(torch.func.grad(lambda W: loop(W, xs).square().sum()), (W,), (W,))


def reverse_over_forward(loop, n):
    W, xs = setup(n)
    f = lambda W: loop(W, xs).square().sum()
    return lambda: torch.func.grad(lambda W: torch.func.jvp(f, (W,), (torch.ones_like(W),))[1])(W)


def vmapped_gradients(loop, n):
    W, xs = setup(n)
    g = torch.func.grad(lambda W: loop(W, xs).square().sum())
    return lambda: torch.func.vmap(g)(torch.stack([W, 2 * W]))


REDUCED = {
    "sum": lambda W, xs: plg.sum(deep, W, xs),
    "mean": lambda W, xs: plg.mean(deep, W, xs),
    "weighted mean": lambda W, xs: plg.mean(deep, W, xs, weights=torch.ones(len(xs))),
    "sum in chunks": lambda W, xs: plg.sum(deep, W, xs, chunk_size=8),
}
ORDERS = [backward, vjp, forward_over_reverse, reverse_over_forward, vmapped_gradients]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", REDUCED)
def test_peak_of_a_reduction_does_not_depend_on_n(name, order):
    few, many = (peak_bytes(order(REDUCED[name], n)) for n in (16, 256))
    weights = 4 * 256 if name == "weighted mean" else 0  # they are inputs, but made in the call
    assert many <= 1.02 * few + weights


def test_peak_from_64_to_1024():
    few, many = (peak_bytes(backward(REDUCED["mean"], n)) for n in (64, 1024))
    assert many <= 1.02 * few


@pytest.mark.parametrize("order", [backward, vjp, forward_over_reverse])
def test_peak_of_a_stack_grows_by_outputs_alone(order):
    """Outputs, their cotangents, the loss's own graph: what is left per iteration is no intermediate of the body."""
    loop = lambda W, xs: plg.map(deep, W, xs)
    stack = lambda W, xs: (W.sum() * xs).tanh()  # a body with one intermediate, and the same size of output
    few, many = (peak_bytes(order(loop, n)) for n in (16, 256))
    floor_few, floor_many = (peak_bytes(order(stack, n)) for n in (16, 256))
    assert many - few <= 1.02 * 1.5 * (floor_many - floor_few)


def test_autocast_caches_nothing():
    """Its cache of cast weights would hold one entry an iteration until the user's block ends."""

    def run(n):
        W, xs = setup(n)
        W.requires_grad_()

        def step():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                plg.sum(deep, W, xs).float().square().sum().backward()

        return step

    assert peak_bytes(run(64)) <= 1.02 * peak_bytes(run(8))


def test_the_plain_loop_does_grow():
    """The measure itself: it must see what the plain loop keeps."""
    plain = lambda W, xs: torch.stack([deep(W, x) for x in xs]).mean(0)
    assert peak_bytes(backward(plain, 512)) > 6 * peak_bytes(backward(plain, 64))


@pytest.mark.parametrize("n", [8, 512])
@pytest.mark.parametrize("name", ["sum", "mean"])
def test_only_inputs_are_saved(name, n):
    W, xs = setup(n)
    W.requires_grad_()
    inputs = 4 * (W.numel() + xs.numel())
    assert saved_bytes(lambda: REDUCED[name](W, xs)) <= inputs + 64  # a mean saves the scalar it divides by


def test_checkpoint_saves_its_arguments_alone():
    W, xs = setup(1)
    W.requires_grad_()
    assert saved_bytes(lambda: plg.checkpoint(deep)(W, xs[0])) == 4 * (W.numel() + xs[0].numel())


def test_one_pass_does_not_depend_on_n():
    f = plg.value_and_grad(lambda W, x: deep(W, x).sum(), lambda W, z: torch.sigmoid(z), reduce="sum")
    few, many = (peak_bytes(functools.partial(f, *setup(n))) for n in (16, 256))
    assert many <= 1.02 * few


@pytest.mark.parametrize(("head", "copies"), [(False, 2), (True, 3)])
@pytest.mark.parametrize("plan", ["one_pass", "two_pass"])
def test_copies_of_the_parameters(plan, head, copies):
    """A large model and a small chunk: the gradient and the contribution that is being added to it, and one more
    gradient where the loss uses the parameters itself."""
    W, xs = torch.randn(256, 256), torch.randn(16, 256)
    loss = lambda W, z: z * W[0, 0] if head else z
    f = plg.value_and_grad(lambda W, x: torch.tanh(W @ x).sum(), loss, reduce="sum", plan=plan)
    assert peak_bytes(lambda: f(W, xs)) <= (copies + 0.2) * 4 * W.numel()


def test_training_steps_keep_nothing():
    """CASES 26: parameters straight from a module, p <- p - lr g; the live bytes after each step are the same."""
    net = torch.nn.Linear(8, 8)
    body, params = plg.from_module(net)
    xs = torch.randn(16, 8)
    f = plg.value_and_grad(body, lambda p, ys: ys.square().mean())
    live = []
    with LiveBytes() as mode:
        for _ in range(100):
            _, grads = f(params, xs)
            params = {k: p - 0.1 * grads[k] for k, p in params.items()}
            params = {k: p.detach().requires_grad_() for k, p in params.items()}
            assert all(g.grad_fn is None and not g.requires_grad for g in grads.values())
            live.append(mode.now)
    assert live[5] == live[-1]


def test_a_watched_iteration_holds_no_more_than_any_other():
    """The look-out for captured tensors refers to what the body makes, but does not keep it; the digest of
    its output holds a sample of 256 entries."""
    W, xs = setup(4)
    runs = plg.Run(check="off"), plg.Run(check="first")
    peaks = [peak_bytes(functools.partial(plg.sum, deep, W, xs, run=run)) for run in runs]
    assert peaks[1] <= 1.05 * peaks[0] + 2 * 256 * 8
