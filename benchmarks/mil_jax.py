"""W2 in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from in_jax import main


def conv_relu_pool(x, w):
    h = jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME"))
    return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


@jax.checkpoint
def body(p, x):
    h = conv_relu_pool(conv_relu_pool(x[None], p["conv1"]), p["conv2"])
    return p["out"] @ h.reshape(-1)


def loss(p, h):
    weights = jax.nn.softmax(jnp.tanh(h @ p["attention"].T) @ p["score"][0])
    return -jax.nn.log_sigmoid(p["head"][0] @ (weights @ h))


def gradient(batch_size):
    def of(p, xs):
        return jax.grad(lambda p: loss(p, jax.lax.map(lambda x: body(p, x), xs, batch_size=batch_size)))(p)

    return of


if __name__ == "__main__":
    main({"map": gradient(None), "chunks": gradient(16)})
