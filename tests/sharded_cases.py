"""What the tests of `distributed` run on each rank."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacfwd, jvp, vmap

import pure_loopgrad as plg
from pure_loopgrad import distributed

G = torch.Generator().manual_seed(0)
N = 5
P = {
    "W": torch.randn(3, 3, generator=G, dtype=torch.float64),
    "b": [torch.randn(3, generator=G, dtype=torch.float64)],
    "k": 2,
}
XS = torch.randn(N, 3, generator=G, dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 0.0, 2.0, -0.5, 3.0], dtype=torch.float64)
SHARDS = {1: [[5]], 2: [[3, 2], [5, 0]], 3: [[2, 2, 1], [1, 0, 0], [0, 5, 0]]}
COLLECTIVES = [
    "all_gather_single",
    "all_reduce",
    "all_gather_object",
    "all_to_all_single",
    "broadcast",
    "all_gather",
]
REDUCES = ["stack", "sum", "mean", "weighted"]


def body(p, x):
    return {"y": torch.tanh(p["W"] @ x + p["b"][0]) * p["k"], "s": x.sum() * p["b"][0], "n": (x > 0).sum()}


def loss(p, reduced):
    """Couples all iterations, and uses params itself."""
    every = torch.cat([reduced["y"].flatten(), reduced["s"].flatten()])
    return torch.logsumexp(every, 0) + (p["W"] * every[:3]).square().sum() * reduced["n"].sum()


def plain(p, xs, reduce):
    outs = [body(p, x) for x in xs]
    stacked = {k: torch.stack([o[k] for o in outs]) for k in outs[0]}
    if reduce == "stack":
        return stacked
    w = WEIGHTS[: len(xs)]
    if reduce != "weighted":  # the mean of integers is a float32
        return {k: t.sum(0) if reduce == "sum" else t.sum(0) / len(xs) for k, t in stacked.items()}
    return {k: torch.tensordot(w, t.double(), 1) / w.sum() for k, t in stacked.items()}


def own(sizes, rank):
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def live_params():
    return {"W": P["W"].clone().requires_grad_(), "b": [P["b"][0].clone().requires_grad_()], "k": 2}


def backward(loop, body, xs):
    loop(body, live_params(), xs).square().sum().backward()


def looped(p, xs, reduce, weights, **options):
    if reduce == "stack":
        return distributed.map(body, p, xs, **options)
    if reduce == "weighted":
        return distributed.mean(body, p, xs, weights=weights, **options)
    return {"sum": distributed.sum, "mean": distributed.mean}[reduce](body, p, xs, **options)


def gradients(rank, world, options):
    """(value, gradient of W, of b, of the rank's own xs) by value_and_grad, and by .backward() of the loop."""
    found = {}
    for sizes in SHARDS[world]:
        part = own(sizes, rank)
        for reduce in REDUCES:
            weights = WEIGHTS[part] if reduce == "weighted" else None
            kind = "mean" if reduce == "weighted" else reduce
            f = distributed.value_and_grad(body, loss, reduce=kind, weights=weights, argnums=(0, 1), **options)
            value, (dp, dxs) = f(P, XS[part])
            found["value_and_grad", tuple(sizes), reduce] = value, dp["W"], dp["b"][0], dxs
            p, xs = live_params(), XS[part].clone().requires_grad_()
            value = loss(p, looped(p, xs, reduce, weights, **options))
            value.backward()
            found["backward", tuple(sizes), reduce] = value.detach(), p["W"].grad, p["b"][0].grad, xs.grad
    return found


def transforms(rank, sizes):
    xs, weights = XS[own(sizes, rank)], WEIGHTS[own(sizes, rank)]
    f = lambda reduce: lambda b: loss({**P, "b": [b]}, looped({**P, "b": [b]}, xs, reduce, weights))
    return {reduce: derivatives(f(reduce)) for reduce in REDUCES}


def derivatives(f):
    """Of a scalar function of b, by every transform."""
    b = P["b"][0]
    return (
        grad(f)(b),
        hessian(f)(b),
        jacfwd(f)(b),
        jvp(grad(f), (b,), (b,))[1],
        vmap(grad(f))(torch.stack([b, 2 * b])),
        grad(lambda b: grad(f)(b).square().sum())(b),
        torch.autograd.functional.hessian(f, b, vectorize=True),
    )


def one_pass(rank, sizes):
    xs = XS[own(sizes, rank)]
    scalar = lambda p, x: body(p, x)["y"].sum()
    out = {}
    with counted() as calls:
        for reduce in ("sum", "mean"):
            f = distributed.value_and_grad(scalar, lambda p, z: -F.logsigmoid(z) + p["W"].sum(), reduce=reduce)
            f(P, xs)
            calls.clear()
            out[reduce] = f(P, xs)
            out[reduce, "calls"] = dict(calls)
    return out


TOKENS = torch.tensor([[0, 1], [1, 1], [3, 2], [2, 0], [4, 4]])
TABLE = torch.arange(15.0, dtype=torch.float64).reshape(5, 3) / 7


def embedded(table, tokens, sparse=True):
    return torch.tanh(F.embedding(tokens, table, sparse=sparse)).sum(0)


def sparse_gradients(rank, sizes):
    tokens = TOKENS[own(sizes, rank)]
    out = {}
    for reduce in ("stack", "sum"):
        f = distributed.value_and_grad(embedded, lambda p, ys: ys.square().sum(), reduce=reduce)
        table = TABLE.clone().requires_grad_()
        looped = distributed.map if reduce == "stack" else distributed.sum
        looped(embedded, table, tokens).square().sum().backward()
        out[reduce] = f(TABLE, tokens)[1], table.grad
    return out


@contextmanager
def counted():
    """Counts the collectives by name."""
    calls = Counter()

    def counting(name, call):
        def counted_call(*args, **kwargs):
            calls[name] += 1
            return call(*args, **kwargs)

        return counted_call

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield calls


def collectives(rank, sizes):
    """Of a first and a second call, of a larger one, and of a loop with its backward."""
    out = {}
    xs = XS[own(sizes, rank)]
    for reduce in ("stack", "sum"):
        with counted() as calls:
            f = distributed.value_and_grad(body, loss, reduce=reduce)
            f(P, xs)
            out[reduce, "first"] = dict(calls)
            calls.clear()
            f(P, xs)
            out[reduce, "second"] = dict(calls)
            calls.clear()
            value, _ = f(P, torch.cat([xs, xs, xs]))
            out[reduce, "larger"] = dict(calls), value
            calls.clear()
            f(P, torch.cat([xs, xs, xs]))
            out[reduce, "larger again"] = dict(calls)
            p = live_params()
            loss(p, looped(p, xs, reduce, None)).backward()
            calls.clear()
            loss(p, looped(p, xs, reduce, None)).backward()
            out[reduce, "loop"] = dict(calls)
    return out


def streams(rank, world):
    """Masks of each rank, whether they replay, and where the default generator ends."""
    torch.manual_seed(0)
    w = torch.ones(64, dtype=torch.float64, requires_grad=True)
    xs = torch.ones(2, 64, dtype=torch.float64)
    ys = distributed.map(lambda w, x: F.dropout(w * x, 0.5), w, xs)
    ys.sum().backward()
    return ys.detach(), w.grad, torch.get_rng_state()


def orders(rank, world):
    """Sums of numbers on which the order of addition shows, in float32 and by bfloat16."""
    torch.manual_seed(rank)
    xs = torch.randn(3, 1000) * 10.0 ** torch.randint(-4, 5, (3, 1000))
    total = lambda **options: distributed.sum(lambda p, x: p * x, torch.ones(()), xs, **options)
    return xs, [total(deterministic=True) for _ in range(3)], total(), total(communication="bf16")


def raised(fn, *args):
    """The type and the text of what a call raises."""
    try:
        fn(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def faults(rank, world):
    """Errors of one rank, in each phase, as all ranks see them; and that the group still works afterwards."""
    xs, seen = XS[own([2, 1, 2][:world], rank)], {}

    def failing(when):
        state = {"calls": 0}

        def f(p, x):
            state["calls"] += 1
            if rank == 1 and state["calls"] in when:
                raise ValueError("the disk is full")
            return p["W"] @ x

        return f

    for reduce in ("stack", "sum"):
        for name, when, calls in (("first call", [1], 1), ("later call", [3], 2), ("backward", [2], 1)):
            f = distributed.value_and_grad(failing(when), lambda p, y: y.square().sum(), reduce=reduce, run=plg.Run())
            for _ in range(calls):
                seen[reduce, name] = raised(f, P, xs)

        loop = distributed.map if reduce == "stack" else distributed.sum
        seen[reduce, "backward of a loop"] = raised(backward, loop, failing([2]), xs)
    seen["xs"] = raised(distributed.map, lambda p, x: p["W"] @ x, P, xs[:, : 3 - rank])
    seen["outputs"] = raised(distributed.map, lambda p, x: x[: 2 - rank], P, xs)
    seen["after"] = distributed.sum(lambda p, x: x, None, xs)
    return seen


def head(k, fails=False):
    """Closures of one code, whose outputs differ in shape."""

    def f(p, x):
        if fails:
            raise ValueError("the disk is full")
        return (p * x)[:k]

    return f


def heads(rank, sizes):
    """Of two ranks, of which one may have no iterations; then rank 1 raises in a call with another shape."""
    w, xs = P["b"][0], XS[own(sizes, rank)]
    out = []
    for k in (3, 2, 3):
        value, dw = distributed.value_and_grad(head(k), lambda p, y: y.square().sum(), reduce="sum")(w, xs)
        out.append((distributed.map(head(k), w, xs), distributed.sum(head(k), w, xs), value, dw))
    fails = lambda loop: raised(loop, head(1, fails=rank == 1), w, XS[own([3, 2], rank)])
    with counted() as calls:
        after = distributed.sum(head(2), w, xs)
    return out, [fails(distributed.sum), fails(distributed.map)], after, dict(calls)


def dtypes(rank, sizes):
    """Complex entries behind an odd number of real ones, and integers that no float64 holds."""
    xs = XS[own(sizes, rank)]
    outs = distributed.sum(lambda p, x: (x[:1], x * 1j, (x > 0), LARGE, -LARGE, LARGE.to(torch.int32)), None, xs)
    p = {"a": P["b"][0], "c": P["W"][0, :2] * (1 + 2j)}
    f = distributed.value_and_grad(of_complex, lambda p, y: y.square().sum())
    live = {k: t.clone().requires_grad_() for k, t in p.items()}
    distributed.map(of_complex, live, xs).square().sum().backward()
    return outs, f(p, xs)[1], {k: t.grad for k, t in live.items()}


LARGE = torch.tensor(2**53 + 1)


def of_complex(p, x):
    return (p["a"].sum() * p["c"]).abs().sum() * x.sum()


def marks(rank, world):
    """Ranks that differentiate other leaves, of equal shapes."""
    live = {k: P["b"][0].clone().requires_grad_((k == "a") == (rank == 0)) for k in "ab"}
    f = lambda p, x: p["a"] * x + 2 * p["b"] * x
    xs = XS[own([3, 2], rank)]
    return [
        raised(distributed.value_and_grad(f, lambda p, y: y.square().sum()), live, xs),
        raised(backward_of, distributed.map, f, live, xs),
    ]


def backward_of(loop, body, live, xs):
    loop(body, live, xs).square().sum().backward()


def killed(rank, world):
    """Rank 1 dies in a backward; how the others hear of it, and how long that takes."""
    calls = []

    def f(p, x):
        calls.append(0)
        if rank == 1 and len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return p["W"] @ x

    start = time.monotonic()
    try:
        distributed.value_and_grad(f, lambda p, y: y.square().sum())(P, XS[:2])
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing was raised"


def foreign(rank, world):
    seen = []
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    seen += [raised(plg.from_module, net), raised(distributed.map, net, None, XS)]
    body_, params = plg.from_module(net.module)
    seen.append(distributed.map(body_, params, XS.float()).shape)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    w = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    return [*seen, raised(distributed.map, lambda p, x: p["w"] * x, {"w": w}, XS)]
