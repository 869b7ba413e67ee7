"""Every block of Python in the README and in docs/ runs, page by page; every file of examples/ runs, at small sizes."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchopt
from torch import nn

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def readme_names():
    """What the README's first blocks leave to the reader."""
    features = nn.Conv2d(1, 4, 3, padding=1)
    return {
        "torch": torch,
        "n": 3,
        "sinogram": torch.randn(3, 8, 8),
        "beamform": lambda sinogram, c, tx: (sinogram[tx] / c)[None],
        "speed_of_sound": torch.tensor(1.5, requires_grad=True),
        "features": features,
        "head": nn.Flatten(),
        "criterion": lambda z: z.square().mean(),
        **readme_training_names(),
    }


def readme_training_names():
    loss = lambda p, ys: ys.square().mean()
    return {"torchopt": torchopt, "optimiser": torchopt.sgd(0.1), "loss": loss, "xs": torch.arange(3)}


def distributed_names():
    return {
        "body": lambda p, x: torch.tanh(p["w"] * x),
        "loss": lambda p, ys: ys.square().sum(),
        "params": {"w": torch.ones(2)},
        "xs": torch.randn(4, 2),
    }


@pytest.fixture
def _one_rank(monkeypatch):
    """A group of one, for what torchrun would set."""
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(page, capsys):
    names = {"README.md": readme_names, "distributed.md": distributed_names}.get(page.name, dict)()
    if page.name == "README.md" and not dist.is_initialized():
        dist.init_process_group("gloo")  # the block about ranks says that this comes first
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match[1], str(page), "exec"), names)


def test_there_is_code_to_run():
    """The pattern finds the blocks: one in nearly every page."""
    without = [p.relative_to(ROOT).as_posix() for p in PAGES if not BLOCK.search(p.read_text())]
    assert without == ["benchmarks/README.md", "docs/examples.md"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs(example, tmp_path, capsys):
    """It compares itself with the full graph; the figure it prints must be rounding."""
    picture = tmp_path / "picture.png"
    main = runpy.run_path(str(example))["main"]
    arguments = {"file": None} if example.stem == "ultrasound" else {}
    main(quick=True, picture=picture, **arguments)
    error = float(re.search(r"gradient (\S+) from the full graph's", capsys.readouterr().out)[1])
    assert error < 1e-5
    assert picture.stat().st_size > 5000


def test_an_example_runs_as_a_file(tmp_path):
    copy = shutil.copy(ROOT / "examples" / "ista.py", tmp_path)  # the picture goes beside it
    command = [sys.executable, copy, "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ista.png").exists()


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is missing")
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # the theme speaks of its successor
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "api" / "loops" / "index.html").read_text().count("doc-heading") >= 7
