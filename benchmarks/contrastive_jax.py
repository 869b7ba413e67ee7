"""W3 in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from in_jax import main


@jax.checkpoint
def body(p, x):
    z = jax.nn.gelu(x @ p["A"].T + p["a"], approximate=False) @ p["B"].T + p["b"]
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def loss(z):
    logits = z[:, 0] @ z[:, 1].T / 0.1
    return -jnp.diagonal(jax.nn.log_softmax(logits, axis=-1)).mean()


def gradient(batch_size):
    def of(p, xs):
        return jax.grad(lambda p: loss(jax.lax.map(lambda x: body(p, x), xs, batch_size=batch_size)))(p)

    return of


if __name__ == "__main__":
    main({"64": gradient(64), "256": gradient(256)})
