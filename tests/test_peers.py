"""What the README says of torch's own functions, so that it stays true: when one of these fails, a cell has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._higher_order_ops.scan import scan  # private, as is the operator: it is what the README compares with
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from pure_loopgrad.testing import peak_bytes

ROOT = Path(__file__).parent.parent


def deep(W, x):
    for _ in range(4):
        x = torch.tanh(W @ x)
    return x


def test_checkpoint_refuses_torch_func():
    f = lambda W: checkpoint(deep, W, torch.ones(3), use_reentrant=False).sum()
    with pytest.raises(RuntimeError):
        torch.func.grad(f)(torch.eye(3))


def test_checkpoint_holds_every_recomputation_under_double_backward():
    """So a Hessian-vector product takes memory that grows with n."""

    def peak(n):
        W, xs = torch.eye(16, requires_grad=True), torch.ones(n, 16, 8)

        def hvp():
            total = sum(checkpoint(deep, W, x, use_reentrant=False).square().sum() for x in xs)
            (g,) = torch.autograd.grad(total, W, create_graph=True)
            return torch.autograd.grad(g.sum(), W)

        return peak_bytes(hvp)

    assert peak(64) > 3 * peak(16)


def steps(w):
    return scan(lambda c, x: (torch.tanh(w * c + x), c.clone()), torch.zeros(4), torch.ones(6, 4))[0].sum()


TRANSFORMS = {
    "grad": lambda w: torch.func.grad(steps)(w),
    "jvp": lambda w: torch.func.jvp(steps, (w,), (w,)),
    "vmap": lambda w: torch.func.vmap(steps)(torch.stack([w, w, w])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_scan_op_fails_under_torch_func(transform):
    with pytest.raises((RuntimeError, AssertionError)):
        TRANSFORMS[transform](torch.ones(()))


RESIDENT = """
import torch
from torch._higher_order_ops.scan import scan
from benchmarks.measure import peak_mib

W = (torch.randn(64, 64) / 8).requires_grad_()

def step(c, x):
    h = c
    for _ in range(4):
        h = torch.tanh(W @ h)
    return h + x, x.sum()

def gradient(n):
    scan(step, torch.zeros(64, 1024), torch.zeros(n, 1, 1))[0].sum().backward()

gradient(8)
print(*(peak_mib(lambda n=n: gradient(n)) for n in (8, 64)))
"""


def test_the_scan_op_keeps_the_intermediates_of_all_steps():
    """By resident memory, in a process of its own: its tensors pass no mode that could count them."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT], capture_output=True, text=True, check=True, cwd=ROOT, env=env
    )
    few, many = map(float, done.stdout.split()[-2:])
    assert many > 3 * few


def test_the_scan_op_has_a_backward():
    w = torch.ones((), requires_grad=True)
    (g,) = torch.autograd.grad(steps(w), w)
    assert torch.isfinite(g)


def test_the_while_loop_op_has_a_reverse_mode():
    w = torch.tensor(2.0, requires_grad=True)
    improve = lambda x: ((x + w / x) / 2,)
    (root,) = while_loop(lambda x: (x * x - 2).abs() > 1e-4, improve, (torch.tensor(1.0),))
    root.backward()
    torch.testing.assert_close(w.grad, 0.5 / torch.tensor(2.0).sqrt(), atol=1e-3, rtol=0)
