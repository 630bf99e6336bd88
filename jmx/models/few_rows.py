"""Products of few tokens by kernels that compute what surrounds them, too: the norm, the bias, a sum, the rotation."""

from typing import Any, Protocol

import jax

import jmx
from jmx.models.paged_cache import PagedLayer
from jmx.pallas.few_rows import choice
from jmx.pallas.few_rows import heads as heads_kernel
from jmx.pallas.few_rows import linear as linear_kernel


class Norm(Protocol):
    """What a kernel needs of a `layers.RMSNorm`."""

    scale: Any
    epsilon: float
    summed: tuple[str, ...]


def linear(
    x: jax.Array,
    weights: Any,
    bias: jax.Array | None,
    norm: Norm | None,
    *,
    residual: jax.Array | None = None,
    normed: bool = False,
) -> tuple[jax.Array, jax.Array | None] | None:
    """norm(x) W^T + b of all tokens in x (..., K), by a kernel; None: plain code is to compute it.

    Args:
        residual: (..., N), to which the sum is added, rounded to its dtype.
        normed: whether norm(x) is returned, too.

    Returns:
        (..., N), float32 or of the residual's dtype; and norm(x) or None.
    """
    if not takes(x, weights, norm):
        return None
    tokens = x.size // x.shape[-1]
    tile = choice.linear_tile(tokens, weights.shape)
    if tile is None:
        return None
    call = linear_kernel.Linear(tile, 0.0 if norm is None else norm.epsilon, normed)
    flat = None if residual is None else residual.reshape(tokens, -1)
    scale = None if norm is None else norm.scale[...]
    out, after = linear_kernel.linear(call, linear_kernel.Operands(x.reshape(tokens, -1), scale, weights, bias, flat))
    return out.reshape(*x.shape[:-1], -1), None if after is None else after.reshape(x.shape)


def heads(
    x: jax.Array,
    weights: Any,
    bias: jax.Array | None,
    norm: Norm,
    angles: tuple[jax.Array, jax.Array],
    starts: jax.Array | None,
    cache: Any,
) -> tuple[jax.Array, Any] | None:
    """Rotated queries (B, 1, heads, D) of one token a row, and the cache with its key and value, by a kernel.

    Args:
        x: (B, 1, H), the input of `norm`.
        weights, bias: of all heads by groups, see `attention.module`.
        angles: cosines and sines of the positions, (B or 1, 1, D / 2).
        starts: int32 (B,), the positions; None for prompts.
        cache: of `Attention.cache_shape`, or a layer in pages.

    Returns:
        None: plain code is to compute it.
    """
    batch, length, _ = x.shape
    paged = isinstance(cache, PagedLayer)
    held = cache.pages if paged else cache
    if starts is None or length != 1 or 2 * angles[0].shape[-1] != held.shape[-1]:
        return None
    if paged and cache.num_rows < len(cache.places.positions):  # blocks of a prompt, too
        return None
    if held.dtype != x.dtype or not takes(x, weights, norm):
        return None
    tile = choice.heads_tile(batch, held.shape[-1])
    if tile is None:
        return None
    numbers, places = cache.tokens() if paged else (None, starts)
    cos, sin = (angle[:, 0] for angle in angles)
    call = heads_kernel.Heads(tile, norm.epsilon)
    query, written = heads_kernel.heads(
        call, heads_kernel.Operands(x[:, 0], norm.scale[...], weights, bias, cos, sin, held, numbers, places)
    )
    return query[:, None], cache.with_pages(written) if paged else written


def takes(x: jax.Array, weights: Any, norm: Norm | None) -> bool:
    """Whether kernels multiply all tokens of x (..., K), or the input of `norm`, by weights."""
    if getattr(weights, "dtype", None) != x.dtype or (norm is not None and norm.summed):
        return False  # quantized weights, which have no dtype; or a norm of what other devices have parts of
    tokens = x.size // x.shape[-1]
    if not isinstance(tokens, int):  # symbolic
        return False
    return choice.reject_reason(tokens, x.dtype, weights.shape, jmx.Environment.probe(x)) is None
