"""Grouped-query attention as a module."""

from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.models import few_rows
from jmx.models.attention.functions import attend_cache, attend_prompt
from jmx.models.attention.paged import attend_pages
from jmx.models.attention.self_attention import SelfAttention
from jmx.models.config import Config
from jmx.models.layers import Linear, RMSNorm, Variables
from jmx.models.paged_cache import PagedLayer
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


class Attention(SelfAttention):
    """Grouped-query attention.

    Queries that share keys are one group with their keys and values: a product of the residual stream has them side by
    side, so that a slice of groups is a slice of its rows.

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
        self.head_dim, self.kv_heads = config.head_dim, kv_heads
        self.group = heads // kv_heads  # queries
        self.window, self.clip = window, clip
        rows = (heads + 2 * kv_heads) * config.head_dim
        self.grouped = linear(config.hidden_size, rows, bias=qkv_bias, groups=kv_heads, divided=("heads", None))
        self.out = linear(heads * config.head_dim, config.hidden_size, bias=out_bias, divided=(None, "heads"))
        self.sinks = nnx.data(nnx.Param(jnp.zeros(heads, jnp.float32), divided=("heads",)) if sinks else None)
        self.norms = norms
        norm = partial(RMSNorm, epsilon=config.rms_norm_eps, divided="heads" if norms == "all_heads" else None)
        made = (None if size is None else norm(size) for size in norm_sizes(config, norms))
        self.query_norm, self.key_norm = map(nnx.data, made)

    def write(
        self, x: jax.Array, norm: RMSNorm, angles: tuple[jax.Array, jax.Array], starts: jax.Array | None, cache: Any
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """A token a row is projected, rotated and written by one kernel where that can; then queries are all."""
        if self.norms is None and self.clip is None and not self.grouped.summed:
            bias = None if self.grouped.bias is None else self.grouped.bias[...]
            found = few_rows.heads(x, self.grouped.weights.get_value(), bias, norm, angles, starts, cache)
            if found is not None:
                query, cache = found
                return (query,), cache
        return super().write(x, norm, angles, starts, cache)

    def project(
        self, x: jax.Array, norm: RMSNorm, angles: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        groups = self.grouped.rounded(x, norm).reshape(*x.shape[:2], -1, self.group + 2, self.head_dim)
        parts = jnp.split(groups, (self.group, self.group + 1), axis=3)
        query, key, value = (part.reshape(*x.shape[:2], -1, self.head_dim) for part in parts)
        cached = self._cached(key, value, angles)
        return (self._turned(query, self.query_norm, angles), *cached), cached

    def cached_parts(self, x: jax.Array, norm: RMSNorm, angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        """By the product of x and the rows of keys and values alone."""
        of_group = (self.group + 2) * self.head_dim
        key, value = jnp.split(self.grouped.last_of_groups(x, norm, of_group, 2 * self.head_dim), 2, axis=-1)
        return self._cached(key, value, angles)

    def _cached(
        self, key: jax.Array, value: jax.Array, angles: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        value = value if self.clip is None else jnp.clip(value, -self.clip, self.clip)
        return self._turned(key, self.key_norm, angles), value

    def _turned(self, heads: jax.Array, norm: RMSNorm | None, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Queries or keys (B, T, heads, D), normalized, clipped and rotated."""
        heads = heads if norm is None else self._normalized(heads, norm)
        return rotate(heads if self.clip is None else jnp.clip(heads, -self.clip, self.clip), angles)

    def attend(self, heads: tuple[jax.Array, ...], cache: Any, starts: jax.Array | None) -> jax.Array:
        query, *keys_and_values = heads
        sinks = None if self.sinks is None else self.sinks[...]
        if isinstance(cache, PagedLayer):
            return attend_pages(query, cache, sinks, self.window)
        if starts is None:
            key, value = keys_and_values
            return attend_prompt(query, key, value, sinks, self.window)
        return attend_cache(query, cache, sinks, starts, self.window)

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Shape of this layer's cache: keys and values, (2, B, kv_heads, C, head_dim)."""
        return 2, batch, self.kv_heads, capacity, self.head_dim

    cache_axes = (None, "token", "heads", None, None)

    def _normalized(self, heads: jax.Array, norm: RMSNorm) -> jax.Array:
        return norm(heads) if self.norms == "head" else norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)

    def variables(self) -> Variables:
        found = self.grouped.variables("q", "k", "v") | self.out.variables("o")
        if self.sinks is not None:
            found[("sinks",)] = self.sinks
        norms = {"q_norm": self.query_norm, "k_norm": self.key_norm}
        return found | {(name,): norm.scale for name, norm in norms.items() if norm is not None}
