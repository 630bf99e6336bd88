"""A backend of one's own, outside jmx: every expert computes every token. It is chosen where it says that it can run.

docs/adding_a_backend.md explains the parts, and how a package registers its backends when it is installed.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx import Environment, Experts, Problem, Reason, Rejection, Routing


@dataclass(frozen=True)
class EveryToken:
    """For a few tokens, on any platform."""

    name: str = "every_token"
    summary: str = "every expert on every token, weights dequantized whole"

    def supports(self, problem: Problem, environment: Environment) -> Rejection | None:
        if problem.gate_up_order != "concatenated" or problem.bias or problem.input_format is not None:
            return Rejection(Reason.LAYOUT, "other experts", "concatenated rows, without biases and input formats")
        if problem.num_tokens is None or problem.num_tokens > 8:
            return Rejection(Reason.SHAPE, f"{problem.num_tokens} tokens, at most 8", "fewer tokens")
        return None

    def apply(
        self, problem: Problem, x: jax.Array, routing: Routing, experts: Experts, environment: Environment
    ) -> jax.Array:
        gate_up, down = experts.dequantize(jnp.float32)
        gate, up = jnp.split(jnp.einsum("th,enh->ten", x, gate_up), 2, axis=-1)
        out = jnp.einsum("tei,ehi->teh", problem.activation(gate, up), down)
        hit = routing.expert_ids[..., None] == jnp.arange(experts.num_experts)  # NOWHERE hits none
        weights = jnp.where(hit, routing.weights[..., None], 0).sum(axis=1)
        return jnp.einsum("teh,te->th", out, weights).astype(x.dtype)


jmx.register_backend(EveryToken(), before="xla")
layer = jmx.nnx.MoE(128, 64, num_experts=8, top_k=2, backend="every_token", rngs=nnx.Rngs(0))
x = jax.random.normal(jax.random.key(0), (4, 128))
print(jmx.explain(layer, x))
out = layer(x)
with jmx.use_backend("xla"):
    reference = jmx.moe(x, layer.route(x), layer.experts, activation=layer.activation)
print(f"largest difference from xla: {jnp.max(jnp.abs(out - reference)):.1e}")
