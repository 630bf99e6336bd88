"""Attention over a cache in pages: by kernels that read them in place, or by plain code, which gathers them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jmx
from jmx.models.attention.choice import Case, reject_reason
from jmx.models.attention.functions import attend, no_sinks
from jmx.models.paged_cache import PagedLayer
from jmx.pallas.attention import decode, prefill


def attend_pages(query: jax.Array, layer: PagedLayer, sinks: jax.Array | None, window: int | None) -> jax.Array:
    """Causal attention of a step's tokens, each over the pages of its row or block, its own included.

    Args:
        query: (B + M * page, 1, heads, D), rotated, in the order of `PagedLayer`.
        layer: keys and values, those of the step's tokens included.
        sinks: float32 (heads,), or None; see `functions.attend`.
        window: how many positions a token attends to, its own included; None for all.

    Returns:
        (B + M * page, 1, heads, D) of query's dtype.
    """

    used = no_sinks(query.shape[2]) if sinks is None else sinks

    def of_groups(query: jax.Array, tables: jax.Array, positions: jax.Array) -> jax.Array:
        if _takes_kernel(query, layer, tables):
            if query.shape[1] == 1:
                return decode.flash_decode(query[:, 0], layer.pages, used, positions, window, tables)[:, None]
            return prefill.flash_prefill_pages(query, layer.pages, tables, positions, used, window)
        keys, values, starts = _gathered(layer.pages, tables, positions, query.shape[1], window)
        return attend(query, keys, values, used, starts, window)

    return _rows_and_blocks(query, layer, of_groups)


def _takes_kernel(query: jax.Array, layer: PagedLayer, tables: jax.Array) -> bool:
    """Whether a kernel of `jmx.pallas.attention` takes groups of one token, or of a page of them."""
    _, length, heads, dim = query.shape
    if layer.page != decode.PAGE or layer.pages.shape[-1] != dim:
        return False
    kind = "step" if length == 1 else "prompt"
    keys = layer.page * tables.shape[1] if length == 1 else length
    case = Case(kind, length, keys, heads, layer.pages.shape[2], dim, dim, query.dtype)
    return reject_reason(case, jmx.Environment.probe(query)) is None


def attend_latent_pages(query: jax.Array, layer: PagedLayer, rank: int, scale: float) -> jax.Array:
    """`attend_pages` of all heads over one latent a position, of which the first `rank` channels are the values.

    query (B + M * page, 1, heads, W), pages (1, pages, 1, page, W) -> (B + M * page, 1, heads, rank).
    """

    def of_groups(query: jax.Array, tables: jax.Array, positions: jax.Array) -> jax.Array:
        latents, _, starts = _gathered(layer.pages, tables, positions, query.shape[1], None)
        return attend(query, latents, latents, no_sinks(query.shape[2]), starts, None, scale)[..., :rank]

    return _rows_and_blocks(query, layer, of_groups)


def _rows_and_blocks(query: jax.Array, layer: PagedLayer, attend_groups: Callable[..., jax.Array]) -> jax.Array:
    """Attention of the rows, as groups of one token, then of the blocks, as groups of a page."""
    rows, places = layer.num_rows, layer.places
    out = []
    if rows:
        out.append(attend_groups(query[:rows], places.tables[:rows], places.positions[:rows]))
    if rows < len(places.positions):
        blocks = query[rows:].reshape(-1, layer.page, *query.shape[2:])
        attended = attend_groups(blocks, places.tables[rows:], places.positions[rows:])
        out.append(attended.reshape(-1, 1, *attended.shape[2:]))
    return jnp.concatenate(out)


def _gathered(
    pages: jax.Array, tables: jax.Array, positions: jax.Array, length: int, window: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The keys and values that groups of `length` tokens attend to, (groups, heads, C, W), and the index of their first
    token among these. The only part of a cache of latents is both."""
    page = pages.shape[3]
    first = jnp.zeros_like(positions)
    if window is not None:  # the pages that the first token's window begins in, up to the last token's
        span = min((window + length - 3) // page + 2, tables.shape[1])
        first = jnp.clip((positions - window + 1) // page, 0, tables.shape[1] - span)
        tables = jnp.take_along_axis(tables, first[:, None] + jnp.arange(span)[None], axis=1)
    found = pages[:, tables].swapaxes(2, 3)  # (parts, groups, heads, span, page, W)
    found = found.reshape(*found.shape[:3], -1, found.shape[-1])
    return found[0], found[-1], positions - first * page
