"""The same loop in JAX, run by an interpreter that has it: prints seconds and peak memory as JSON."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

HIDDEN, BATCH = 256, 32


def step(p, c, x):
    reset, update = jax.nn.sigmoid(c @ p[0] + x), jax.nn.sigmoid(c @ p[1] + x)
    new = jnp.tanh((reset * c) @ p[2] + x)
    return update * c + (1 - update) * new


def by_scan(p, c, xs):
    return jax.lax.scan(lambda c, x: (step(p, c, x), None), c, xs)[0]


def by_segments(p, c, xs):
    """Segments of sqrt(n) steps (the largest divisor of n up to that), and a checkpoint around each step."""
    size = next(s for s in range(math.isqrt(len(xs)), 0, -1) if len(xs) % s == 0)

    def segment(c, xs):
        return jax.lax.scan(jax.checkpoint(lambda c, x: (step(p, c, x), None)), c, xs)[0], None

    return jax.lax.scan(jax.checkpoint(segment), c, xs.reshape(-1, size, *xs.shape[1:]))[0]


def by_equinox(p, c, xs):
    import equinox.internal as eqxi

    return eqxi.scan(lambda c, x: (step(p, c, x), None), c, xs, kind="checkpointed", checkpoints=40)[0]


def resident_mib(field):
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) / 2**10


def main():
    loop = {"scan": by_scan, "segments": by_segments, "equinox": by_equinox}[sys.argv[1]]
    n = int(sys.argv[2])
    key = jax.random.split(jax.random.PRNGKey(0), 4)
    p = [jax.random.normal(k, (HIDDEN, HIDDEN)) / math.sqrt(HIDDEN) for k in key[:3]]
    c, xs = jnp.zeros((BATCH, HIDDEN)), 0.1 * jax.random.normal(key[3], (n, BATCH, HIDDEN))
    f = jax.jit(jax.grad(lambda p: jnp.mean(loop(p, c, xs) ** 2)))
    run = f.lower(p).compile()
    Path("/proc/self/clear_refs").write_text("5")
    base = resident_mib("VmRSS")
    jax.block_until_ready(run(p))
    mib = resident_mib("VmHWM") - base
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(run(p))
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": statistics.median(seconds), "mib": mib}))


if __name__ == "__main__":
    main()
