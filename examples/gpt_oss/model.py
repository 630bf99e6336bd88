"""gpt-oss as a Flax NNX module on `jmx.nnx.MoE`, for any config of the family."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jmx.nnx
from examples.gpt_oss.attention import attend, precision, rotate, yarn_angles
from examples.gpt_oss.cache import KeysValues
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
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with biases and sinks; it slides over a window or sees everything, as the config says."""

    def __init__(self, config: Config, layer: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        linear = partial(
            nnx.Linear,
            use_bias=config.attention_bias,
            dtype=dtype,
            param_dtype=dtype,
            precision=precision(dtype),
            rngs=rngs,
        )
        self.head_dim = config.head_dim
        self.window = config.sliding_window if config.layer_types[layer] == "sliding_attention" else None
        self.query = linear(config.hidden_size, config.num_attention_heads * config.head_dim)
        self.key = linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.value = linear(config.hidden_size, config.num_key_value_heads * config.head_dim)
        self.out = linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        self.sinks = nnx.Param(jnp.zeros(config.num_attention_heads, jnp.float32))

    def __call__(
        self, x: jax.Array, starts: jax.Array, angles: tuple[jax.Array, jax.Array], cache: KeysValues
    ) -> tuple[jax.Array, KeysValues]:
        """x (B, T, H) of T consecutive tokens a row, the first at `starts` (B,); returns (B, T, H) and the cache."""
        query, key, value = (
            projection(x).reshape(*x.shape[:2], -1, self.head_dim) for projection in (self.query, self.key, self.value)
        )
        positions = starts[:, None] + jnp.arange(x.shape[1])
        cache = cache.write(rotate(key, angles), value, positions)
        out = attend(rotate(query, angles), *cache, self.sinks[...], starts, self.window)
        return self.out(out.reshape(*x.shape[:2], -1)), cache


class Block(nnx.Module):
    """Attention, then experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: Config, layer: int, *, dtype: jax.typing.DTypeLike, backend: str | None, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, dtype=dtype, rngs=rngs)
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.moe = jmx.nnx.MoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.top_k,
            activation=SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit),
            gate_up_order="interleaved",
            bias=True,
            param_dtype=dtype,
            backend=backend,
            rngs=rngs,
        )

    def __call__(
        self,
        x: jax.Array,
        starts: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        cache: KeysValues,
        mask: jax.Array | None,
        expert_ids: jax.Array | None,
    ) -> tuple[jax.Array, KeysValues, MoERecord]:
        attended, cache = self.attention(self.attention_norm(x), starts, angles, cache)
        x = x + attended
        normed = self.moe_norm(x)
        logits = None if expert_ids is None else self._only(normed, expert_ids)
        out = self.moe(normed, logits, mask=mask)
        return x + out, cache, MoERecord(normed, out)

    def _only(self, x: jax.Array, expert_ids: jax.Array) -> jax.Array:
        """Router logits (B, T, E) of x that leave routing no other choice than `expert_ids` (B, T, k)."""
        assert self.moe.router is not None
        logits = self.moe.router(x)
        chosen = (expert_ids[..., None] == jnp.arange(logits.shape[-1])).any(axis=-2)
        return jnp.where(chosen, logits, -jnp.inf)


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
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), vocabulary, dtype))
        self.layers = nnx.List(
            Block(config, layer, dtype=dtype, backend=backend, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.unembedding = nnx.Param(
            nnx.initializers.normal(config.hidden_size**-0.5)(rngs.params(), vocabulary, dtype)
        )

    def __call__(
        self,
        tokens: jax.Array,
        starts: jax.Array,
        caches: Sequence[KeysValues],
        *,
        mask: jax.Array | None = None,
        expert_ids: Sequence[jax.Array] | None = None,
        records: list[MoERecord] | None = None,
    ) -> tuple[jax.Array, list[KeysValues]]:
        """Runs T consecutive tokens of each row, after those that the caches hold.

        Args:
            tokens: int32 (B, T).
            starts: int32 (B,), position of each row's first token, that is how many the caches hold of it.
            caches: one a layer, with room for position starts + T - 1.
            mask: bool (B, T) or None; False is padding, which goes to no expert and must come after a row's tokens.
            expert_ids: int32 (B, T, top_k) a layer, in place of the router's choice of experts (not of their weights).
            records: a list to which each layer's `MoERecord` is appended, for comparisons.

        Returns:
            The last layer's residual stream (B, T, H), for `logits`, and the new caches.
        """
        x = self.embedding[...][tokens]
        angles = yarn_angles(self.config, starts[:, None] + jnp.arange(tokens.shape[1]))
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
        x, weights = self.final_norm(x), self.unembedding[...]
        if x.size == x.shape[-1]:
            # One row as a plain sum reads the weights once, at the memory's rate. XLA's GPU compiler would try products
            # out on buffers of its own, three times as large as the weights (3.6 GB for the published vocabulary).
            logits = jnp.sum(weights.astype(jnp.float32) * x.reshape(-1).astype(jnp.float32), axis=-1)
            return logits.reshape(*x.shape[:-1], -1)
        exact = precision(self.dtype)
        return jnp.einsum("...h,vh->...v", x, weights, precision=exact, preferred_element_type=jnp.float32)
