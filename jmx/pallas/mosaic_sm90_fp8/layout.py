"""The layout `mosaic_sm90_fp8` for Hopper's 8-bit tensor cores: weights of 8 bits, and of 4 bits that become 8.

A weight (N, K) is divided into units of 64 rows by 128 columns: operand A of four `wgmma.m64nNk32`. Units that are
adjacent along the columns are stored one after the other.

    e4m3, int8  the rows unchanged, 128 bytes each. TMA swizzles them on the way to shared memory, where wgmma reads
                them.
    e2m1, int4  in register order. A thread (warp w, lane l) holds rows 16 * w + l // 4 and the one 8 below, and of
                each 32 columns 4 * (l % 4) + {0..3} and those 16 to the right. For each 32 columns it has a word of 8
                codes per row, which it reads by loads of 16 bytes; no data moves between threads. Signs are fourth
                bits: those of codes 0..3, the lower columns, are in nibbles 1, 3, 5, 7; those of codes 4..7 in nibbles
                0, 2, 4, 6. Three bits of a code are its magnitude: of int4 that of its one's complement if it is
                negative, so that it is -1 - magnitude.
          e2m1  has the magnitude of code n in nibble n. `prmt` looks it up in a table of eight bytes, and a sign is in
                position, or 4 bits away from it.
          int4  has those of codes 0..3 in nibbles 0, 2, 4, 6, and of 4..7 in nibbles 7, 1, 3, 5: rotated by 4 bits,
                codes 4..7 are where codes 0..3 were.

MXFP4's scales are folded into the elements. Let m be the largest scale code of a row, blocks of zeros excepted. A block
with code c holds elements times 2^(13 - (m - c)), as e5m2, and the row's results are multiplied by 2^(m - 127 - 13).
All e2m1 elements times 2^13 to 2^-13 are normal numbers of e5m2, so this is exact for codes down to m - 26. Smaller
ones become zeros: they are less than 2^-26 of the row's largest possible weight. `prepare` warns of them.

A unit's scales are the distances m - c, one byte for each row and 32 columns: for each four lanes those of their first
row, then of their second. After the last unit of a row of tiles there is one more chunk like these, with each row's m
four times.

Scales of 128 columns, or of a multiple of that, are one per row and unit, with those of rows r and r + 8 of each 16
side by side. After the last unit of a row of tiles there is one more chunk of 64: all 1 if, in each unit, rows 0 to 7
of each 16 share one scale and rows 8 to 15 share one, as in blocks of 128 rows; else all 0.

Gate and up alternate by 8 rows within a unit, as in the layout `mosaic_sm90`. Rows are padded to 64, columns to 128.
But if at most 64 of the last unit's columns are the weight's, only these 64 are stored (`ends_in_half`), so that the
others are not read from memory: TMA writes zeros in their place. Of 4-bit elements they are the second half of a unit.
Of 8-bit ones a half is 64 rows of 64 bytes, of which TMA makes what `wgmma` reads with a swizzle of 64 bytes. Its own
swizzle is of 128 bytes; that is the other one if, of each 16 rows, neighbors among the last 8 are swapped.
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
from jmx.pallas.mosaic_sm90_fp8.elements import E2M1_EXPONENT
from jmx.pallas.sm90.tiles import VALUE_COLUMNS, num_tiles, pad, tile_rows, untile_rows
from jmx.util.typing import Array, Bool, Int32, Shaped, UInt8, UInt32

UNIT_COLUMNS = 128
EXACT_BELOW = 27  # blocks whose code is less than this below the row's largest are exact
_SLICES = UNIT_COLUMNS // 32
_MAGNITUDES = np.uint8(0x77)  # bits of the magnitudes of two codes of e2m1
_NAN = 255
_SIGNS = 8 * np.arange(4) + np.array([[7], [3]])  # places of bits in a word: of the codes of lower and higher columns
_NIBBLES = 16 * np.arange(2)[:, None] + 4 * np.arange(4)  # of magnitudes of e2m1
_ROTATED = np.array([[0, 8, 16, 24], [28, 4, 12, 20]])  # of magnitudes of int4


def value_rows(format: formats.Format) -> int:
    """A unit's values are uint8 (value_rows, 256) of 4-bit elements, and (value_rows, 128) of 8-bit ones."""
    return 64 * UNIT_COLUMNS // 2 // VALUE_COLUMNS if format.element_bits == 4 else 64


def unit_bytes(format: formats.Format) -> int:
    """The largest size of a unit with its scales."""
    scales = 64 * (UNIT_COLUMNS // format.block_size if format == MXFP4 else format.block_size > 0 and 4)
    return 64 * UNIT_COLUMNS * format.element_bits // 8 + scales


def num_units(spec: WeightSpec) -> int:
    """Units along the columns."""
    return -(-spec.shape[1] // UNIT_COLUMNS)


def ends_in_half(spec: WeightSpec) -> bool:
    """Whether only 64 columns of the last unit are stored."""
    by_unit = spec.format.block_size >= UNIT_COLUMNS  # then kernels take whole units only
    return not by_unit and num_units(spec) > 1 and 0 < spec.shape[1] % UNIT_COLUMNS <= UNIT_COLUMNS // 2


def _without_rest(values: UInt8[Array, "tiles k_rows columns"], spec: WeightSpec) -> UInt8[Array, "tiles rows columns"]:
    """Values of whole units, without what the last one has after its half."""
    if not ends_in_half(spec):
        return values
    size = value_rows(spec.format)
    whole, last = values[:, :-size], values[:, -size:]
    if spec.format.element_bits == 4:
        return values[:, : -(size // 2)]
    half = _swapped(last[:, :, : UNIT_COLUMNS // 2])
    return jnp.concatenate([whole, half.reshape(len(values), size // 2, UNIT_COLUMNS)], axis=1)


def _with_rest(values: UInt8[Array, "*lead rows columns"], spec: WeightSpec) -> UInt8[Array, "*lead k_rows columns"]:
    """The inverse of `_without_rest`, with zeros for what it left out."""
    if not ends_in_half(spec):
        return values
    size = value_rows(spec.format)
    if spec.format.element_bits == 4:
        return pad(values, -2, num_units(spec) * size, 0)
    whole, half = values[..., : -(size // 2), :], values[..., -(size // 2) :, :]
    half = _swapped(half.reshape(*half.shape[:-2], size, UNIT_COLUMNS // 2))
    return jnp.concatenate([whole, pad(half, -1, UNIT_COLUMNS, 0)], axis=-2)


def _swapped(rows: UInt8[Array, "*lead 64 64"]) -> UInt8[Array, "*lead 64 64"]:
    """Rows, of each 16 of which neighbors among the last 8 are swapped."""
    return rows[..., np.arange(64) ^ (np.arange(64) >> 3 & 1), :]


def magnitudes() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The eight magnitudes in a row's largest block as bytes of e5m2, and what is subtracted from them for each step
    that a block's code is lower: one of the exponent. Both are uint32 (2,)."""
    elements = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    largest = (elements * 2.0**E2M1_EXPONENT).astype(ml_dtypes.float8_e5m2)
    steps = np.where(elements > 0, 1 << ml_dtypes.finfo(largest.dtype).nmant, 0).astype(np.uint8)
    return largest.view(np.uint32), steps.view(np.uint32)


def _places(spec: WeightSpec) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of the magnitudes and of the signs in a word: uint32 (2, 4), of the codes of lower and of higher columns."""
    return (_NIBBLES if spec.format == MXFP4 else _ROTATED).astype(np.uint32), _SIGNS.astype(np.uint32)


def _complemented(codes: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Two's complement to sign and one's complement, and back."""
    return jnp.where(codes >= 8, codes ^ 7, codes)


def _tile_values(values: UInt8[Array, "N packed"], spec: WeightSpec) -> UInt8[Array, "tiles k_rows columns"]:
    tiles, units = num_tiles(spec)[0], num_units(spec)
    if spec.format.element_bits == 4:
        values = jnp.stack([values & 15, values >> 4], axis=-1).reshape(values.shape[0], -1)
    rows = tile_rows(pad(values, 1, units * UNIT_COLUMNS, 0), spec, 0)
    if spec.format.element_bits == 8:
        rows = rows.reshape(tiles, 64, units, UNIT_COLUMNS).swapaxes(1, 2).reshape(tiles, -1, UNIT_COLUMNS)
        return _without_rest(rows, spec)
    rows = rows.reshape(tiles, 4, 2, 8, units, _SLICES, 2, 4, 4)  # tile, warp, r, row, unit, slice, half, lane % 4, 4
    rows = rows.transpose(0, 4, 5, 1, 3, 7, 2, 6, 8).astype(jnp.uint32)
    rows = rows if spec.format == MXFP4 else _complemented(rows)
    magnitudes, signs = (lax.broadcast_to_rank(places, rows.ndim) for places in _places(spec))
    bits = (rows & 7) << magnitudes | rows >> 3 << signs
    words = reduce(or_, (bits[..., half, n] for half in range(2) for n in range(4)))
    words = words.reshape(tiles, units, 2, 2, 128, 2).transpose(0, 1, 2, 4, 3, 5)  # two slices in each 16 bytes
    return _without_rest(lax.bitcast_convert_type(words, jnp.uint8).reshape(tiles, -1, VALUE_COLUMNS), spec)


def _untile_values(values: UInt8[Array, "tiles k_rows columns"], spec: WeightSpec) -> UInt8[Array, "N packed"]:
    tiles, units, values = num_tiles(spec)[0], num_units(spec), _with_rest(values, spec)
    if spec.format.element_bits == 8:
        rows = values.reshape(tiles, units, 64, UNIT_COLUMNS).swapaxes(1, 2)
        return untile_rows(rows.reshape(tiles, 4, 2, 8, -1), spec)[:, : spec.shape[1]]
    words = lax.bitcast_convert_type(values.reshape(tiles, units, 2, 128, 2, 2, 4), jnp.uint32)
    words = words.transpose(0, 1, 2, 4, 3, 5).reshape(tiles, units, _SLICES, 4, 8, 4, 2, 1, 1)
    magnitudes, signs = (lax.broadcast_to_rank(places, words.ndim) for places in _places(spec))
    rows = words >> magnitudes & 7 | (words >> signs & 1) << 3
    rows = rows if spec.format == MXFP4 else _complemented(rows)
    rows = rows.astype(jnp.uint8).transpose(0, 3, 6, 4, 1, 2, 7, 5, 8)
    rows = untile_rows(rows.reshape(tiles, 4, 2, 8, -1), spec)[:, : spec.shape[1]]
    return rows[:, ::2] | rows[:, 1::2] << 4


def _tile_blocks(array: Shaped[Array, "N b"], spec: WeightSpec, fill: Any) -> Shaped[Array, "tiles units chunk"]:
    tiles, units = num_tiles(spec)[0], num_units(spec)
    per_unit = max(1, UNIT_COLUMNS // spec.format.block_size)
    array = jnp.repeat(array, _units_of_block(spec), axis=1)[:, : units * per_unit]
    array = tile_rows(pad(array, 1, units * per_unit, fill), spec, fill).reshape(tiles, 4, 2, 8, units, per_unit)
    return array.transpose(0, 4, 1, 3, 2, 5).reshape(tiles, units, -1)


def _untile_blocks(array: Shaped[Array, "tiles units chunk"], spec: WeightSpec) -> Shaped[Array, "N b"]:
    tiles, units, _ = array.shape
    array = array.reshape(tiles, units, 4, 8, 2, -1).transpose(0, 2, 4, 3, 1, 5).reshape(tiles, 4, 2, 8, -1)
    blocks = untile_rows(array, spec)[:, :: _units_of_block(spec)]
    return blocks[:, : spec.format.num_blocks(spec.shape[1], "shape[-1]")]


def _units_of_block(spec: WeightSpec) -> int:
    return max(1, spec.format.block_size // UNIT_COLUMNS)


def _forward_one(q: BlockScaled, spec: WeightSpec, one: Any) -> BlockScaled:
    values = _tile_values(q.values, spec)
    if q.scales is None:
        return BlockScaled(values, None)
    if spec.format != MXFP4:
        scales = _tile_blocks(q.scales, spec, one)
        pairs = scales.reshape(len(scales), -1, 32, 2)
        shared = (pairs == pairs[:, :, :1]).all(axis=(1, 2, 3))[:, None, None]
        flags = jnp.where(shared, jnp.full_like(scales[:, :1], one), 0)
        return BlockScaled(values, jnp.concatenate([scales, flags], axis=1))
    largest = jnp.where(_nonzero(q), q.scales, 0).max(axis=1, keepdims=True)
    rows = _tile_blocks(jnp.broadcast_to(largest, (*largest.shape[:-1], _SLICES)), spec, 0)[:, :1]
    return BlockScaled(values, jnp.concatenate([_tile_blocks(largest - q.scales, spec, 0), rows], axis=1))


def _nonzero(q: BlockScaled) -> Bool[Array, "N b"]:
    """Whether a packed weight's blocks have an element that is not zero; otherwise their scales have no meaning."""
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
    """Applies `function` to the arrays that are stored by unit, one expert at a time, so that temporaries are small.

    Scales are passed as their bits. `rank`: the number of axes of one expert's values.
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


def _rounds(q: BlockScaled, spec: WeightSpec) -> Int32[Array, ""]:
    """The number of nonzero blocks of MXFP4 whose codes are too far below their row's largest, unless that is NaN."""
    if spec.format != MXFP4:
        return jnp.int32(0)
    distances = q.scales[..., :-1, :]
    lead = distances.shape[:-1]  # ..., row tiles, units
    codes = _with_rest(q.values, spec).reshape(*lead, 2, 32, 4, 2, 2, 4)
    used = (codes & _MAGNITUDES != 0).any(axis=(-4, -1))  # two slices, 32 pairs of rows, two slices, rows
    used = jnp.moveaxis(used, -4, -2).swapaxes(-3, -1)  # 32, rows, two slices, two slices
    far = distances.reshape(*lead, 32, 2, 2, 2) >= EXACT_BELOW
    largest = q.scales[..., -1:, :].reshape(*lead[:-1], 1, 32, 2, 2, 2)
    return (used & far & (largest != _NAN)).sum(dtype=jnp.int32)


_INTEGERS = ("int4_g128", "int4_channel", "int8_g128", "int8_channel")

LAYOUT = Layout(
    "mosaic_sm90_fp8",
    forward=_forward,
    inverse=_inverse,
    take=_take,
    formats=(MXFP4.name, *_INTEGERS, FP8_TENSOR.name, FP8_CHANNEL.name, FP8_BLOCK.name),
    rounds=_rounds,
)
