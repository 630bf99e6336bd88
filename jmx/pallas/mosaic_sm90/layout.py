"""The layout `mosaic_sm90`: weights of 4 and 8 bits in the order in which Hopper's tensor cores read registers.

A weight (N, K) is divided into tiles of 64 rows by 64 columns: operand A of four `wgmma.m64nNk16`, or in each of four
warps of four `mma.m16n8k16`, which have the same order. Each of the 128 threads of a warpgroup has its share of a tile
in 16 consecutive bytes; of 8-bit elements in two times 16, the second ones after all threads' first ones. Each is one
load, without bank conflicts. Of each slice of 16 columns a thread holds 8 elements (PTX ISA, "Register fragments for
wgmma.mma_async.m64nNk16"):

    rows     16 * warp + lane // 4 + {0, 8}
    columns  16 * slice + 2 * (lane % 4) + {0, 1} + {0, 8}

`elements` defines the order of these within words.

In a weight with gate and up a tile holds 32 rows of each. Row `lane // 4` of a warp's 16 rows is a gate, and the row 8
below it is its up, so one thread holds both for the activation.

Block scales are stored by tile, too, those of a group of 4 lanes together: for rows {0, 8} those of the tile's blocks.
A block of 128 columns has its scale in both of its tiles. Scales keep their dtype and bits (e8m0 and e4m3 as bytes).
For MXFP4 and MXFP8 each row of tiles has one more chunk, with the *shift* in every byte: what the largest scale code is
above 128 (MXFP4) or 134 (MXFP8), else 0. Scale codes are lowered by it, since bfloat16 could not hold their
multipliers, and the epilogue rescales results by it. Zero points are stored like scales, in 16 bits: the bfloat16 of
zero point plus the elements' offset, in units of 2^-133.

Scales of whole rows, and global scales, are unchanged: the epilogue multiplies by them. A column order is unchanged,
too: rows of x are gathered by that of "gate_up", and the rows of "gate_up" are stored such that h has that of "down".

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
from jmx.numerics.formats import MXFP4, MXFP8, NVFP4, WHOLE_ROW, BlockScaled, Format
from jmx.numerics.layouts import Index, Layout, WeightSpec
from jmx.pallas.mosaic_sm90.elements import PAIRS, Elements, elements_of
from jmx.pallas.sm90.tiles import THREADS, TILE, VALUE_COLUMNS, num_tiles, pad, tile_rows, untile_rows
from jmx.util.typing import Array, Int8, Int32, Shaped, UInt8, UInt16

Rows = Int32[Array, "*lead N"] | None  # the order of the rows of "gate_up", from `Layout.rows`
_MAX_EXPONENT = 254  # of bfloat16, as a code
_WORDS = 4  # of 32 bits in one load


@dataclass(frozen=True)
class Tile:
    """The parts of a tile of a format.

    Args:
        elements: the order of values within words.
        scales: scales per row; 0 for scales of whole rows.
        zero_points: zero points per row; 0 without zero points.
        scale_bytes: the largest size of a scale.
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


def is_shifted(format: Format) -> bool:
    """Whether rows of tiles have a shift: their scales are powers of two, e8m0."""
    return format in (MXFP4, MXFP8)


def _tile_values(values: UInt8[Array, "N packed"], spec: WeightSpec) -> UInt8[Array, "tiles k_rows 256"]:
    (tiles, columns), elements = num_tiles(spec), elements_of(spec.format)
    if elements.bits == 8:
        values = lax.bitcast_convert_type(values.reshape(values.shape[0], -1, 2), jnp.uint16)
    pairs = tile_rows(pad(values, 1, columns * TILE // 2, 0), spec, 0)
    pairs = pairs.reshape(tiles, 4, 2, 8, columns, 4, 2, 4)  # tile, warp, r, row, column, slice, h, lane % 4
    words = elements.spread(pairs.transpose(0, 4, 1, 3, 7, 5, 6, 2).reshape(tiles, columns, THREADS, PAIRS))
    words = words.reshape(tiles, columns, THREADS, -1, _WORDS).swapaxes(2, 3)
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(tiles, -1, VALUE_COLUMNS)


def _untile_values(values: UInt8[Array, "tiles k_rows 256"], spec: WeightSpec) -> UInt8[Array, "N packed"]:
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


def _tile_blocks(
    array: Shaped[Array, "N b"], spec: WeightSpec, per_tile: int, fill: Any
) -> Shaped[Array, "tiles k_tiles chunk"]:
    tiles, columns = num_tiles(spec)
    array = jnp.repeat(array, _tiles_of_block(spec), axis=1)[:, : columns * per_tile]
    array = tile_rows(pad(array, 1, columns * per_tile, fill), spec, fill)
    return array.reshape(tiles, 4, 2, 8, columns, -1).transpose(0, 4, 1, 3, 2, 5).reshape(tiles, columns, -1)


def _untile_blocks(array: Shaped[Array, "tiles k_tiles chunk"], spec: WeightSpec) -> Shaped[Array, "N b"]:
    tiles, columns, _ = array.shape
    array = array.reshape(tiles, columns, 4, 8, 2, -1).transpose(0, 2, 4, 3, 1, 5).reshape(tiles, 4, 2, 8, -1)
    array = untile_rows(array, spec)[:, :: _tiles_of_block(spec)]
    return array[:, : spec.format.num_blocks(spec.shape[1], "shape[-1]")]


def _as_bits(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The bits as integers, which XLA copies exactly; as floats its CPU compiler may flush subnormal ones to zero."""
    return lax.bitcast_convert_type(array, np.dtype(f"u{array.dtype.itemsize}"))


def _with_shift(scales: UInt8[Array, "tiles chunks chunk"], elements: Elements) -> UInt8[Array, "tiles chunks_1 chunk"]:
    """Appends the chunk with the shift to each row of tiles. A code's multiplier has the exponent code + unit."""
    unshifted = _MAX_EXPONENT - elements.unit
    shift = jnp.maximum(scales.max(axis=(1, 2)), unshifted) - unshifted
    return jnp.concatenate([scales, jnp.broadcast_to(shift[:, None, None], scales[:, :1].shape)], axis=1)


def _biased(zero_points: Shaped[Array, "..."], offset: int) -> UInt16[Array, "..."]:
    """Bits of bfloat16 of (zero point + offset) * 2^-133, whose magnitude is at most 256."""
    biased = zero_points.astype(jnp.int32) + offset
    return jnp.where(biased < 0, 0x8000 - biased, biased).astype(jnp.uint16)


def _unbiased(bits: UInt16[Array, "..."], offset: int) -> Int8[Array, "..."]:
    """The inverse of `_biased`."""
    biased = bits.astype(jnp.int32)
    return (jnp.where(biased < 0x8000, biased, 0x8000 - biased) - offset).astype(jnp.int8)


def _forward_one(expert: tuple[BlockScaled, Array | None], spec: WeightSpec, one: np.ndarray) -> BlockScaled:
    (q, rows), tile = expert, Tile.of(spec.format)
    if rows is not None:
        q = jax.tree.map(lambda array: array.at[rows].get(mode="promise_in_bounds"), q)
    scales = zero_points = None
    if q.scales is not None:
        scales = _tile_blocks(q.scales, spec, tile.scales, one)
        scales = _with_shift(scales, tile.elements) if is_shifted(spec.format) else scales
    if q.zero_points is not None:
        zero_points = _biased(_tile_blocks(q.zero_points, spec, tile.zero_points, 0), tile.elements.offset)
    return BlockScaled(_tile_values(q.values, spec), scales, zero_points=zero_points)


def _inverse_one(expert: tuple[BlockScaled, Array | None], spec: WeightSpec) -> BlockScaled:
    q, rows = expert
    scales = zero_points = None
    if q.scales is not None:
        scales = _untile_blocks(q.scales[:, :-1] if is_shifted(spec.format) else q.scales, spec)
    if q.zero_points is not None:
        zero_points = _unbiased(_untile_blocks(q.zero_points, spec), elements_of(spec.format).offset)
    q = BlockScaled(_untile_values(q.values, spec), scales, zero_points=zero_points)
    if rows is None:
        return q
    places = jnp.argsort(rows)
    return jax.tree.map(lambda array: array.at[places].get(mode="promise_in_bounds"), q)


def _each(function: Callable[..., Any], q: BlockScaled, rows: Rows, spec: WeightSpec, rank: int) -> BlockScaled:
    """Applies `function` to the arrays that are stored by tile, one expert at a time, so that temporaries are small.

    `rank`: the number of axes of one expert's values.
    """
    lead = q.values.shape[:-rank]
    of_blocks = Tile.of(spec.format).scales > 0
    by_tile = BlockScaled(q.values, _as_bits(q.scales) if of_blocks else None, zero_points=q.zero_points)
    flat = jax.tree.map(lambda array: array.reshape(prod(lead), *array.shape[len(lead) :]), (by_tile, rows))
    out = lax.map(partial(function, spec=spec), flat)
    out = jax.tree.map(lambda array: array.reshape(*lead, *array.shape[1:]), out)
    scales = lax.bitcast_convert_type(out.scales, q.scales.dtype) if of_blocks else q.scales
    return out._replace(scales=scales, global_scales=q.global_scales, order=q.order)


def _forward(q: BlockScaled, spec: WeightSpec, rows: Rows = None) -> BlockScaled:
    q = formats.pack(q)
    one = np.asarray(formats.one(spec.format, q.scales.dtype), q.scales.dtype)
    return _each(partial(_forward_one, one=one.view(f"u{one.itemsize}")), q, rows, spec, 2)


def _inverse_packed(q: BlockScaled, spec: WeightSpec, rows: Rows) -> BlockScaled:
    return _each(_inverse_one, q, rows, spec, 3)


def _inverse(q: BlockScaled, spec: WeightSpec, rows: Rows = None) -> BlockScaled:
    return formats.unpack(_inverse_packed(q, spec, rows), spec.format)


def _take(q: BlockScaled, spec: WeightSpec, index: Index, rows: Rows = None) -> BlockScaled:
    return _inverse_packed(layouts.gather(q, index), spec, rows)


# `dequantize` handles the scales of MXFP4 and MXFP8, and those of NVFP4, each in its own way.
LAYOUT = Layout(
    "mosaic_sm90",
    forward=_forward,
    inverse=_inverse,
    take=_take,
    formats=(MXFP4.name, NVFP4.name, MXFP8.name, *formats.with_float_scales(jnp.int4, jnp.int8, jnp.float8_e4m3fn)),
    orders_rows=True,
)
