"""The layout `mosaic_sm90`: weights of 4 and 8 bits in the order in which Hopper's tensor cores want them in registers.

A weight (N, K) is cut into tiles of 64 rows by 64 columns: the A operand of four `wgmma.m64nNk16`, or in each of four
warps of four `mma.m16n8k16`, which want it alike. Each of the 128 threads of a warpgroup finds its share of a tile in
16 bytes, or, of 8-bit elements, in two pieces of 16, the second ones behind all the first ones: one load each, without
conflicts. It holds, of each slice of 16 columns, 8 elements (PTX ISA, "Register fragments for
wgmma.mma_async.m64nNk16"):

    rows     16 * warp + lane // 4 + {0, 8}
    columns  16 * slice + 2 * (lane % 4) + {0, 1} + {0, 8}

How these lie in its words is up to `elements`.

Where gate and up stand in one weight, a tile holds 32 of each, row `lane // 4` of a warp's 16 a gate and the row 8
below it the up that belongs to it: one thread has both, and the activation needs nobody else.

Scales of blocks along the columns come by the tile, too, those of a lane group of 4 together: of rows {0, 8} those of
the tile's blocks. A block of 128 columns has its scale in both its tiles. They keep their dtype and bits (e8m0 and e4m3
as bytes). Of MXFP4 one more chunk a row of tiles holds in every byte the *shift*, max(0, largest scale code - 128):
scales are lowered by it on the way to bfloat16, which could not hold them, and results are raised by it. Zero points
lie as scales do, in 16 bits: bfloat16 of what they are with the elements' offset, in units of 2^-133.

Scales of whole rows, and global ones, stay as they are: the epilogue multiplies by them. An order of columns stays as
it is, too: of "gate_up" rows are gathered by it, and for that of "down" the rows of "gate_up" lie in such an order that
what they give is in it.

Rows are padded to whole tiles and columns to 64 with zero values and scales of 1.0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.numerics import formats, layouts
from jmx.numerics.formats import FORMATS, MXFP4, WHOLE_ROW, BlockScaled, Format
from jmx.numerics.layouts import Index, Layout, WeightSpec
from jmx.pallas.mosaic_sm90.elements import PAIRS, Elements, elements_of
from jmx.pallas.sm90.tiles import THREADS, TILE, VALUE_COLUMNS, num_tiles, pad, tile_rows, untile_rows

_MAX_UNSHIFTED = 128  # the largest scale code of MXFP4 whose multiplier, 2^(code - 1), is a bfloat16
_WORDS = 4  # in one load


@dataclass(frozen=True)
class Tile:
    """What a tile of a format is made of.

    Args:
        elements: how values lie in words.
        scales: scales a row, 0 where a whole row has one.
        zero_points: zero points a row, 0 where there are none.
        scale_bytes: of one scale, at most.
    """

    elements: Elements
    scales: int
    zero_points: int
    scale_bytes: int

    @classmethod
    def of(cls, format: Format) -> "Tile":
        blocks = 1 if format.block_size == WHOLE_ROW else max(1, TILE // format.block_size)
        return cls(
            elements_of(format),
            0 if format.block_size == WHOLE_ROW else blocks,
            blocks if "zero_points" in format.arrays else 0,
            max(dtype.itemsize for dtype in format.scale_dtypes),
        )

    @property
    def value_rows(self) -> int:
        """A tile's values are uint8 (value_rows, 256)."""
        return TILE * TILE * self.elements.bits // 8 // VALUE_COLUMNS

    @property
    def bytes(self) -> int:
        """Of a tile with everything that comes by the tile, at most."""
        rest = self.scales * self.scale_bytes + self.zero_points * 2
        return self.value_rows * VALUE_COLUMNS + TILE * rest


def _tile_values(values: jax.Array, spec: WeightSpec) -> jax.Array:
    (tiles, columns), elements = num_tiles(spec), elements_of(spec.format)
    if elements.bits == 8:
        values = lax.bitcast_convert_type(values.reshape(values.shape[0], -1, 2), jnp.uint16)
    pairs = tile_rows(pad(values, 1, columns * TILE // 2, 0), spec, 0)
    pairs = pairs.reshape(tiles, 4, 2, 8, columns, 4, 2, 4)  # tile, warp, r, row, column, slice, h, lane % 4
    words = elements.spread(pairs.transpose(0, 4, 1, 3, 7, 5, 6, 2).reshape(tiles, columns, THREADS, PAIRS))
    words = words.reshape(tiles, columns, THREADS, -1, _WORDS).swapaxes(2, 3)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(tiles, -1, VALUE_COLUMNS)


def _untile_values(values: jax.Array, spec: WeightSpec) -> jax.Array:
    (tiles, columns), elements = num_tiles(spec), elements_of(spec.format)
    words = lax.bitcast_convert_type(values.reshape(tiles, columns, -1, THREADS, _WORDS, 4), jnp.uint32)
    pairs = elements.gather(words.swapaxes(2, 3).reshape(tiles, columns, THREADS, -1))
    pairs = pairs.reshape(tiles, columns, 4, 8, 4, 4, 2, 2).transpose(0, 2, 7, 3, 1, 5, 6, 4)
    pairs = untile_rows(pairs.reshape(tiles, 4, 2, 8, -1), spec)
    if elements.bits == 8:
        pairs = lax.bitcast_convert_type(pairs, jnp.uint8).reshape(spec.shape[0], -1)
    return pairs[:, : spec.shape[1] * elements.bits // 8]


def _tiles_of_block(spec: WeightSpec) -> int:
    size = spec.format.block_size
    return num_tiles(spec)[1] if size == WHOLE_ROW else max(1, size // TILE)


def _tile_blocks(array: jax.Array, spec: WeightSpec, per_tile: int, fill: Any) -> jax.Array:
    tiles, columns = num_tiles(spec)
    array = jnp.repeat(array, _tiles_of_block(spec), axis=1)[:, : columns * per_tile]
    array = tile_rows(pad(array, 1, columns * per_tile, fill), spec, fill)
    return array.reshape(tiles, 4, 2, 8, columns, -1).transpose(0, 4, 1, 3, 2, 5).reshape(tiles, columns, -1)


def _untile_blocks(array: jax.Array, spec: WeightSpec) -> jax.Array:
    tiles, columns, _ = array.shape
    array = array.reshape(tiles, columns, 4, 8, 2, -1).transpose(0, 2, 4, 3, 1, 5).reshape(tiles, 4, 2, 8, -1)
    array = untile_rows(array, spec)[:, :: _tiles_of_block(spec)]
    return array[:, : spec.format.num_blocks(spec.shape[1], "shape[-1]")]


def _as_bits(array: jax.Array) -> jax.Array:
    """As integers, which XLA moves bit for bit; of floats its CPU compiler may lose those that are subnormal."""
    return lax.bitcast_convert_type(array, np.dtype(f"u{array.dtype.itemsize}"))


def _with_shift(scales: jax.Array) -> jax.Array:
    """One more chunk for a row of tiles."""
    shift = jnp.maximum(scales.max(axis=(1, 2)), _MAX_UNSHIFTED) - _MAX_UNSHIFTED
    return jnp.concatenate([scales, jnp.broadcast_to(shift[:, None, None], scales[:, :1].shape)], axis=1)


def _biased(zero_points: jax.Array, offset: int) -> jax.Array:
    """Bits of bfloat16 of (zero point + offset) * 2^-133, whose magnitude is at most 256."""
    biased = zero_points.astype(jnp.int32) + offset
    return jnp.where(biased < 0, 0x8000 - biased, biased).astype(jnp.uint16)


def _unbiased(bits: jax.Array, offset: int) -> jax.Array:
    biased = bits.astype(jnp.int32)
    return (jnp.where(biased < 0x8000, biased, 0x8000 - biased) - offset).astype(jnp.int8)


def _forward_one(expert: tuple[BlockScaled, jax.Array | None], spec: WeightSpec, one: np.ndarray) -> BlockScaled:
    (q, rows), tile = expert, Tile.of(spec.format)
    if rows is not None:
        q = jax.tree.map(lambda array: array.at[rows].get(mode="promise_in_bounds"), q)
    scales = zero_points = None
    if q.scales is not None:
        scales = _tile_blocks(q.scales, spec, tile.scales, one)
        scales = _with_shift(scales) if spec.format == MXFP4 else scales
    if q.zero_points is not None:
        zero_points = _biased(_tile_blocks(q.zero_points, spec, tile.zero_points, 0), tile.elements.offset)
    return BlockScaled(_tile_values(q.values, spec), scales, zero_points=zero_points)


def _inverse_one(expert: tuple[BlockScaled, jax.Array | None], spec: WeightSpec) -> BlockScaled:
    q, rows = expert
    scales = zero_points = None
    if q.scales is not None:
        scales = _untile_blocks(q.scales[:, :-1] if spec.format == MXFP4 else q.scales, spec)
    if q.zero_points is not None:
        zero_points = _unbiased(_untile_blocks(q.zero_points, spec), elements_of(spec.format).offset)
    q = BlockScaled(_untile_values(q.values, spec), scales, zero_points=zero_points)
    if rows is None:
        return q
    places = jnp.argsort(rows)
    return jax.tree.map(lambda array: array.at[places].get(mode="promise_in_bounds"), q)


def _each(
    function: Callable[..., Any], q: BlockScaled, rows: jax.Array | None, spec: WeightSpec, rank: int
) -> BlockScaled:
    """`function` of what comes by the tile, one expert at a time, so that no more than one is held in between.

    `rank`: axes of one expert's values.
    """
    lead = q.values.shape[:-rank]
    of_blocks = Tile.of(spec.format).scales > 0
    by_tile = BlockScaled(q.values, _as_bits(q.scales) if of_blocks else None, zero_points=q.zero_points)
    flat = jax.tree.map(lambda array: array.reshape(prod(lead), *array.shape[len(lead) :]), (by_tile, rows))
    out = lax.map(partial(function, spec=spec), flat)
    out = jax.tree.map(lambda array: array.reshape(*lead, *array.shape[1:]), out)
    scales = lax.bitcast_convert_type(out.scales, q.scales.dtype) if of_blocks else q.scales
    return out._replace(scales=scales, global_scales=q.global_scales, order=q.order)


def _forward(q: BlockScaled, spec: WeightSpec, rows: jax.Array | None = None) -> BlockScaled:
    q = formats.pack(q)
    one = np.asarray(formats.one(spec.format, q.scales.dtype), q.scales.dtype)
    return _each(partial(_forward_one, one=one.view(f"u{one.itemsize}")), q, rows, spec, 2)


def _inverse_packed(q: BlockScaled, spec: WeightSpec, rows: jax.Array | None) -> BlockScaled:
    return _each(_inverse_one, q, rows, spec, 3)


def _inverse(q: BlockScaled, spec: WeightSpec, rows: jax.Array | None = None) -> BlockScaled:
    return formats.unpack(_inverse_packed(q, spec, rows), spec.format)


def _take(q: BlockScaled, spec: WeightSpec, index: Index, rows: jax.Array | None = None) -> BlockScaled:
    return _inverse_packed(layouts.gather(q, index), spec, rows)


LAYOUT = Layout("mosaic_sm90", forward=_forward, inverse=_inverse, take=_take, formats=tuple(FORMATS), orders_rows=True)
