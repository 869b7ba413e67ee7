"""W1 in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from in_jax import main


def conv(x, w, b):
    return jax.lax.conv(x, w, (1, 1), "SAME") + b[None, :, None, None]


@jax.checkpoint
def body(p, x):
    x = jax.nn.silu(conv(x[None], p["0.weight"], p["0.bias"]))
    x = jax.nn.silu(conv(x, p["2.weight"], p["2.bias"]))
    return conv(x, p["4.weight"], p["4.bias"])[0]


def fused(ys):
    scores = ys.mean((1, 2, 3))
    return (jax.nn.softmax(scores) * scores).sum()


def stacked(p, xs):
    return jax.grad(lambda p: fused(jax.lax.map(lambda x: body(p, x), xs)))(p)


def mean(p, xs):
    def loss(p):
        total = jax.lax.scan(lambda c, x: (c + body(p, x), None), jnp.zeros((16, 96, 96)), xs)[0]
        return ((total / len(xs)) ** 2).mean()

    return jax.grad(loss)(p)


def score(p, xs):
    """The sum and its gradient come from one pass; the chain rule is applied by hand."""
    import optax

    one = jax.value_and_grad(lambda p, xs: jax.vmap(lambda x: body(p, x).mean())(xs).sum())
    z, dz = optax.microbatch(one, argnums=1, microbatch_size=1)(p, xs)
    outer = jax.grad(lambda z: -jax.nn.log_sigmoid(z))(z)
    return jax.tree.map(lambda g: outer * g, dz)


if __name__ == "__main__":
    main({"stacked": stacked, "mean": mean, "score": score})
