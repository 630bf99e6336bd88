"""The layout `mosaic_sm90`: MXFP4 weights in the order in which Hopper's tensor cores want them in registers.

A weight (N, K) is cut into tiles of 64 rows by 64 columns: the A operand of four `wgmma.m64nNk16`, or in each of four
warps of four `mma.m16n8k16`, which want it alike. One tile's values
are 2048 bytes, 16 for each of the 128 threads of a warpgroup, so that a thread fetches its share in one load. A thread
holds, of each slice of 16 columns, 8 codes (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"):

    rows     16 * warp + lane // 4 + {0, 8}
    columns  16 * slice + 2 * (lane % 4) + {0, 1} + {0, 8}

Two codes of neighbouring columns are a *pair*, which becomes one register of two bfloat16: the even column in the low
half word, the odd one in the high half word. There a magnitude's bits belong at 8:6 and a sign at 15, where they are a
bfloat16 of 2^-126 times the element. Two words hold the 8 pairs of two slices, so that a rotation and a mask bring each
pair's bits in place (`_ROTATIONS`). Rotated by even numbers, the mask's bits cover 64 bits exactly, but not any 32 of
them: half of the pairs have their even bits in one word and their odd bits in the other, and one select for two such
pairs puts a word of theirs together. It is five sixths of the work of four pairs in each word, which leaves two of
them with a sign and a magnitude apart, and less than two thirds of that of codes in checkpoint order.

Where gate and up stand in one weight, a tile holds 32 of each, row `lane // 4` of a warp's 16 a gate and the row 8
below it the up that belongs to it: one thread has both, and the activation needs nobody else.

Scales keep their e8m0 codes: 128 bytes a tile, 4 for each lane group of 4: rows {0, 8}, then columns {0..31, 32..63}.
One more chunk of 128 bytes a row of tiles holds in every byte the *shift*, max(0, largest scale - 128): scales are
lowered by it on the way to bfloat16, which could not hold them, and results are raised by it.

Rows are padded to whole tiles and columns to 64 with zero values and scales of 1.0.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx import formats, layouts
from jmx.formats import BlockScaled
from jmx.layouts import Index, Layout, WeightSpec

TILE = 64  # rows and columns of a tile
GATED_ROWS = TILE // 2  # of gate, and as many of up
VALUE_BYTES = TILE * TILE // 2
SCALE_BYTES = 128
VALUE_SHAPE = (VALUE_BYTES // 256, 256)  # as a tile's values are shaped: no axis of a TMA box exceeds 256

PLACE = np.uint32(0x81C081C0)  # bits of two bfloat16 that hold signs and magnitudes
EVEN = np.uint32(0x55555555)  # bits of a mixed word that come from the first of two words
# By how much a pair's word is rotated to the left, where pair 4 * s + 2 * h + r holds columns + 16 * s + 8 * h and rows
# + 8 * r. Pairs 0 and 1 are in the first word, 2 and 3 in the second, and so on in the two mixed words.
ROTATIONS = (6, 2, 4, 0, 14, 10, 12, 8)
_MAX_UNSHIFTED = 128  # the largest scale code whose multiplier, 2^(code - 1), is a bfloat16
_ONE = 127


def num_tiles(spec: WeightSpec) -> tuple[int, int]:
    """Tiles of a weight along its rows and its columns."""
    rows, columns = spec.shape
    halves = 2 if _gated(spec) else 1
    return halves * -(-rows // halves // TILE), -(-columns // TILE)


def _gated(spec: WeightSpec) -> bool:
    return spec.role == "gate_up" and spec.gate_up_order is not None


def _pad(array: jax.Array, axis: int, size: int, fill: int) -> jax.Array:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return jnp.pad(array, widths, constant_values=fill)


def _tile_rows(array: jax.Array, spec: WeightSpec, fill: int) -> jax.Array:
    """(N, C) -> (row tiles, 4 warps, 2, 8, C): the rows that the threads of a warp hold."""
    tiles, _ = num_tiles(spec)
    if not _gated(spec):
        return _pad(array, 0, tiles * TILE, fill).reshape(tiles, 4, 2, 8, -1)
    halves = (-1, 2) if spec.gate_up_order == "interleaved" else (2, -1)
    array = array.reshape(*halves, array.shape[-1])
    array = array if spec.gate_up_order == "interleaved" else array.swapaxes(0, 1)
    return _pad(array, 0, tiles * GATED_ROWS, fill).reshape(tiles, 4, 8, 2, -1).swapaxes(2, 3)


def _untile_rows(array: jax.Array, spec: WeightSpec) -> jax.Array:
    rows, tiles = spec.shape[0], array.shape[0]
    if not _gated(spec):
        return array.reshape(tiles * TILE, -1)[:rows]
    array = array.swapaxes(2, 3).reshape(tiles * GATED_ROWS, 2, -1)[: rows // 2]
    array = array if spec.gate_up_order == "interleaved" else array.swapaxes(0, 1)
    return array.reshape(rows, -1)


def _rotate(word: jax.Array, left: int) -> jax.Array:
    return word << left | word >> (32 - left) if left else word


def _mixed(one: jax.Array, other: jax.Array) -> jax.Array:
    """Even bits of one word, odd bits of the other. Of two mixed words it gives the words back."""
    return one & EVEN | other & ~EVEN


def _spread(pairs: jax.Array) -> jax.Array:
    """Bytes of two codes (..., 8) -> words (..., 2): see the module."""
    codes = pairs.astype(jnp.uint32)
    codes = (codes & 0xF) | (codes >> 4) << 16
    placed = (codes & 0x00070007) << 6 | (codes & 0x00080008) << 12
    turned = [_rotate(placed[..., p], -left % 32) for p, left in enumerate(ROTATIONS)]
    first, second, *mixed = (one | other for one, other in zip(turned[::2], turned[1::2], strict=True))
    return jnp.stack([first | _mixed(*mixed), second | _mixed(*mixed[::-1])], axis=-1)


def _gather_pairs(words: jax.Array) -> jax.Array:
    """The inverse of `_spread`."""
    first, second = words[..., 0], words[..., 1]
    sources = (first, second, _mixed(first, second), _mixed(second, first))
    placed = jnp.stack([_rotate(sources[p // 2], left) & PLACE for p, left in enumerate(ROTATIONS)], axis=-1)
    codes = placed >> 6 & 0x00070007 | placed >> 12 & 0x00080008
    return (codes | codes >> 12).astype(jnp.uint8)


def _forward_one(values: jax.Array, scales: jax.Array, spec: WeightSpec) -> tuple[jax.Array, jax.Array]:
    tiles, columns = num_tiles(spec)
    values = _tile_rows(_pad(values, 1, columns * TILE // 2, 0), spec, 0)
    values = values.reshape(tiles, 4, 2, 8, columns, 4, 2, 4)  # tile, warp, r, row, column, slice, h, lane % 4
    words = _spread(values.transpose(0, 4, 1, 3, 7, 5, 6, 2).reshape(tiles, columns, 256, 8))
    values = lax.bitcast_convert_type(words, jnp.uint8).reshape(tiles, columns * VALUE_SHAPE[0], VALUE_SHAPE[1])
    scales = _tile_rows(_pad(scales, 1, columns * TILE // spec.format.block_size, _ONE), spec, _ONE)
    scales = scales.reshape(tiles, 4, 2, 8, columns, -1).transpose(0, 4, 1, 3, 2, 5).reshape(tiles, columns, -1)
    shift = jnp.maximum(scales.max(axis=(1, 2)), _MAX_UNSHIFTED) - _MAX_UNSHIFTED
    shift = jnp.broadcast_to(shift[:, None, None], (tiles, 1, SCALE_BYTES))
    return values, jnp.concatenate([scales, shift], axis=1)


def _inverse_one(values: jax.Array, scales: jax.Array, spec: WeightSpec) -> tuple[jax.Array, jax.Array]:
    tiles, columns = num_tiles(spec)
    words = lax.bitcast_convert_type(values.reshape(tiles, columns, 256, 2, 4), jnp.uint32)
    pairs = _gather_pairs(words).reshape(tiles, columns, 4, 8, 4, 4, 2, 2)
    values = pairs.transpose(0, 2, 7, 3, 1, 5, 6, 4).reshape(tiles, 4, 2, 8, -1)
    scales = scales[:, :-1].reshape(tiles, columns, 4, 8, 2, -1).transpose(0, 2, 4, 3, 1, 5).reshape(tiles, 4, 2, 8, -1)
    k = spec.shape[1]
    return _untile_rows(values, spec)[:, : k // 2], _untile_rows(scales, spec)[:, : k // spec.format.block_size]


def _each(function: Callable[..., Any], q: BlockScaled, lead: tuple[int, ...]) -> BlockScaled:
    """`function` of each expert, one at a time, so that no more than one is held in between."""
    flat = [array.reshape(prod(lead), *array.shape[len(lead) :]) for array in (q.values, q.scales)]
    out = lax.map(lambda one: function(*one), tuple(flat))
    return BlockScaled(*(array.reshape(*lead, *array.shape[1:]) for array in out))


def _forward(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    q = formats.pack(q)
    return _each(partial(_forward_one, spec=spec), q, q.values.shape[:-2])


def _inverse_packed(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    return _each(partial(_inverse_one, spec=spec), q, q.values.shape[:-3])


def _inverse(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    return formats.unpack(_inverse_packed(q, spec), spec.format)


def _take(q: BlockScaled, spec: WeightSpec, index: Index) -> BlockScaled:
    chosen = layouts.gather(q, index)
    return _inverse_packed(chosen, spec)


LAYOUT = Layout("mosaic_sm90", forward=_forward, inverse=_inverse, take=_take, formats=(formats.MXFP4.name,))
