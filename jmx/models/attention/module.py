"""Grouped-query attention as a module."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jmx.models.attention.functions import NO_SINK, attend_cache, attend_prompt
from jmx.models.cache import write
from jmx.models.config import Config
from jmx.models.layers import Linear, RMSNorm, Variables
from jmx.models.rope import rotate


class Attention(nnx.Module):
    """Grouped-query attention, with biases if the config has them.

    Args:
        window: how many positions a token attends to, including its own; None for all.
        sinks: whether each head has a sink.
        head_norms: whether each head's queries and keys are normalized before they are rotated.
    """

    def __init__(
        self,
        config: Config,
        *,
        window: int | None,
        sinks: bool = False,
        head_norms: bool = False,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        linear = partial(Linear, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.head_dim = config.head_dim
        self.cuts = (heads, heads + kv_heads)  # where keys and values begin among the heads of one product
        self.window = window
        self.query_key_value = linear(config.hidden_size, (heads + 2 * kv_heads) * config.head_dim)
        self.out = linear(heads * config.head_dim, config.hidden_size)
        self.sinks = nnx.data(nnx.Param(jnp.zeros(heads, jnp.float32)) if sinks else None)
        norms = [RMSNorm(config.head_dim, config.rms_norm_eps) if head_norms else None for _ in range(2)]
        self.query_norm, self.key_norm = map(nnx.data, norms)

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
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, angles), rotate(key, angles)
        cache = write(cache, (key, value), starts)
        sinks = jnp.full(query.shape[2], NO_SINK, jnp.float32) if self.sinks is None else self.sinks[...]
        if starts is None:
            out = attend_prompt(query, key, value, sinks, self.window)
        else:
            out = attend_cache(query, cache, sinks, starts, self.window)
        return self.out(out.reshape(*x.shape[:2], -1)).astype(x.dtype), cache

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Shape of this layer's cache: keys and values, (2, B, kv_heads, C, head_dim)."""
        return 2, batch, self.cuts[1] - self.cuts[0], capacity, self.head_dim

    def variables(self) -> Variables:
        found = self.query_key_value.variables("q", "k", "v") | self.out.variables("o")
        if self.sinks is not None:
            found[("sinks",)] = self.sinks
        norms = {"q_norm": self.query_norm, "k_norm": self.key_norm}
        return found | {(name,): norm.scale for name, norm in norms.items() if norm is not None}
