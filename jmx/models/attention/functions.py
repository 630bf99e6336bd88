"""Grouped-query and latent attention as functions, with or without windows and sinks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jmx
from jmx.models.attention import prompt_gradients
from jmx.models.attention.choice import Case, reject_reason
from jmx.numerics.formats import precision
from jmx.pallas.attention import decode, latent_decode, prefill
from jmx.util.typing import Array

# Queries per block: float32 scores are (B, heads, QUERIES, keys), never (B, heads, T, keys).
QUERIES = 128

# A sink of heads without one: a logit whose share of a softmax is 0. It is finite, since kernels subtract it.
NO_SINK = -1e30


def attend(
    query: Array,
    keys: Array,
    values: Array,
    sinks: Array,
    starts: Array,
    window: int | None,
    scale: float | None = None,
) -> Array:
    """Causal attention of T consecutive tokens of each row over that row's cache.

    Args:
        query: (B, T, heads, D), rotated.
        keys, values: (B, kv_heads, C, D) and (B, kv_heads, C, V), position p at index p, the T tokens' own included.
        sinks: float32 (heads,): one more logit per head, which has a share of the softmax and no value; `NO_SINK` for
            heads without one.
        starts: int32 (B,), position of each row's first query.
        window: how many positions a query attends to, including its own; None for all.
        scale: multiplies the scores; None for D^-0.5.

    Returns:
        (B, T, heads, V) of query's dtype.
    """
    batch, length, heads, dim = query.shape
    factor = dim**-0.5 if scale is None else scale

    def attend_block(first: Array | int, count: int) -> Array:
        block = lax.dynamic_slice_in_dim(query, first, count, axis=1)
        return _attend_block(block, keys, values, sinks, starts + first, window, factor)

    if length <= QUERIES:
        return attend_block(0, length)
    rest = length % QUERIES
    out = lax.map(lambda index: attend_block(index * QUERIES, QUERIES), jnp.arange(length // QUERIES))
    out = out.swapaxes(0, 1).reshape(batch, length - rest, heads, -1)
    return jnp.concatenate([out, attend_block(length - rest, rest)], axis=1) if rest else out


def attend_prompt(
    query: Array,
    keys: Array,
    values: Array,
    sinks: Array | None,
    window: int | None,
    scale: float | None = None,
) -> Array:
    """`attend` of rows that start at position 0 over their own keys and values, by a kernel if `choice` allows it.

    query (B, T, heads, D), keys (B, T, kv_heads, D), values (B, T, kv_heads, V) -> (B, T, heads, V). `sinks` as in
    `attend`, or None for none.
    """
    batch, length, heads, dim = query.shape
    kv_heads, value_dim = values.shape[2:]
    case = Case("prompt", length, length, heads, kv_heads, dim, value_dim, query.dtype)
    sinks = no_sinks(heads) if sinks is None else sinks
    if reject_reason(case, jmx.Environment.probe(query)) is None:
        return flash_attention(query, keys, values, sinks, window, scale)
    starts = jnp.zeros(batch, jnp.int32)
    return attend(query, keys.swapaxes(1, 2), values.swapaxes(1, 2), sinks, starts, window, scale)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def flash_attention(
    query: Array, keys: Array, values: Array, sinks: Array, window: int | None, scale: float | None
) -> Array:
    """`prefill.flash_prefill`, with the gradients of `attend`. T is a multiple of `prefill.BLOCK`."""
    core_count = jmx.Environment.probe(query).core_count
    return prefill.flash_prefill(query, keys, values, sinks, window, scale, core_count)


def _flash_forward(
    query: Array, keys: Array, values: Array, sinks: Array, window: int | None, scale: float | None
) -> tuple[Array, Any]:
    out = flash_attention(query, keys, values, sinks, window, scale)
    return out, (query, keys, values, sinks, out)


def _flash_backward(window: int | None, scale: float | None, residuals: Any, dout: Array) -> tuple[Array, ...]:
    query, keys, values, sinks, out = residuals
    factor = query.shape[3] ** -0.5 if scale is None else scale
    return prompt_gradients.gradients(query, keys, values, sinks, out, dout, window=window, scale=factor)


flash_attention.defvjp(_flash_forward, _flash_backward)


def attend_cache(query: Array, cache: Array, sinks: Array | None, starts: Array, window: int | None) -> Array:
    """`attend` over a layer's cache (2, B, kv_heads, C, D), by a kernel if `choice` allows it."""
    (_, length, heads, dim), (kv_heads, capacity) = query.shape, cache.shape[2:4]
    case = Case("step", length, capacity, heads, kv_heads, dim, dim, query.dtype)
    sinks = no_sinks(heads) if sinks is None else sinks
    if reject_reason(case, jmx.Environment.probe(query)) is None:
        return decode.flash_decode(query[:, 0], cache, sinks, starts, window)[:, None]
    return attend(query, cache[0], cache[1], sinks, starts, window)


def attend_latents(query: Array, cache: Array, starts: Array, rank: int, scale: float) -> Array:
    """`attend` of all heads over one latent a position, by a kernel if `choice` allows it.

    query (B, T, heads, W), cache (1, B, 1, C, W), of which the first `rank` channels are the values -> (B, T, heads,
    rank).
    """
    (_, length, heads, width), capacity = query.shape, cache.shape[3]
    case = Case("latent_step", length, capacity, heads, 1, width, rank, query.dtype)
    environment = jmx.Environment.probe(query)
    if reject_reason(case, environment) is None:
        cores = environment.core_count
        assert cores is not None  # else it were rejected
        return latent_decode.flash_decode_latent(query[:, 0], cache[0, :, 0], starts, rank, scale, cores)[:, None]
    # The product with the other channels as a part of the value is not used. It is cheaper than a copy of the latents.
    return attend(query, cache[0], cache[0], no_sinks(heads), starts, None, scale)[..., :rank]


def no_sinks(heads: int) -> Array:
    """Sinks of heads without one."""
    return jnp.full(heads, NO_SINK, jnp.float32)


def _attend_block(
    query: Array, keys: Array, values: Array, sinks: Array, starts: Array, window: int | None, scale: float
) -> Array:
    batch, length, heads, dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    positions = starts[:, None] + jnp.arange(length)[None]
    first = jnp.zeros_like(starts)
    if window is not None and window + length - 1 < capacity:  # read only keys that some query attends to
        span = window + length - 1
        first = jnp.clip(starts - window + 1, 0, capacity - span)
        cut = jax.vmap(lambda array, first: lax.dynamic_slice_in_dim(array, first, span, axis=1))
        keys, values = cut(keys, first), cut(values, first)
    key_positions = first[:, None] + jnp.arange(keys.shape[2])[None]
    distance = positions[:, :, None] - key_positions[:, None]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)

    # The queries of all heads that share keys are the rows of one product.
    group = heads // kv_heads
    rows = query.reshape(batch, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * length, dim)
    product = partial(jnp.einsum, precision=precision(query.dtype), preferred_element_type=jnp.float32)
    scores = product("bkrd,bksd->bkrs", rows, keys).reshape(batch, kv_heads, group, length, -1)
    scores = jnp.where(seen[:, None, None], scores * scale, -jnp.inf)
    sinks = sinks.reshape(1, kv_heads, group, 1, 1)
    peak = jnp.maximum(scores.max(axis=-1, keepdims=True), sinks)
    powers = jnp.exp(scores - peak)
    total = powers.sum(axis=-1, keepdims=True) + jnp.exp(sinks - peak)
    weights = (powers / total).astype(values.dtype).reshape(batch, kv_heads, group * length, -1)
    out = product("bkrs,bksd->bkrd", weights, values).astype(query.dtype)
    out = out.reshape(batch, kv_heads, group, length, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, -1)
