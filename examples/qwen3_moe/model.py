"""Qwen3-MoE as a Flax NNX module, for any config of the family."""

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from examples.common.attention import rope_angles
from examples.common.float_moe import FloatExperts, FloatMoE
from examples.common.model import Attention, Block, Linear, Model, RMSNorm, Variables
from jmx.checkpoint.model_configs.qwen3_moe import Config


class DenseBlock(nnx.Module):
    """Attention, then one MLP for all tokens, each after a norm and added to the residual stream."""

    def __init__(self, config: Config, attention: Attention, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        sizes = config.hidden_size, config.intermediate_size
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_up = Linear(sizes[0], 2 * sizes[1], bias=False, dtype=dtype, rngs=rngs)
        self.down = Linear(*sizes[::-1], bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: jax.Array,
        mask: jax.Array | None,
        expert_ids: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, None]:
        attended, cache = self.attention(x, self.attention_norm, starts, angles, cache)
        x = x + attended
        gate, up = jnp.split(self.gate_up(x, self.mlp_norm).astype(x.dtype), 2, axis=-1)
        return x + self.down(jmx.SwiGLU()(gate, up)).astype(x.dtype), cache, None

    def variables(self) -> Variables:
        norms = {("input_norm",): self.attention_norm.scale, ("post_attention_norm",): self.mlp_norm.scale}
        mlp = self.gate_up.variables("gate", "up") | self.down.variables("down")
        return norms | self.attention.variables() | mlp


class Qwen3MoE(Model):
    """The whole model; see `examples.qwen3_moe.load` for making one from a checkpoint.

    Queries and keys are normalized per head. Routing is a softmax over all experts, then the `top_k` largest.

    Args:
        config: sizes and constants.
        dtype: bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        rngs: `nnx.Rngs` with the stream `params`.
    """

    def __init__(
        self, config: Config, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None, rngs: nnx.Rngs
    ):
        self.config, self.dtype, self.backend = config, jnp.dtype(dtype), backend

        def block(layer: int) -> Block | DenseBlock:
            window = config.sliding_window
            attention = Attention(config, window=window, head_norms=True, dtype=dtype, rngs=rngs)
            if layer in config.dense_layers:
                return DenseBlock(config, attention, dtype=dtype, rngs=rngs)
            router = Linear(config.hidden_size, config.num_experts, bias=False, dtype=dtype, rngs=rngs)
            return Block(config, attention, router, self.make_moe(None, rngs))

        blocks = [block(layer) for layer in range(config.num_hidden_layers)]
        super().__init__(config, blocks, tied=config.tie_word_embeddings, dtype=dtype, rngs=rngs)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_angles(positions, self.config.head_dim, self.config.rope_theta)

    def make_moe(self, experts: jmx.Experts | FloatExperts | None, rngs: nnx.Rngs) -> jmx.nnx.MoE | FloatMoE:
        config = self.config
        routing = jmx.SoftmaxTopK(config.top_k, renormalize=config.norm_topk_prob)
        if experts is None:
            shape = config.num_experts, config.hidden_size, config.moe_intermediate_size
            experts = _zeros(*shape, self.dtype)
        if isinstance(experts, FloatExperts):
            return FloatMoE(jax.tree.map(lambda a: a.astype(self.dtype), experts), jmx.SwiGLU(), routing)
        return jmx.nnx.MoE(
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
            config.top_k,
            format=experts.format,
            activation=jmx.SwiGLU(),
            routing=routing,
            router=False,
            param_dtype=self.dtype,
            backend=self.backend,
            experts=experts,
            rngs=rngs,
        )


def _zeros(experts: int, hidden: int, intermediate: int, dtype: jax.typing.DTypeLike) -> FloatExperts:
    """Placeholders for a model whose experts are loaded later."""
    return FloatExperts(
        jnp.zeros((experts, 2 * intermediate, hidden), dtype), jnp.zeros((experts, hidden, intermediate), dtype)
    )
