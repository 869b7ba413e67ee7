"""W5 in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from in_jax import main


@jax.checkpoint
def body(p, x):
    return jnp.tanh(p["W"] @ x)


def gradient(batch_size):
    def of(p, xs):
        loop = lambda p: jax.lax.map(lambda x: body(p, x), xs, batch_size=batch_size)  # noqa: E731
        return jax.grad(lambda p: jax.nn.logsumexp(loop(p)))(p)

    return of


if __name__ == "__main__":
    main({"map": gradient(None), "chunks": gradient(256)})
