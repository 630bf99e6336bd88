"""A DeepSeek-style layer: routed 4-bit experts plus a shared dense one, which the caller adds."""

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx


class SharedExpertsMoE(nnx.Module):
    def __init__(self, hidden: int, intermediate: int, num_experts: int, top_k: int, *, rngs: nnx.Rngs):
        self.routed = jmx.nnx.MoE(
            hidden,
            intermediate,
            num_experts,
            top_k,
            activation=jmx.SiLUAndMul(),
            routing=jmx.GroupedTopK(top_k, 4, 2, scoring="sigmoid", renormalize=True, routed_scaling_factor=2.5),
            correction_bias=True,
            rngs=rngs,
        )
        self.gate, self.up = (nnx.Linear(hidden, intermediate, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(intermediate, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.routed(x) + self.down(nnx.silu(self.gate(x)) * self.up(x))


if __name__ == "__main__":
    layer = SharedExpertsMoE(128, 64, num_experts=16, top_k=4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 128))
    print(jmx.explain(layer.routed, x))
    print("tokens by expert:", jmx.token_counts(layer.routed.route(x), 16))
    bias = layer.routed.correction_bias  # load balancing lowers an expert's bias, without a gradient
    bias.set_value(jnp.zeros(16).at[0].set(-10.0))
    print("with a lower bias of expert 0:", jmx.token_counts(layer.routed.route(x), 16))
    print("output:", jax.jit(lambda layer, x: layer(x))(layer, x).shape)
