"""One JAX method on the arrays of a file, run by an interpreter that has JAX: prints seconds, compile time and memory.

`python <workload>_jax.py method inputs.npz outputs.npz`: a method is a function of (params, xs) to a gradient.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from resources import ENOUGH, median_seconds, peak_starts, resident_mib


def main(methods: dict[str, Callable[[dict[str, Any], Any], Any]]) -> None:
    method, inputs, outputs = sys.argv[1:]
    arrays = {name: jax.numpy.asarray(a) for name, a in np.load(inputs).items()}
    params = {name[2:]: a for name, a in arrays.items() if name.startswith("p_")}
    xs = arrays["xs"]
    start = time.perf_counter()
    run = jax.jit(methods[method]).lower(params, xs).compile()
    compiling = time.perf_counter() - start
    jax.block_until_ready(run(params, xs))  # threads and buffers of the first run
    base, start = peak_starts(), time.perf_counter()
    grads = jax.block_until_ready(run(params, xs))
    seconds, mib = time.perf_counter() - start, resident_mib("VmHWM") - base
    if seconds < ENOUGH:
        seconds = median_seconds(lambda: jax.block_until_ready(run(params, xs)), 3)
    np.savez(outputs, **{name: np.asarray(g) for name, g in grads.items()})
    print(json.dumps({"seconds": seconds, "mib": mib, "compile": compiling}))
