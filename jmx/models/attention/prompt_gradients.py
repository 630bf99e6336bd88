"""Gradients of causal attention over a whole prompt, one square of queries and keys at a time.

Scores are computed again: once for the sums of each softmax, and once for the gradients (FlashAttention 2, Dao, 2023).
Squares above the diagonal and outside the window are left out. Those of all heads of a row are computed in one step, of
which the scores are float32. Plain jnp: no kernel for this has been written yet.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.numerics.formats import precision
from jmx.util.typing import Array, Float, Float32, Int32

SQUARES = (1024, 512, 256, 128)  # queries, and keys, of a square: the first that divides the prompt
OF_WINDOWS = (256, 128)  # likewise, where a window leaves most squares empty


class Row(NamedTuple):
    """One row of a batch, by heads that share keys and values: K kv_heads, G queries' heads for each.

    Args:
        query, keys, values: (K, G, T, D), (K, T, D) and (K, T, V).
        out, dout: the result and its cotangent, (K, G, T, V).
    """

    query: Float[Array, "K G T D"]
    keys: Float[Array, "K T D"]
    values: Float[Array, "K T V"]
    out: Float[Array, "K G T V"]
    dout: Float[Array, "K G T V"]


def gradients(
    query: Float[Array, "B T heads D"],
    keys: Float[Array, "B T kv_heads D"],
    values: Float[Array, "B T kv_heads V"],
    sinks: Float32[Array, " heads"],
    out: Float[Array, "B T heads V"],
    dout: Float[Array, "B T heads V"],
    *,
    window: int | None,
    scale: float,
) -> tuple[Float[Array, "..."], ...]:
    """Cotangents of query, keys, values and sinks, in their dtypes; arguments as of `functions.attend_prompt`.

    T is a multiple of 128. Sums over squares are float32.
    """
    kv_heads = keys.shape[2]

    def by_heads(array: Float[Array, "B T heads W"]) -> Float[Array, "B K G T W"]:
        return array.reshape(*array.shape[:2], kv_heads, -1, array.shape[-1]).transpose(0, 2, 3, 1, 4)

    rows = Row(by_heads(query), keys.swapaxes(1, 2), values.swapaxes(1, 2), by_heads(out), by_heads(dout))
    of_row = partial(_of_row, sinks.reshape(kv_heads, -1), window, scale)
    dquery, dkeys, dvalues, dsinks = lax.map(of_row, rows)
    dquery = dquery.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)
    of_keys = dkeys.swapaxes(1, 2).astype(keys.dtype), dvalues.swapaxes(1, 2).astype(values.dtype)
    return dquery, *of_keys, dsinks.sum(0).reshape(sinks.shape).astype(sinks.dtype)


def squares(length: int, window: int | None) -> tuple[int, Int32[np.ndarray, "n 2"]]:
    """The size of squares, and the blocks of queries and of keys of those with a key that some query sees."""
    size = next(size for size in (SQUARES if window is None else OF_WINDOWS) if length % size == 0)
    blocks = range(length // size)
    found = [(i, j) for i in blocks for j in blocks[: i + 1] if window is None or (i - j - 1) * size + 1 < window]
    return size, np.array(found, np.int32)


def _of_row(
    sinks: Float32[Array, "K G"], window: int | None, scale: float, row: Row
) -> tuple[Float32[Array, "..."], ...]:
    """Cotangents of one row, float32: (K, G, T, D), (K, T, D), (K, T, V) and (K, G)."""
    size, found = squares(row.query.shape[2], window)
    pairs = jnp.asarray(found)
    product = partial(jnp.einsum, precision=precision(row.query.dtype), preferred_element_type=jnp.float32)

    def block(array: Float[Array, "..."], number: Int32[Array, ""], axis: int = -2) -> Float[Array, "..."]:
        return lax.dynamic_slice_in_dim(array, number * size, size, axis)

    def updated(array: Any, new: Any, number: Int32[Array, ""], axis: int = -2) -> Any:
        return lax.dynamic_update_slice_in_dim(array, new, number * size, axis + array.ndim)

    def scores(i: Int32[Array, ""], j: Int32[Array, ""]) -> Float32[Array, "K G S S"]:
        found = product("kgtd,ksd->kgts", block(row.query, i), block(row.keys, j)) * scale
        distance = (i - j) * size + jnp.arange(size)[:, None] - jnp.arange(size)[None]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return jnp.where(seen[None, None], found, -jnp.inf)

    def summed(sums: Any, pair: Int32[Array, "2"]) -> tuple[Any, None]:
        """The largest score of each query so far, and the sum of powers below it; the sink is the first of both."""
        i, j = pair
        peak, total = (block(its, i, -1) for its in sums)
        found = scores(i, j)
        new = jnp.maximum(peak, found.max(-1))
        total = total * jnp.exp(peak - new) + jnp.exp(found - new[..., None]).sum(-1)
        return tuple(updated(its, mine, i, -1) for its, mine in zip(sums, (new, total), strict=True)), None

    peaks = jnp.broadcast_to(sinks[..., None], row.query.shape[:3])
    (peaks, totals), _ = lax.scan(summed, (peaks, jnp.ones_like(peaks)), pairs)
    logsumexp = peaks + jnp.log(totals)
    inner = (row.out.astype(jnp.float32) * row.dout.astype(jnp.float32)).sum(-1)

    def added(sums: Any, pair: Int32[Array, "2"]) -> tuple[Any, None]:
        i, j = pair
        dquery, dkeys, dvalues = sums
        query, dout, keys = block(row.query, i), block(row.dout, i), block(row.keys, j)
        powers = jnp.exp(scores(i, j) - block(logsumexp, i, -1)[..., None])
        dpowers = product("kgtv,ksv->kgts", dout, block(row.values, j))
        dscores = (powers * (dpowers - block(inner, i, -1)[..., None]) * scale).astype(query.dtype)
        dquery = updated(dquery, block(dquery, i) + product("kgts,ksd->kgtd", dscores, keys), i)
        dkeys = updated(dkeys, block(dkeys, j) + product("kgts,kgtd->ksd", dscores, query), j)
        more = product("kgts,kgtv->ksv", powers.astype(dout.dtype), dout)
        return (dquery, dkeys, updated(dvalues, block(dvalues, j) + more, j)), None

    zeros = tuple(jnp.zeros(its.shape, jnp.float32) for its in (row.query, row.keys, row.values))
    (dquery, dkeys, dvalues), _ = lax.scan(added, zeros, pairs)
    return dquery, dkeys, dvalues, -(jnp.exp(sinks[..., None] - logsumexp) * inner).sum(-1)
