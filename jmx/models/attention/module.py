"""Grouped-query attention as a module."""

from functools import partial
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.models.attention.functions import attend_cache, attend_prompt
from jmx.models.cache import write
from jmx.models.config import Config
from jmx.models.layers import Linear, RMSNorm, Variables
from jmx.models.rope import rotate


class AttentionConfig(Config, Protocol):
    """The fields of a configuration that `Attention` needs: see `model_configs.grouped_query.GroupedQueryConfig`."""

    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


# Queries and keys are normalized over each head's channels, or over those of all heads.
Norms = Literal["head", "all_heads"]


def norm_sizes(config: AttentionConfig, norms: Norms | None) -> tuple[int, int] | tuple[None, None]:
    """Channels that the norms of queries and of keys are over."""
    if norms is None:
        return None, None
    heads = (1, 1) if norms == "head" else (config.num_attention_heads, config.num_key_value_heads)
    return heads[0] * config.head_dim, heads[1] * config.head_dim


class Attention(nnx.Module):
    """Grouped-query attention.

    Args:
        window: how many positions a token attends to, including its own; None for all.
        qkv_bias: whether the projections to queries, keys and values have biases.
        out_bias: whether the projection of the result has a bias.
        sinks: whether each head has a sink.
        norms: what queries and keys are normalized over before they are rotated; None: they are not.
        clip: the largest magnitude of queries, keys and values, before rotation; None: they are not clipped.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        window: int | None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        sinks: bool = False,
        norms: Norms | None = None,
        clip: float | None = None,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        linear = partial(Linear, dtype=dtype, rngs=rngs)
        self.head_dim = config.head_dim
        self.cuts = (heads, heads + kv_heads)  # where keys and values begin among the heads of one product
        self.window, self.clip = window, clip
        self.query_key_value = linear(config.hidden_size, (heads + 2 * kv_heads) * config.head_dim, bias=qkv_bias)
        self.out = linear(heads * config.head_dim, config.hidden_size, bias=out_bias)
        self.sinks = nnx.data(nnx.Param(jnp.zeros(heads, jnp.float32)) if sinks else None)
        self.norms = norms
        made = (None if size is None else RMSNorm(size, config.rms_norm_eps) for size in norm_sizes(config, norms))
        self.query_norm, self.key_norm = map(nnx.data, made)

    def __call__(
        self,
        x: jax.Array,
        norm: RMSNorm,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """x (B, T, H), T consecutive tokens a row before `norm`, the first at `starts` (B,) -> (B, T, H), cache."""
        heads = self.query_key_value(x, norm).astype(x.dtype).reshape(*x.shape[:2], -1, self.head_dim)
        query, key, value = jnp.split(heads, self.cuts, axis=2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self._normalized(query, self.query_norm), self._normalized(key, self.key_norm)
        if self.clip is not None:
            query, key, value = (jnp.clip(heads, -self.clip, self.clip) for heads in (query, key, value))
        query, key = rotate(query, angles), rotate(key, angles)
        cache = write(cache, (key, value), starts)
        sinks = None if self.sinks is None else self.sinks[...]
        if starts is None:
            out = attend_prompt(query, key, value, sinks, self.window)
        else:
            out = attend_cache(query, cache, sinks, starts, self.window)
        return self.out(out.reshape(*x.shape[:2], -1)).astype(x.dtype), cache

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Shape of this layer's cache: keys and values, (2, B, kv_heads, C, head_dim)."""
        return 2, batch, self.cuts[1] - self.cuts[0], capacity, self.head_dim

    def _normalized(self, heads: jax.Array, norm: RMSNorm) -> jax.Array:
        return norm(heads) if self.norms == "head" else norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)

    def variables(self) -> Variables:
        found = self.query_key_value.variables("q", "k", "v") | self.out.variables("o")
        if self.sinks is not None:
            found[("sinks",)] = self.sinks
        norms = {"q_norm": self.query_norm, "k_norm": self.key_norm}
        return found | {(name,): norm.scale for name, norm in norms.items() if norm is not None}
