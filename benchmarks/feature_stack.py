"""W1: a CNN with 16 channels on n images 1x96x96: its features stacked and fused, averaged, or summed to one score.

`F` and `F + B` are one iteration of the plain loop at a time: recomputation must cost about 2F + B. Every method runs
the same pure body; `from_module` runs it as a torch.nn module. The score's loss is -logsigmoid of a sum over
iterations. A method called `chunks of 16` runs that many images at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pure_loopgrad as plg
from benchmarks.floors import Method, Run, by_backward, floors, gradient_cache, in_double, streaming

SIZES = [32, 128]
QUICK_SIZES = [32]
CHUNK = 16
Params = dict[str, Tensor]
Loss = Callable[[object, Tensor], Tensor]
COMPILED = plg.Run(compile=True)
SAVING = plg.Run(save=64 * 2**20)  # bytes


def network() -> nn.Sequential:
    def conv(a: int, b: int) -> nn.Module:
        return nn.Conv2d(a, b, 3, padding=1)

    return nn.Sequential(conv(1, 16), nn.SiLU(), conv(16, 16), nn.SiLU(), conv(16, 16))


def body(p: Params, x: Tensor) -> Tensor:
    """The same network as a function of its parameters, for one image or a batch of them."""
    x = F.silu(F.conv2d(x, p["0.weight"], p["0.bias"], padding=1))
    x = F.silu(F.conv2d(x, p["2.weight"], p["2.bias"], padding=1))
    return F.conv2d(x, p["4.weight"], p["4.bias"], padding=1)


def score(p: Params, x: Tensor) -> Tensor:
    return body(p, x).mean()


def setup(n: int) -> tuple[Params, Tensor]:
    torch.manual_seed(0)
    params = {name: p.detach() for name, p in network().named_parameters()}
    return params, torch.randn(n, 1, 96, 96)


def fused(_: object, ys: Tensor) -> Tensor:
    """A loss that couples all iterations: a softmax over them, as an attention would."""
    scores = ys.mean(dim=(1, 2, 3))
    return (torch.softmax(scores, 0) * scores).sum()


def averaged(_: object, y: Tensor) -> Tensor:
    return y.square().mean()


def likely(_: object, z: Tensor) -> Tensor:
    return -F.logsigmoid(z)


def plain(p: Params, xs: Tensor) -> Tensor:
    return torch.stack([body(p, x) for x in xs])


def mean_of(ys: Tensor) -> Tensor:
    return averaged(None, ys.mean(0))


def checkpointed(p: Params, xs: Tensor, chunk: int = 1) -> Tensor:
    return torch.cat([checkpoint(body, p, x, use_reentrant=False) for x in xs.split(chunk)])


def checkpointed_sum(f: Callable[[Params, Tensor], Tensor], p: Params, xs: Tensor) -> Tensor:
    """As one would write a sum that keeps no stack."""
    total = checkpoint(f, p, xs[0], use_reentrant=False)
    for x in xs[1:]:
        total = total + checkpoint(f, p, x, use_reentrant=False)
    return total


def as_module(n: int) -> Run:
    params, xs = setup(n)
    net = network()
    net.load_state_dict(params)

    def run() -> list[Tensor | None]:
        net.zero_grad()
        averaged(None, plg.mean(*plg.from_module(net), xs)).backward()
        return [p.grad for p in net.parameters()]

    return run


def stacked(loop: Callable[[Params, Tensor], Tensor]) -> Method:
    return by_backward(lambda p, xs: fused(None, loop(p, xs)), setup)


def chunked(p: Params, xs: Tensor, run: plg.Run | None = None) -> Tensor:
    return plg.map(body, p, xs, chunk_size=CHUNK, batched=True, run=run)


METHODS: dict[str, Method] = {
    **floors(body, setup),
    "stacked: plain loop": stacked(plain),
    "stacked: torch.utils.checkpoint": stacked(checkpointed),
    "stacked: torch.utils.checkpoint, chunks of 16": stacked(lambda p, xs: checkpointed(p, xs, CHUNK)),
    "stacked: gradient cache, chunks of 16": gradient_cache(body, fused, setup, CHUNK),
    "stacked: plg.map": stacked(lambda p, xs: plg.map(body, p, xs)),
    "stacked: plg.map, chunks of 16": stacked(chunked),
    "stacked: plg.map, chunks of 16, some saved": stacked(lambda p, xs: chunked(p, xs, SAVING)),
    "stacked: plg.map, chunks of 16, compiled": stacked(lambda p, xs: chunked(p, xs, COMPILED)),
    "mean: plain loop": by_backward(lambda p, xs: mean_of(plain(p, xs)), setup),
    "mean: torch.utils.checkpoint, stacked": by_backward(lambda p, xs: mean_of(checkpointed(p, xs)), setup),
    "mean: torch.utils.checkpoint, running sum": by_backward(
        lambda p, xs: averaged(None, checkpointed_sum(body, p, xs) / len(xs)), setup
    ),
    "mean: gradient cache, chunks of 16": gradient_cache(body, lambda _, ys: mean_of(ys), setup, CHUNK),
    "mean: plg.mean": by_backward(lambda p, xs: averaged(None, plg.mean(body, p, xs)), setup),
    "mean: plg.mean of from_module": as_module,
    "mean: plg.mean, compiled": by_backward(lambda p, xs: averaged(None, plg.mean(body, p, xs, run=COMPILED)), setup),
    "score: torch.utils.checkpoint, running sum": by_backward(
        lambda p, xs: likely(None, checkpointed_sum(score, p, xs)), setup
    ),
    "score: plg.value_and_grad": streaming(score, likely, setup, reduce="sum"),
    "score: plg.value_and_grad, compiled": streaming(score, likely, setup, reduce="sum", run=COMPILED),
}

REFERENCES: dict[str, Method] = {
    "stacked": by_backward(lambda p, xs: fused(None, plain(p, xs)), in_double(setup)),
    "mean": by_backward(lambda p, xs: mean_of(plain(p, xs)), in_double(setup)),
    "score": by_backward(lambda p, xs: likely(None, plain(p, xs).mean((1, 2, 3)).sum()), in_double(setup)),
}

# by the name of the method in feature_stack_jax.py
JAX_METHODS = {
    "stacked: JAX lax.map of jax.checkpoint": "stacked",
    "mean: JAX lax.scan of jax.checkpoint": "mean",
    "score: optax.microbatch of jax.value_and_grad": "score",
}
