"""A layer of few tokens up to its router by four overlapping kernels, for modules of `jmx.models`, where possible."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jmx
from jmx.ffi.one_token.library import library
from jmx.models.attention.module import Attention
from jmx.models.layers import Linear, RMSNorm
from jmx.models.one_token import call
from jmx.models.paged_cache import PagedLayer


class Routed(NamedTuple):
    """A router's logits, float32 (..., E), and the normed tokens (..., H) that they are of."""

    logits: jax.Array
    normed: jax.Array


def attend_and_route(
    x: jax.Array,
    norm: RMSNorm,
    attention: Any,
    router_norm: RMSNorm,
    router: Linear,
    starts: jax.Array | None,
    angles: tuple[jax.Array, jax.Array],
    cache: Any,
) -> tuple[jax.Array, Any, Routed] | None:
    """The residual stream with attention's result, the cache with the token, and the router's results.

    Args:
        x: (T, 1, H), the input of `norm`. The rest as `SelfAttention.__call__` has it.

    Returns:
        None: other code is to compute it.
    """
    if starts is None or not isinstance(attention, Attention) or x.shape[1] != 1:
        return None
    if attention.norms is not None or attention.clip is not None:
        return None
    linears, norms = (attention.grouped, attention.out, router), (norm, router_norm)
    if any(its.summed for its in (*linears, *norms)) or not all(its.local for its in linears):
        return None
    paged = isinstance(cache, PagedLayer)
    if paged and len(cache.places.positions) > cache.num_rows:  # blocks of a prompt, too
        return None
    weights = [its.weights.get_value() for its in linears]
    biases = [None if its.bias is None else its.bias[...] for its in linears]
    given = call.Operands(
        x=x[:, 0],
        scale=norm.scale[...],
        heads=weights[0],
        heads_bias=biases[0],
        cos=jnp.broadcast_to(angles[0][:, 0], (x.shape[0], angles[0].shape[-1])),
        sin=jnp.broadcast_to(angles[1][:, 0], (x.shape[0], angles[1].shape[-1])),
        cache=cache.pages if paged else cache,
        tables=cache.places.tables if paged else None,
        position=cache.places.positions if paged else starts,
        sinks=None if attention.sinks is None else attention.sinks[...],
        out=weights[1],
        out_bias=biases[1],
        router_scale=router_norm.scale[...],
        router=weights[2],
        router_bias=biases[2],
    )
    if call.reject_reason(given, jmx.Environment.probe(x)) is not None or library().fault is not None:
        return None
    found = call.run(attention.window, norm.epsilon, router_norm.epsilon, given)
    after = cache.with_pages(found.cache) if paged else found.cache
    return found.x[:, None], after, Routed(found.logits[:, None], found.normed[:, None])
