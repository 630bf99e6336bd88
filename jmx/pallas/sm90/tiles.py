"""How both Hopper layouts tile a weight: 64 rows a tile, gate and up rows paired within a thread."""

from typing import Any

import jax
import jax.numpy as jnp

from jmx.numerics.formats import WHOLE_ROW, BlockScaled, Format
from jmx.numerics.layouts import WeightSpec

TILE = 64  # rows and columns of a tile
GATED_ROWS = TILE // 2  # of gate, and as many of up
THREADS = 128
VALUE_COLUMNS = 256  # as a tile's values are shaped: no axis of a TMA box exceeds 256


def alike(gate_up: BlockScaled, down: BlockScaled, format: Format) -> tuple[BlockScaled, BlockScaled]:
    """Both weights with scales of one dtype, where these come by the tile: a launch of both has one stage for them."""
    if format.block_size == WHOLE_ROW or gate_up.scales.dtype == down.scales.dtype:
        return gate_up, down
    gate_up, down = (q._replace(scales=q.scales.astype(jnp.float32)) for q in (gate_up, down))
    return gate_up, down


def num_tiles(spec: WeightSpec) -> tuple[int, int]:
    """Tiles of a weight along its rows and its columns."""
    rows, columns = spec.shape
    halves = 2 if _gated(spec) else 1
    return halves * -(-rows // halves // TILE), -(-columns // TILE)


def _gated(spec: WeightSpec) -> bool:
    return spec.role == "gate_up" and spec.gate_up_order is not None


def pad(array: jax.Array, axis: int, size: int, fill: Any) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths, constant_values=fill)


def tile_rows(array: jax.Array, spec: WeightSpec, fill: Any) -> jax.Array:
    """(N, C) -> (row tiles, 4 warps, 2, 8, C): the rows that the threads of a warp hold."""
    tiles, _ = num_tiles(spec)
    if not _gated(spec):
        return pad(array, 0, tiles * TILE, fill).reshape(tiles, 4, 2, 8, -1)
    halves = (-1, 2) if spec.gate_up_order == "interleaved" else (2, -1)
    array = array.reshape(*halves, array.shape[-1])
    array = array if spec.gate_up_order == "interleaved" else array.swapaxes(0, 1)
    return pad(array, 0, tiles * GATED_ROWS, fill).reshape(tiles, 4, 8, 2, -1).swapaxes(2, 3)


def untile_rows(array: jax.Array, spec: WeightSpec) -> jax.Array:
    rows, tiles = spec.shape[0], array.shape[0]
    if not _gated(spec):
        return array.reshape(tiles * TILE, -1)[:rows]
    array = array.swapaxes(2, 3).reshape(tiles * GATED_ROWS, 2, -1)[: rows // 2]
    array = array if spec.gate_up_order == "interleaved" else array.swapaxes(0, 1)
    return array.reshape(rows, -1)
