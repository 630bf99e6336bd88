"""The layout `mosaic_sm90_fp8`: e4m3 weights, and MXFP4 ones that become e5m2, as Hopper's FP8 tensor cores want them.

A weight (N, K) is cut into units of 64 rows by 128 columns: the A operand of four `wgmma.m64nNk32`. Units that follow
each other along the columns lie one behind the other.

    e4m3  the rows as they are, of 128 bytes. They go to shared memory, swizzled on the way, where wgmma reads them.
    e2m1  in the order in which registers want them. A thread (warp w, lane l) holds rows 16 * w + l // 4 and the one 8
          below, of each 32 columns 4 * (l % 4) + {0..3} and those 16 to the right. For each 32 columns it has a word of
          8 codes a row, and finds them by loads of 16 bytes, without anything moving between threads. Nibble n has code
          n's magnitude in its lower three bits. Signs are fourth bits: of codes 0..3, the lower columns, those of
          nibbles 1, 3, 5, 7; of codes 4..7 of 0, 2, 4, 6.

Then a magnitude is a byte that `prmt` looks up in a table of eight, and a sign a bit that is in place, or 4 beside it.

MXFP4's scales fold into the elements. Of a row with the largest scale code m, blocks of zeros apart, a block with code
c holds elements times 2^(13 - (m - c)), as e5m2, and the row's results are multiplied by 2^(m - 127 - 13). All e2m1
elements times 2^13 to 2^-13 are normal numbers of e5m2, so this is exact for codes down to m - 26. Smaller ones become
zeros: they are less than 2^-26 of the row's largest possible weight. `prepare` warns of them.

A unit's scales are the distances m - c, a byte for each row and 32 columns: for each four lanes those of their first
row, then of their second. Behind the last unit of a row of tiles comes one more chunk like theirs, with the rows' m,
four times each.

Scales of 128 columns are one a row, those of rows r and r + 8 of each 16 side by side. Behind the last unit of a row of
tiles comes one more chunk of 64: all 1 where, in each unit, those of rows 0 to 7 of each 16 are one number and those of
rows 8 to 15 are, as blocks of 128 rows have them; else 0.

Gate and up alternate by 8 rows within a unit, as in the layout `mosaic_sm90`. Rows are padded to 64, columns to 128.
"""

from collections.abc import Callable
from functools import partial, reduce
from math import prod
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jmx.numerics import formats, layouts
from jmx.numerics.formats import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, BlockScaled
from jmx.numerics.layouts import Index, Layout, WeightSpec
from jmx.pallas.sm90.tiles import VALUE_COLUMNS, num_tiles, pad, tile_rows, untile_rows

UNIT_COLUMNS = 128
RAISED = 13  # elements of a row's largest block are multiplied by two to this power
EXACT_BELOW = 27  # blocks whose code is less far below the row's largest lose nothing
_SLICES = UNIT_COLUMNS // 32
_MAGNITUDES = np.uint8(0x77)  # of two codes of e2m1
_NAN = 255


def value_rows(format: formats.Format) -> int:
    """A unit's values are uint8 (value_rows, 256) of MXFP4, (value_rows, 128) of e4m3."""
    return 64 * UNIT_COLUMNS // 2 // VALUE_COLUMNS if format == MXFP4 else 64


def unit_bytes(format: formats.Format) -> int:
    """Of a unit with its scales, at most."""
    scales = 64 * (UNIT_COLUMNS // format.block_size if format == MXFP4 else format.block_size > 0 and 4)
    return 64 * UNIT_COLUMNS * format.element_bits // 8 + scales


def num_units(spec: WeightSpec) -> int:
    """Units along the columns."""
    return -(-spec.shape[1] // UNIT_COLUMNS)


def magnitudes() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The eight magnitudes in a row's largest block as bytes of e5m2, and by how much they fall with each step that a
    block's code is below: by one of the exponent. Both uint32 (2,)."""
    elements = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    largest = (elements * 2.0**RAISED).astype(ml_dtypes.float8_e5m2)
    steps = np.where(elements > 0, 1 << ml_dtypes.finfo(largest.dtype).nmant, 0).astype(np.uint8)
    return largest.view(np.uint32), steps.view(np.uint32)


def _tile_values(values: jax.Array, spec: WeightSpec) -> jax.Array:
    tiles, units = num_tiles(spec)[0], num_units(spec)
    if spec.format.element_bits == 4:
        values = jnp.stack([values & 15, values >> 4], axis=-1).reshape(values.shape[0], -1)
    rows = tile_rows(pad(values, 1, units * UNIT_COLUMNS, 0), spec, 0)
    if spec.format.element_bits == 8:
        return rows.reshape(tiles, 64, units, UNIT_COLUMNS).swapaxes(1, 2).reshape(tiles, -1, UNIT_COLUMNS)
    rows = rows.reshape(tiles, 4, 2, 8, units, _SLICES, 2, 4, 4)  # tile, warp, r, row, unit, slice, half, lane % 4, 4
    rows = rows.transpose(0, 4, 5, 1, 3, 7, 2, 6, 8).astype(jnp.uint32)
    places = 16 * np.arange(2)[:, None] + 4 * np.arange(4)
    signs = 8 * np.arange(4) + np.array([[7], [3]])
    bits = (rows & 7) << places.astype(np.uint32) | rows >> 3 << signs.astype(np.uint32)
    words = reduce(or_, (bits[..., half, n] for half in range(2) for n in range(4)))
    words = words.reshape(tiles, units, 2, 2, 128, 2).transpose(0, 1, 2, 4, 3, 5)  # two slices in each 16 bytes
    return lax.bitcast_convert_type(words, jnp.uint8).reshape(tiles, -1, VALUE_COLUMNS)


def _untile_values(values: jax.Array, spec: WeightSpec) -> jax.Array:
    tiles, units = num_tiles(spec)[0], num_units(spec)
    if spec.format.element_bits == 8:
        rows = values.reshape(tiles, units, 64, UNIT_COLUMNS).swapaxes(1, 2)
        return untile_rows(rows.reshape(tiles, 4, 2, 8, -1), spec)[:, : spec.shape[1]]
    words = lax.bitcast_convert_type(values.reshape(tiles, units, 2, 128, 2, 2, 4), jnp.uint32)
    words = words.transpose(0, 1, 2, 4, 3, 5).reshape(tiles, units, _SLICES, 4, 8, 4, 2, 1, 1)
    places = 16 * np.arange(2)[:, None] + 4 * np.arange(4)
    signs = 8 * np.arange(4) + np.array([[7], [3]])
    rows = words >> places.astype(np.uint32) & 7 | (words >> signs.astype(np.uint32) & 1) << 3
    rows = rows.astype(jnp.uint8).transpose(0, 3, 6, 4, 1, 2, 7, 5, 8)
    rows = untile_rows(rows.reshape(tiles, 4, 2, 8, -1), spec)[:, : spec.shape[1]]
    return rows[:, ::2] | rows[:, 1::2] << 4


def _tile_blocks(array: jax.Array, spec: WeightSpec, fill: Any) -> jax.Array:
    tiles, units = num_tiles(spec)[0], num_units(spec)
    per_unit = max(1, UNIT_COLUMNS // spec.format.block_size)
    array = tile_rows(pad(array, 1, units * per_unit, fill), spec, fill).reshape(tiles, 4, 2, 8, units, per_unit)
    return array.transpose(0, 4, 1, 3, 2, 5).reshape(tiles, units, -1)


def _untile_blocks(array: jax.Array, spec: WeightSpec) -> jax.Array:
    tiles, units, _ = array.shape
    array = array.reshape(tiles, units, 4, 8, 2, -1).transpose(0, 2, 4, 3, 1, 5).reshape(tiles, 4, 2, 8, -1)
    return untile_rows(array, spec)[:, : spec.format.num_blocks(spec.shape[1], "shape[-1]")]


def _forward_one(q: BlockScaled, spec: WeightSpec, one: Any) -> BlockScaled:
    values = _tile_values(q.values, spec)
    if q.scales is None:
        return BlockScaled(values, None)
    if spec.format != MXFP4:
        scales = _tile_blocks(q.scales, spec, one)
        pairs = scales.reshape(len(scales), -1, 32, 2)
        shared = (pairs == pairs[:, :, :1]).all(axis=(1, 2, 3))[:, None, None]
        told = jnp.where(shared, jnp.full_like(scales[:, :1], one), 0)
        return BlockScaled(values, jnp.concatenate([scales, told], axis=1))
    largest = jnp.where(_counts(q), q.scales, 0).max(axis=1, keepdims=True)
    rows = _tile_blocks(jnp.broadcast_to(largest, (*largest.shape[:-1], _SLICES)), spec, 0)[:, :1]
    return BlockScaled(values, jnp.concatenate([_tile_blocks(largest - q.scales, spec, 0), rows], axis=1))


def _counts(q: BlockScaled) -> jax.Array:
    """Whether a packed weight's block is more than zeros: these often have some scale that says nothing."""
    return (q.values.reshape(*q.scales.shape, -1) & _MAGNITUDES != 0).any(axis=-1) | (q.scales == _NAN)


def _inverse_one(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    values = _untile_values(q.values, spec)
    if q.scales is None:
        return BlockScaled(values, None)
    if spec.format != MXFP4:
        return BlockScaled(values, _untile_blocks(q.scales[:, :-1], spec))
    largest = _untile_blocks(q.scales[:, -1:], spec)[:, :1]
    return BlockScaled(values, largest - _untile_blocks(q.scales[:, :-1], spec))


def _by_block(spec: WeightSpec) -> bool:
    return spec.format.block_size > 0


def _each(function: Callable[..., Any], q: BlockScaled, spec: WeightSpec, rank: int) -> BlockScaled:
    """`function` of what comes by the unit, one expert at a time, so that no more than one is held in between.

    Scales go as the bits that they are. `rank`: axes of one expert's values.
    """
    lead, blocks = q.values.shape[:-rank], _by_block(spec)
    by_unit = BlockScaled(q.values, q.scales if blocks else None)
    by_unit = jax.tree.map(lambda a: lax.bitcast_convert_type(a, np.dtype(f"u{a.dtype.itemsize}")), by_unit)
    flat = jax.tree.map(lambda array: array.reshape(prod(lead), *array.shape[len(lead) :]), by_unit)
    out = lax.map(partial(function, spec=spec), flat)
    out = jax.tree.map(lambda array: array.reshape(*lead, *array.shape[1:]), out)
    return out._replace(scales=lax.bitcast_convert_type(out.scales, q.scales.dtype) if blocks else q.scales)


def _forward(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    q = formats.pack(q)
    one = np.asarray(formats.one(spec.format, q.scales.dtype), q.scales.dtype)
    return _each(partial(_forward_one, one=one.view(f"u{one.itemsize}")), q, spec, 2)


def _inverse_packed(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    return _each(_inverse_one, q, spec, 3)


def _inverse(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    return formats.unpack(_inverse_packed(q, spec), spec.format)


def _take(q: BlockScaled, spec: WeightSpec, index: Index) -> BlockScaled:
    return _inverse_packed(layouts.gather(q, index), spec)


def _rounds(q: BlockScaled, spec: WeightSpec) -> jax.Array:
    """Blocks of MXFP4 that are not zero and whose codes are too far below their rows' largest, which are no NaN."""
    if spec.format != MXFP4:
        return jnp.int32(0)
    distances = q.scales[..., :-1, :]
    lead = distances.shape[:-1]  # ..., row tiles, units
    codes = q.values.reshape(*lead, 2, 32, 4, 2, 2, 4)
    used = (codes & _MAGNITUDES != 0).any(axis=(-4, -1))  # two slices, 32 pairs of rows, two slices, rows
    used = jnp.moveaxis(used, -4, -2).swapaxes(-3, -1)  # 32, rows, two slices, two slices
    far = distances.reshape(*lead, 32, 2, 2, 2) >= EXACT_BELOW
    largest = q.scales[..., -1:, :].reshape(*lead[:-1], 1, 32, 2, 2, 2)
    return (used & far & (largest != _NAN)).sum(dtype=jnp.int32)


LAYOUT = Layout(
    "mosaic_sm90_fp8",
    forward=_forward,
    inverse=_inverse,
    take=_take,
    formats=tuple(format.name for format in (MXFP4, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK)),
    rounds=_rounds,
)
