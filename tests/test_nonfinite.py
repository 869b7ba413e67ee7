"""debug_nonfinite: the iteration, the phase, the leaf, the counts, the inputs."""

from __future__ import annotations

import pytest
import torch

import pure_loopgrad as plg

ONES = torch.ones(7, 3, dtype=torch.float64)


def caught(run):
    with plg.debug_nonfinite(), pytest.raises(plg.errors.NonFiniteError) as error:
        run()
    return error.value.record


def with_bad(i, value):
    xs = ONES.clone()
    xs[i, 1] = value
    return xs


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("loop", [plg.map, plg.sum, plg.mean])
def test_forward(loop, chunk_size, batched):
    """log(0) in iteration 4, also inside a chunk."""
    body = lambda p, x: {"y": torch.log(x) * p["w"]}
    record = caught(lambda: loop(body, {"w": torch.ones(3)}, with_bad(4, 0.0), chunk_size=chunk_size, batched=batched))
    assert (record.iteration, record.phase, record.leaf) == (4, "forward", "output['y']")
    assert (record.n_nan, record.n_inf) == (0, 1)
    assert record.inputs["x"].tolist() == [1.0, 0.0, 1.0]
    assert not torch.isfinite(body({"w": record.inputs["params['w']"]}, record.inputs["x"])["y"]).all()


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 7])
@pytest.mark.parametrize("how", ["backward", "grad", "vjp", "value_and_grad"])
def test_backward(how, chunk_size):
    """The root of 0 is finite, its derivative is not; the backward follows after the block."""
    body = lambda w, x: torch.sqrt(w * x)
    w, xs = torch.ones(3, dtype=torch.float64, requires_grad=how == "backward"), with_bad(5, 0.0)
    if how == "backward":
        with plg.debug_nonfinite():
            ys = plg.map(body, w, xs, chunk_size=chunk_size)
        with pytest.raises(plg.errors.NonFiniteError) as error:
            ys.sum().backward()
        record = error.value.record
    else:
        total = lambda w, x: body(w, x).sum()
        runs = {
            "grad": lambda: torch.func.grad(lambda w: plg.map(body, w, xs, chunk_size=chunk_size).sum())(w),
            "vjp": lambda: plg.vjp(body, w, xs, chunk_size=chunk_size)[1](torch.ones_like(xs)),
            "value_and_grad": lambda: plg.value_and_grad(total, reduce="sum", chunk_size=chunk_size)(w, xs),
        }
        record = caught(runs[how])
    assert (record.iteration, record.phase, record.leaf) == (5, "backward", "the gradient of params")
    assert record.n_nan + record.n_inf == 1
    assert record.inputs["x"].tolist() == [1.0, 0.0, 1.0]


def test_forward_mode():
    f = lambda w: plg.map(lambda w, x: torch.sqrt(w * x), w, with_bad(2, 0.0))
    record = caught(lambda: torch.func.jvp(f, (ONES[0],), (ONES[0],)))
    assert (record.iteration, record.phase, record.leaf) == (2, "forward mode", "the tangent of output")


@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 2])
def test_scan(checkpoints):
    step = lambda w, c, x: (c * w, torch.sqrt(c * x))
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with plg.debug_nonfinite():
        _, ys = plg.scan(step, w, ONES[0], with_bad(3, 0.0), checkpoints=checkpoints)
    with pytest.raises(plg.errors.NonFiniteError) as error:
        ys.sum().backward()
    assert error.value.record.phase == "backward"
    assert caught(lambda: plg.scan(step, w, ONES[0], with_bad(3, -1.0))).iteration == 3


@pytest.mark.parametrize("value", [3e38, torch.tensor(6e4, dtype=torch.float16)])
def test_accumulation(value):
    """Finite terms whose sum is not: float32 overflows; float16 is summed in float32 and does not."""
    xs = torch.full((3,), float(value), dtype=torch.float32 if isinstance(value, float) else torch.float16)
    if xs.dtype == torch.float16:
        with plg.debug_nonfinite():
            assert plg.mean(lambda p, x: x, None, xs) == value
        return
    record = caught(lambda: plg.sum(lambda p, x: x, None, xs))
    assert (record.iteration, record.phase, record.leaf) == (1, "accumulation", "output")


def test_the_record_can_be_written(tmp_path):
    record = caught(lambda: plg.map(lambda p, x: 1 / x, None, with_bad(6, 0.0)))
    record.save(tmp_path / "bad.pt")
    read = torch.load(tmp_path / "bad.pt")
    assert read["iteration"] == 6
    assert read["inputs"]["x"].tolist() == [1.0, 0.0, 1.0]


def test_a_bad_cotangent_is_named():
    _, pullback = plg.vjp(lambda w, x: w * x, ONES[0], ONES, run=plg.Run(nonfinite="raise"))
    with pytest.raises(FloatingPointError, match="given values that are not: the cotangent of output"):
        pullback(with_bad(2, float("nan")))


def test_off_outside_of_the_block():
    with plg.debug_nonfinite():
        plg.map(lambda p, x: x, None, ONES)
    assert torch.isinf(plg.map(lambda p, x: 1 / x, None, with_bad(0, 0.0))).any()
