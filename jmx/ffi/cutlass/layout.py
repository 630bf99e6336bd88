"""Layout of the backend `cutlass`: weights as FlashInfer's mixed-input products on sm_90 read them.

gate_up has the rows of up and then those of gate (experts without a gate: just theirs), each half padded; rows and
columns are padded to multiples of 128, with zero values and scales of 1.0.

Values keep their place in tiles of 16 rows by 64 columns, where one thread's share is eight codes that lie together:
of two rows, 8 apart, and of two pairs of columns, 8 columns apart. They are spread over the two halves of a word such
that a shift and a mask leave a code's magnitude in the lowest exponent and highest mantissa bits of a bfloat16, and its
sign in the sign bit, for three of four codes of a half; the fourth has what bits are left.

Scales keep their codes, and lie by blocks of 64 rows by 128 columns: (N / 64, K / 128, 16, 16), where [i, j] is row
i + 16 * (j // 4) and the scale j % 4 of the block.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.ffi.cutlass.config import padded
from jmx.numerics import formats, layouts
from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import Index, Layout, WeightSpec

# Where the bits of each of four codes go in a half word: (bits of the code, places to the left).
_PLACES = (((7, 6), (8, 12)), ((7, 3), (8, 9)), ((7, 0), (8, 6)), ((1, 13), (6, 9), (8, 11)))
_ONE = 127


def _gated(spec: WeightSpec) -> bool:
    return spec.role == "gate_up" and spec.gate_up_order is not None


def _padded_shape(spec: WeightSpec) -> tuple[int, int]:
    halves = 2 if _gated(spec) else 1
    return halves * padded(spec.shape[0] // halves), padded(spec.shape[1])


def _forward_rows(array: jax.Array, spec: WeightSpec, columns: int, fill: int) -> jax.Array:
    """(N, C) -> the padded rows, in their order, and `columns` columns."""
    rows, _ = _padded_shape(spec)
    halves = array[None]
    if _gated(spec):
        interleaved = spec.gate_up_order == "interleaved"
        halves = (
            array.reshape(-1, 2, array.shape[1]).swapaxes(0, 1) if interleaved else array.reshape(2, -1, array.shape[1])
        )
        halves = halves[::-1]
    widths = ((0, 0), (0, rows // len(halves) - halves.shape[1]), (0, columns - array.shape[1]))
    return jnp.pad(halves, widths, constant_values=fill).reshape(rows, columns)


def _inverse_rows(array: jax.Array, spec: WeightSpec, columns: int) -> jax.Array:
    """The inverse of `_forward_rows`."""
    array = array[:, :columns]
    if not _gated(spec):
        return array[: spec.shape[0]]
    halves = array.reshape(2, -1, columns)[::-1, : spec.shape[0] // 2]
    halves = halves.swapaxes(0, 1) if spec.gate_up_order == "interleaved" else halves
    return halves.reshape(-1, columns)


def _spread(pairs: jax.Array) -> jax.Array:
    """Bytes of two codes (..., 4) -> uint32 words (...): see the module."""
    codes = pairs.astype(jnp.uint32)
    codes = codes & 0xF | (codes >> 4) << 16
    word = jnp.zeros(pairs.shape[:-1], jnp.uint32)
    for i, places in enumerate(_PLACES):
        for bits, left in places:
            word |= (codes[..., i] & (bits | bits << 16)) << left
    return word


def _gather(word: jax.Array) -> jax.Array:
    """The inverse of `_spread`."""
    codes = [
        sum((word >> left & (bits | bits << 16) for bits, left in places), start=jnp.uint32(0)) for places in _PLACES
    ]
    return jnp.stack([(code | code >> 12).astype(jnp.uint8) for code in codes], axis=-1)


def _forward_one(values: jax.Array, scales: jax.Array, spec: WeightSpec) -> tuple[jax.Array, jax.Array]:
    rows, columns = _padded_shape(spec)
    values = _forward_rows(values, spec, columns // 2, 0)
    # row / 16, row / 8 % 2, row % 8, column / 64, / 32, / 16, / 8, and bytes of two columns
    values = values.reshape(rows // 16, 2, 8, columns // 64, 2, 2, 2, 4)
    words = _spread(values.transpose(0, 5, 2, 3, 4, 7, 6, 1).reshape(rows, columns // 8, 4))
    values = lax.bitcast_convert_type(words, jnp.uint8).reshape(rows, columns // 2)
    scales = _forward_rows(scales, spec, columns // spec.format.block_size, _ONE)
    return values, scales.reshape(rows // 64, 4, 16, columns // 128, 4).transpose(0, 3, 2, 1, 4).reshape(
        rows // 64, columns // 128, 16, 16
    )


def _inverse_one(values: jax.Array, scales: jax.Array, spec: WeightSpec) -> tuple[jax.Array, jax.Array]:
    rows, columns = _padded_shape(spec)
    words = lax.bitcast_convert_type(values.reshape(rows, columns // 8, 4), jnp.uint32)
    values = _gather(words).reshape(rows // 16, 2, 8, columns // 64, 2, 4, 2, 2)
    values = values.transpose(0, 7, 2, 3, 4, 1, 6, 5).reshape(rows, columns // 2)
    scales = scales.reshape(rows // 64, columns // 128, 16, 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows, -1)
    k = spec.shape[1]
    return _inverse_rows(values, spec, k // 2), _inverse_rows(scales, spec, k // spec.format.block_size)


def _each(function: Callable[..., Any], q: BlockScaled, lead: tuple[int, ...]) -> BlockScaled:
    """`function` of each expert, one at a time, so that no more than one is held in between."""
    flat = [array.reshape(prod(lead), *array.shape[len(lead) :]) for array in (q.values, q.scales)]
    out = lax.map(lambda one: function(*one), tuple(flat))
    return BlockScaled(*(array.reshape(*lead, *array.shape[1:]) for array in out))


def _forward(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    q = formats.pack(q)
    return _each(partial(_forward_one, spec=spec), q, q.values.shape[:-2])


def _inverse_packed(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    return _each(partial(_inverse_one, spec=spec), q, q.values.shape[:-2])


def _inverse(q: BlockScaled, spec: WeightSpec) -> BlockScaled:
    return formats.unpack(_inverse_packed(q, spec), spec.format)


def _take(q: BlockScaled, spec: WeightSpec, index: Index) -> BlockScaled:
    chosen = layouts.gather(q, index)
    return _inverse_packed(chosen, spec)


LAYOUT = Layout("cutlass_sm90", forward=_forward, inverse=_inverse, take=_take, formats=(formats.MXFP4.name,))
