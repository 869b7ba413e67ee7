"""The main job: its physics, what it reads and refuses, and the whole of it with --quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("skimage", reason="the demo's packages are an extra")
pytest.importorskip("scipy", reason="the demo's packages are an extra")
pytest.importorskip("rich", reason="the demo's packages are an extra")
from scipy.io import savemat

from pure_loopgrad.demo.config import Config, InputError
from pure_loopgrad.demo.physics import Array, Ring, interpolate
from pure_loopgrad.demo.problem import make_problem
from pure_loopgrad.demo.recording import read_recording
from pure_loopgrad.demo.training import autofocus

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared" / "data" / "arim_contact_notch" / "contact_notch_aluminium.mat"
RECORDING = Path(os.environ.get("PURE_LOOPGRAD_RECORDING", SHARED))


def job(*args, cwd):
    command = [sys.executable, "-m", "pure_loopgrad", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_quick(tmp_path):
    done = job("--quick", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["method"]: row for row in found["methods"]}
    assert set(rows) == {"full graph", "frozen but one", "torch.utils.checkpoint", "pure_loopgrad"}
    assert rows["pure_loopgrad"]["error"] < 1e-6  # float32
    assert rows["frozen but one"]["angle"] > 10
    assert rows["pure_loopgrad"]["mib"] < 0.5 * rows["full graph"]["mib"]
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    pictures = sorted(p.name for p in (tmp_path / "demo-output").iterdir())
    assert pictures == ["convergence.png", "memory.png", "reconstruction.png"]


BAD = {
    "--elements 0": "expected at least 2",
    "--steps -1": "expected at least 1",
    "--decimation 128": "fewer than 2 of 128 elements",
    "--size 3": "expected at least 16",
    "--data missing.mat": "no such file",
    "--data text.mat": "not a MATLAB file",
    "--data empty.mat": "no struct exp_data",
    "--data nan.mat": "not finite",
    "--data short.mat": "time_data is",
    "--data partial.mat": "lacks a field",
}


@pytest.mark.parametrize("args", BAD)
def test_bad_input_gets_one_line(args, tmp_path):
    (tmp_path / "text.mat").write_text("not a matrix")
    savemat(tmp_path / "empty.mat", {"other": 1})
    write_recording(tmp_path / "nan.mat", bad="nan")
    write_recording(tmp_path / "short.mat", bad="short")
    write_recording(tmp_path / "partial.mat", bad="partial")
    done = job("--quick" if "--data" in args else "--json", *args.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("pure-loopgrad: ")
    assert BAD[args] in lines[0]


def write_recording(path, n=4, samples=50, bad=None):
    """A small half matrix whose trace from t to r is a spike at sample t + r + 5."""
    tx, rx = np.array([(t, r) for t in range(n) for r in range(t, n)]).T
    data = np.zeros((samples, len(tx)))
    data[tx + rx + 5, np.arange(len(tx))] = 1.0
    if bad == "nan":
        data[3, 2] = np.nan
    struct = {
        "time_data": data[:, 1:] if bad == "short" else data,
        "tx": tx + 1,
        "rx": rx + 1,
        "time": np.arange(samples) * 4e-8,
        "ph_velocity": 6300.0,
        "array": {"el_xc": np.arange(n) * 3e-4},
    }
    if bad == "partial":
        del struct["rx"]
    savemat(path, {"exp_data": struct})


def test_a_half_matrix_is_completed_by_reciprocity(tmp_path):
    write_recording(tmp_path / "a.mat")
    found = read_recording(str(tmp_path / "a.mat"))
    assert found.traces.shape == (4, 2, 4, 50)
    assert found.traces[:, 0].argmax(-1).tolist() == [[t + r + 5 for r in range(4)] for t in range(4)]
    assert (found.velocity, round(found.dt * 1e9)) == (6300.0, 40)


def test_interpolation_reads_between_samples_and_nothing_outside():
    trace = torch.tensor([0.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    at = torch.tensor([-0.5, 0.0, 0.5, 2.25, 3.0, 3.1], dtype=torch.float64)
    assert interpolate(trace, at).tolist() == [0.0, 0.0, 1.0, 5.0, 8.0, 0.0]


@pytest.mark.parametrize("kind", ["ring", "array"])
def test_the_gradient_in_the_speed_of_sound(kind):
    """Against a central difference, small enough that no time of flight crosses a sample."""
    g = torch.Generator().manual_seed(0)
    if kind == "ring":
        ring = Ring.around(16, 4)
        ring = Ring(ring.sensors.double(), ring.pixels.double(), ring.dt, ring.samples)
        trace, speed = torch.randn(2, ring.samples, generator=g, dtype=torch.float64), 1500.0
        total = lambda c: ring.image(trace, ring.sensors[1], c).square().sum()
    else:
        x = torch.linspace(-0.01, 0.01, 8, dtype=torch.float64)
        array = Array(x, torch.full((6,), 0.001, dtype=torch.float64), torch.linspace(3e-6, 8e-6, 6).double(), 4e-8)
        trace, speed = torch.randn(1, 8, 400, generator=g, dtype=torch.float64), 6300.0
        total = lambda c: array.image(trace, x[2], c).square().sum()
    c = torch.tensor(speed, dtype=torch.float64)
    h = 1e-4
    difference = (total(c + h) - total(c - h)) / (2 * h)
    assert torch.func.grad(total)(c).item() == pytest.approx(difference.item(), rel=1e-6)


def test_a_point_source_is_found_where_it_is():
    ring = Ring.around(64, 32)
    source = torch.zeros(1, 64, 64)
    source[0, 20, 45] = 1.0
    c = torch.tensor(1500.0)
    sums = torch.cumsum(ring.record(source, c), dim=-1)  # undoes the derivative in time
    image = sum(ring.image(trace, s, c) for trace, s in zip(sums, ring.sensors, strict=True)).reshape(64, 64)
    row, column = divmod(int(image.argmax()), 64)
    assert abs(row - 20) <= 1  # a sample is a pixel long, and the forward difference lies half of one early
    assert abs(column - 45) <= 1


def test_children_see_the_same_problem():
    config = Config(size=32, elements=8, batch=1)
    again = Config.from_json(config.to_json())
    assert again == config
    assert torch.equal(make_problem(config).xs[0], make_problem(again).xs[0])
    assert make_problem(Config(size=32, elements=8, decimation=3)).n == 3


@pytest.mark.skipif(not RECORDING.is_file(), reason="the real recording is not here (PURE_LOOPGRAD_RECORDING names it)")
def test_the_speed_of_sound_of_the_real_recording():
    focus = autofocus(read_recording(str(RECORDING)), 5900.0, 6, 64, lambda what, value: None, decimation=4)
    assert focus.speeds[-1] == pytest.approx(6300.0, rel=0.01)
    assert focus.sharpness[-1] > focus.sharpness[0]


def test_too_many_crops_are_refused():
    with pytest.raises(InputError, match="--batch 5"):
        Config(batch=5)


def test_sharded():
    """Started by torchrun, the iterations are spread over the processes, and the gradient is that of one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pure_loopgrad"]
    sizes = ["--size", "24", "--elements", "5", "--batch", "1", "--channels", "4", "--steps", "2", "--json"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["iterations"] == [3, 2]
    assert len(found["losses"]) == 2
    assert found["error"] < 1e-5  # in float32
