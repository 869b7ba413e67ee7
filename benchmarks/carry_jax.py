"""W4 in JAX."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from in_jax import main

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


def gradient(loop):
    def of(p, xs):
        weights = [p["0"], p["1"], p["2"]]
        c = jnp.zeros((BATCH, HIDDEN))
        grads = jax.grad(lambda weights: jnp.mean(loop(weights, c, xs) ** 2))(weights)
        return {str(i): g for i, g in enumerate(grads)}

    return of


if __name__ == "__main__":
    main({"scan": gradient(by_scan), "segments": gradient(by_segments), "equinox": gradient(by_equinox)})
