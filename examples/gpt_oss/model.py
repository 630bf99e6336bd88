"""gpt-oss as a Flax NNX module on `jmx.nnx.MoE`, for any config of the family."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jmx.nnx
from examples.gpt_oss.attention import attend_cache, attend_prompt, precision, rotate, yarn_angles
from examples.gpt_oss.cache import write
from jmx.activations import SwiGLU
from jmx.checkpoint.gpt_oss import Config


class MoERecord(NamedTuple):
    """What went into one layer's experts and came out: (B, T, H) both."""

    input: jax.Array
    output: jax.Array


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis (Zhang and Sennrich, 2019), in float32."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) * self.scale[...] * self.rate(x)).astype(x.dtype)

    def rate(self, x: jax.Array) -> jax.Array:
        """1 / sqrt(mean(x^2) + epsilon), float32 (..., 1)."""
        return jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1, keepdims=True) + self.epsilon)


class Linear(nnx.Module):
    """x W^T + b in float32, of weights (out, in) as checkpoints hold them, and a bias unless `bias` is False."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.weights = nnx.Param(nnx.initializers.normal(inputs**-0.5)(rngs.params(), (outputs, inputs), dtype))
        self.bias = nnx.data(nnx.Param(jnp.zeros(outputs, dtype)) if bias else None)

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """(..., in), or a norm's input -> float32 (..., out)."""
        weights = self.weights[...]
        if x.size == x.shape[-1]:
            # One row as a plain sum reads the weights once, at the memory's rate, and fuses with what stands around it.
            # XLA's GPU compiler would try products out on buffers of its own, three times as large as the weights.
            # A norm's rate multiplies the result: so its sum and the scaled row, computed once, are one kernel.
            row = x.astype(jnp.float32) * (1 if norm is None else norm.scale[...])
            row = jax.lax.optimization_barrier(row.reshape(-1))
            out = jnp.sum(weights.astype(jnp.float32) * row, axis=-1).reshape(*x.shape[:-1], -1)
            out *= 1 if norm is None else norm.rate(x)
        else:
            x = x if norm is None else norm(x)
            exact = precision(weights.dtype)
            out = jnp.einsum("...i,oi->...o", x, weights, precision=exact, preferred_element_type=jnp.float32)
        return out if self.bias is None else out + self.bias[...].astype(jnp.float32)


class Attention(nnx.Module):
    """Grouped-query attention with biases and sinks; it slides over a window or sees everything, as the config says."""

    def __init__(self, config: Config, layer: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        linear = partial(Linear, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.head_dim = config.head_dim
        self.cuts = (heads, heads + kv_heads)  # where keys and values begin among the heads of one product
        self.window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.query_key_value = linear(config.hidden_size, (heads + 2 * kv_heads) * config.head_dim)
        self.out = linear(heads * config.head_dim, config.hidden_size)
        self.sinks = nnx.Param(jnp.zeros(config.num_attention_heads, jnp.float32))

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """x (B, T, H) of T consecutive tokens a row, to be normed, the first at `starts` (B,) -> (B, T, H), cache."""
        heads = self.query_key_value(x, norm).astype(x.dtype).reshape(*x.shape[:2], -1, self.head_dim)
        query, key, value = jnp.split(heads, self.cuts, axis=2)
        query, key = rotate(query, angles), rotate(key, angles)
        cache = write(cache, key, value, starts)
        if starts is None:
            out = attend_prompt(query, key, value, self.sinks[...], self.window)
        else:
            out = attend_cache(query, cache, self.sinks[...], starts, self.window)
        return self.out(out.reshape(*x.shape[:2], -1)).astype(x.dtype), cache


class Block(nnx.Module):
    """Attention, then experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config, layer: int, *, dtype: jax.typing.DTypeLike, backend: str | None, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.router = Linear(config.hidden_size, config.num_experts, bias=True, dtype=dtype, rngs=rngs)
        self.moe = jmx.nnx.MoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.top_k,
            activation=SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit),
            gate_up_order="interleaved",
            bias=True,
            router=False,
            param_dtype=dtype,
            backend=backend,
            rngs=rngs,
        )

    def __call__(
        self,
        x: jax.Array,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: jax.Array,
        mask: jax.Array | None,
        expert_ids: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, MoERecord]:
        attended, cache = self.attention(x, self.attention_norm, starts, angles, cache)
        x = x + attended
        normed = self.moe_norm(x)
        logits = self.router(x, self.moe_norm)
        if expert_ids is not None:  # leave routing no other choice
            chosen = (expert_ids[..., None] == jnp.arange(logits.shape[-1])).any(axis=-2)
            logits = jnp.where(chosen, logits, -jnp.inf)
        out = self.moe(normed, logits, mask=mask)
        return x + out, cache, MoERecord(normed, out)


class GptOss(nnx.Module):
    """The whole model; see `examples.gpt_oss.load` for making one out of a checkpoint.

    Activations, cache and dense weights are of `dtype`; norms, angles, softmax, routing and logits are float32;
    expert weights stay in 4 bits.

    Args:
        config: sizes and constants (`jmx.checkpoint.gpt_oss.Config`).
        dtype: bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        rngs: `nnx.Rngs`, of which `params` is drawn.
    """

    def __init__(
        self, config: Config, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None, rngs: nnx.Rngs
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embedding = nnx.Param(
            nnx.initializers.normal(1.0)(rngs.params(), (config.vocab_size, config.hidden_size), dtype)
        )
        self.layers = nnx.List(
            Block(config, layer, dtype=dtype, backend=backend, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.unembedding = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        starts: jax.Array | None,
        caches: Sequence[jax.Array],
        *,
        mask: jax.Array | None = None,
        expert_ids: Sequence[jax.Array] | None = None,
        records: list[MoERecord] | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Runs T consecutive tokens of each row, after those that the caches hold.

        Args:
            tokens: int32 (B, T).
            starts: int32 (B,), position of each row's first token, that is how many the caches hold of it; None for 0,
                which is quicker: nothing is read from the caches.
            caches: one a layer, with room for position starts + T - 1.
            mask: bool (B, T) or None; False is padding, which goes to no expert and must come after a row's tokens.
            expert_ids: int32 (B, T, top_k) a layer, in place of the router's choice of experts (not of their weights).
            records: a list to which each layer's `MoERecord` is appended, for comparisons.

        Returns:
            The last layer's residual stream (B, T, H), for `logits`, and the new caches.
        """
        x = self.embedding[...][tokens]
        positions = jnp.arange(tokens.shape[1])
        angles = yarn_angles(self.config, positions[None] if starts is None else starts[:, None] + positions)
        written = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            ids = None if expert_ids is None else expert_ids[index]
            x, cache, record = layer(x, starts, angles, cache, mask, ids)
            written.append(cache)
            if records is not None:
                records.append(record)
        return x, written

    def logits(self, x: jax.Array) -> jax.Array:
        """Next-token logits, float32 (..., vocab_size), of the residual stream (..., H)."""
        return self.unembedding(x, self.final_norm)
