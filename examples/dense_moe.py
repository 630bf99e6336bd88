"""A Flax model's float MoE, written the usual way: every expert computes every token. The README replaces it."""

import jax
import jax.numpy as jnp
from flax import nnx


class DenseMoE(nnx.Module):
    """Top-k experts with SiLU gates; kernels (E, in, out), as Flax has them."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs):
        self.top_k = top_k
        self.router = nnx.Linear(hidden_size, num_experts, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up = nnx.Param(init(rngs.params(), (num_experts, hidden_size, 2 * intermediate_size)))
        self.down = nnx.Param(init(rngs.params(), (num_experts, intermediate_size, hidden_size)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (T, H) -> (T, H)."""
        weights, ids = jax.lax.top_k(self.router(x).astype(jnp.float32), self.top_k)
        weights = jax.nn.softmax(weights)
        gate, up = jnp.split(jnp.einsum("th,ehi->tei", x, self.gate_up[...]), 2, axis=-1)
        out = jnp.einsum("tei,eih->teh", nnx.silu(gate) * up, self.down[...])
        chosen = jnp.take_along_axis(out, ids[..., None], axis=1)
        return jnp.einsum("tkh,tk->th", chosen, weights).astype(x.dtype)


class Block(nnx.Module):
    """The part of a transformer block around its MoE: norm and residual."""

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(hidden_size, rngs=rngs)
        self.moe = DenseMoE(hidden_size, intermediate_size, num_experts, top_k, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (T, H) -> (T, H)."""
        return x + self.moe(self.norm(x))
