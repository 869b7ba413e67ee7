"""Beside other libraries: Opacus as an oracle for clipping, torchopt and torch.optim for functional training steps."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import beartype
import einops
import jaxtyping
import opacus
import pytest
import torch
import torchopt
from jaxtyping import Float
from opacus.optimizers import DPOptimizer

import pure_loopgrad as plg
from pure_loopgrad._counting import LiveBytes
from pure_loopgrad.testing import assert_close, assert_matches_full_graph


def classifier():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    return net, torch.randn(12, 5, dtype=torch.float64), torch.randint(0, 3, (12,))


def loss_of(body):
    return lambda p, x: torch.nn.functional.cross_entropy(body(p, x[0]), x[1])


@pytest.mark.filterwarnings("ignore")  # Opacus and its backward hooks
@pytest.mark.parametrize("limit", [0.05, 0.5, 100.0])
def test_the_clipped_sum_is_that_of_opacus(limit):
    net, xs, labels = classifier()
    body, params = plg.from_module(net)
    clip = plg.folds.clip_norm(limit)
    found = plg.fold_grads(loss_of(body), params, (xs, labels), plg.folds.sum(), transform=clip, chunk_size=5)
    found = {k: g.clone() for k, g in found.items()}
    sampled = opacus.GradSampleModule(net, loss_reduction="sum")
    optimiser = DPOptimizer(
        torch.optim.SGD(sampled.parameters(), 1.0),
        noise_multiplier=0.0, max_grad_norm=limit, expected_batch_size=1, loss_reduction="sum",
    )  # fmt: skip
    torch.nn.functional.cross_entropy(sampled(xs), labels, reduction="sum").backward()
    optimiser.clip_and_accumulate()
    assert_close(found, {k: p.summed_grad for k, p in net.named_parameters()})


def test_a_functional_step_with_torchopt():
    """params, state = step(params, state, xs); the same path as torch.optim.Adam on the full graph, in flat memory."""
    net, xs, labels = classifier()
    body, params = plg.from_module(net)
    params = {k: p.detach().clone() for k, p in params.items()}
    optimiser = torchopt.adam(0.05)
    gradient = plg.value_and_grad(loss_of(body), reduce="mean")

    def step(params, state, xs):
        _, grads = gradient(params, xs)
        updates, state = optimiser.update(grads, state, inplace=False)
        return torchopt.apply_updates(params, updates, inplace=False), state

    state, live = optimiser.init(params), []
    with LiveBytes() as mode:
        for _ in range(30):
            params, state = step(params, state, (xs, labels))
            live.append(mode.now)
    assert live[5] == live[-1]
    adam = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(30):
        adam.zero_grad()
        torch.stack(
            [torch.nn.functional.cross_entropy(net(x), t) for x, t in zip(xs, labels, strict=True)]
        ).mean().backward()
        adam.step()
    # torchopt corrects the bias in float32
    assert_close(params, {k: p.detach() for k, p in net.named_parameters()}, rtol=1e-5)


def test_a_step_of_torch_optim_from_returned_gradients():
    net, xs, labels = classifier()
    body, params = plg.from_module(net)
    gradient = plg.value_and_grad(loss_of(body), reduce="mean")
    optimiser = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    values = []
    for _ in range(20):
        value, grads = gradient(params, (xs, labels))
        for name, p in params.items():
            p.grad = grads[name]
        optimiser.step()
        values.append(value.item())
    assert values[-1] < 0.5 * values[0]


def test_meta_optimisation_through_torchopt():
    """A step of an optimiser inside the differentiated loop: the unrolled solver as a scan."""
    w0 = torch.tensor([1.0, -2.0], dtype=torch.float64)
    data = torch.randn(6, 2, dtype=torch.float64)
    inner = lambda w, x: (w * x).sin().sum()

    def plain(lr):
        w = w0
        for x in data:
            w = w - lr * torch.func.grad(inner)(w, x)
        return w.square().sum()

    def ours(lr):
        step = lambda lr, w, x: (w - lr * torch.func.grad(inner)(w, x), None)
        return plg.scan(step, lr, w0, data)[0].square().sum()

    lr = torch.tensor(0.1, dtype=torch.float64)
    assert_close(torch.func.grad(ours)(lr), torch.func.grad(plain)(lr))


def regression():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return net, torch.randn(12, 5), torch.randn(12, 1)


@pytest.mark.parametrize("scale", [2.0**4, 2.0**127])
def test_autocast_and_grad_scaler(scale):
    """A training step as with the plain loop, also where the scale overflows and the step is left out."""

    def trained(loop):
        net, xs, target = regression()
        optimiser = torch.optim.AdamW(net.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(3):
            optimiser.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (loop(net, xs).float() - target).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
        return [p.detach() for p in net.parameters()], scaler.get_scale()

    ours, our_scale = trained(lambda net, xs: plg.map(*plg.from_module(net), xs))
    plain, their_scale = trained(lambda net, xs: torch.stack([net(x) for x in xs]))
    assert our_scale == their_scale
    assert_close(ours, plain, rtol=2e-3)  # bfloat16 contributions are added in another precision


def test_a_body_of_einops():
    def attend(p, image):
        patches = einops.rearrange(image, "(h a) (w b) -> (h w) (a b)", a=2, b=2)
        return einops.reduce(torch.softmax(patches @ p["q"], 0)[:, None] * patches, "n d -> d", "sum")

    params, images = {"q": torch.randn(4)}, torch.randn(5, 8, 8)
    for stack in ((), ("jvp",), ("vmap",)):
        assert_matches_full_graph(attend, params, images, stack=stack)


def test_a_body_with_jaxtyping():
    """Checked in each iteration, also under vmap, where the body sees one iteration's shapes."""

    @jaxtyping.jaxtyped(typechecker=beartype.beartype)
    def encode(W: Float[torch.Tensor, "o i"], x: Float[torch.Tensor, " i"]) -> Float[torch.Tensor, " o"]:  # noqa: F722
        return torch.tanh(W @ x)

    assert_matches_full_graph(encode, torch.randn(3, 4), torch.randn(5, 4))
    with pytest.raises(jaxtyping.TypeCheckError):
        plg.map(encode, torch.randn(3, 4), torch.randn(5, 2, 4), chunk_size=2)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_lightning_with_manual_optimisation(tmp_path):
    """Gradients without a graph, put where the optimiser looks; the same path as torch.optim by itself."""
    pytest.importorskip("lightning", reason="the extra lightning is missing")
    from lightning.pytorch import LightningModule, Trainer

    class Model(LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net, self.automatic_optimization = net, False

        def training_step(self, batch, _):
            xs, target = batch
            body, params = plg.from_module(self.net)
            value, grads = plg.value_and_grad(body, lambda p, ys: (ys - target).square().mean())(params, xs)
            optimiser = self.optimizers()
            for name, p in params.items():
                p.grad = grads[name]
            optimiser.step()
            optimiser.zero_grad()
            self.log("loss", value)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.1)

    net, xs, target = regression()
    alone, _, _ = regression()
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Model(net), torch.utils.data.DataLoader([(xs, target)], batch_size=None))
    optimiser = torch.optim.SGD(alone.parameters(), 0.1)
    for _ in range(3):
        optimiser.zero_grad()
        (torch.stack([alone(x) for x in xs]) - target).square().mean().backward()
        optimiser.step()
    assert_close(list(net.parameters()), list(alone.parameters()), rtol=1e-5)


SAVING_LOOPS = {
    "map": lambda w, xs: plg.map(lambda w, x: torch.tanh(w * x), w, xs),
    "sum": lambda w, xs: plg.sum(lambda w, x: torch.tanh(w * x), w, xs),
    "scan": lambda w, xs: plg.scan(lambda w, c, x: (torch.tanh(c * w) + x, c * w), w, w, xs)[1],
    "checkpoint": lambda w, xs: plg.checkpoint(lambda w: torch.tanh(w * xs))(w),
}


@pytest.mark.parametrize("loop", SAVING_LOOPS.values(), ids=SAVING_LOOPS)
def test_inside_torch_utils_checkpoint(loop):
    xs = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    live = torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64, requires_grad=True)
    around = torch.utils.checkpoint.checkpoint(lambda w: loop(w, xs).sin(), live, use_reentrant=False)
    found, expected = (torch.autograd.grad(y.sum(), live)[0] for y in (around, loop(live, xs).sin()))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_a_loop_saves_is_unpacked_once():
    counts = {"packed": 0, "unpacked": 0}

    def counting(name):
        def hook(t):
            counts[name] += 1
            return t

        return hook

    live = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(counting("packed"), counting("unpacked")):
        ys = plg.map(lambda w, x: w * x, live, torch.ones(1, 3))
    torch.autograd.grad(ys, live, torch.ones_like(ys))
    assert counts == {"packed": 2, "unpacked": 2}


def test_outputs_of_transformers_are_pytrees():
    @dataclass
    class Output(OrderedDict):  # as transformers.utils.ModelOutput: its items are the fields that are not None
        state: torch.Tensor | None = None
        pooled: torch.Tensor | None = None

        def __post_init__(self):
            for name in ("state", "pooled"):
                if getattr(self, name) is not None:
                    super().__setitem__(name, getattr(self, name))

    w, xs = torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(4, 2)
    for options in ({}, {"chunk_size": 2}):
        found = plg.map(lambda w, x: Output(pooled=w * x), w, xs, **options)
        assert isinstance(found, Output)
        assert (found.state, list(found), found.pooled.shape) == (None, ["pooled"], (4, 2))
        assert found["pooled"] is found.pooled
        assert torch.autograd.grad(found.pooled.sum(), w)[0].tolist() == [4, 4]


def test_a_dataclass_that_is_a_dict_of_something_else_is_refused():
    @dataclass
    class Output(dict):
        state: torch.Tensor

    with pytest.raises(plg.errors.LoopTypeError, match="the fields of a Output are not its items"):
        plg.map(lambda w, x: Output(w * x), torch.ones(2), torch.ones(3, 2))
