"""A routing of one's own: each token takes the experts of its hash, whatever the router says, with equal weights."""

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx

EXPERTS, TOP_K = 8, 2


def by_hash(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits (T, E) -> ids and weights, (T, k): two different experts, which depend on the token's logits."""
    first = jnp.abs(logits[:, 0] * 1000).astype(jnp.int32) % EXPERTS
    ids = jnp.stack([first, (first + EXPERTS // 2) % EXPERTS], axis=1)
    return ids, jnp.full(ids.shape, 1 / TOP_K)


layer = jmx.nnx.MoE(128, 64, EXPERTS, TOP_K, routing=jmx.Custom(TOP_K, by_hash), rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (64, 128))
out = nnx.jit(lambda layer, x: layer(x))(layer, x)
print("tokens by expert:", jmx.token_counts(layer.route(x), EXPERTS))
print("output:", out.shape)

# Ids and weights from elsewhere need no method at all.
routing = jmx.Routing(jnp.zeros((64, TOP_K), jnp.int32).at[:, 1].set(1), jnp.full((64, TOP_K), 0.5))
print("experts 0 and 1 alone:", layer(x, routing).shape)
