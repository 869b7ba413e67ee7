"""Measurements, each in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.measure import reference, relative_error

T = TypeVar("T")
# Each process starts as a copy of one that has imported torch and computed nothing.
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(
    ["benchmarks.report", "benchmarks.measure", "pure_loopgrad", "torch._dynamo", "rich.progress"]
)
Found = dict[str, float]


def in_process(fn: Callable[..., T], *args: Any) -> T:
    """`fn(*args)` in a process of its own."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=send_result, args=(sender, fn, args))
    process.start()
    sender.close()  # else the end of the process would not be seen
    try:
        found: T = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{fn.__name__}{args}: the process died, see above") from None
    process.join()
    return found


def send_result(to: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    to.send(fn(*args))


def in_jax(module: Any, method: str, n: int) -> Found:
    """The same by an interpreter that has JAX, on the same numbers; nothing where there is none."""
    python = os.environ.get("BENCH_JAX_PYTHON")
    if python is None:
        return {}
    script = Path(module.__file__).with_name(f"{module.__name__.split('.')[-1]}_jax.py")
    params, xs = module.setup(n)
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(given, xs=xs.numpy(), **{f"p_{k}": p.numpy() for k, p in params.items()})
        command = [python, str(script), module.JAX_METHODS[method], str(given), str(taken)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
        found = dict(json.loads(done.stdout.splitlines()[-1]))
        grads = np.load(taken)
        exact = reference(module, method, n)
        if exact is not None:
            found["error"] = relative_error([torch.from_numpy(grads[k]) for k in params], exact)
    return found
