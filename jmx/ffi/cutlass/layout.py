"""Layout of the backend `cutlass`: weights as FlashInfer's mixed-input GEMMs on sm_90 read them.

gate_up has the rows of up and then those of gate (experts without a gate: one half), each half padded; rows and columns
are padded to multiples of 128, with zero values and scales of 1.0.

Values are in tiles of 16 rows by 64 columns, in which the eight codes of one thread are adjacent: from two rows, 8
apart, and two pairs of columns, 8 columns apart. They are spread over the two halves of a word such that for three of
the four codes of a half a shift and a mask move the code's magnitude to the lowest exponent bits and highest mantissa
bits of a bfloat16, and its sign to the sign bit; the fourth code has the remaining bits.

Scales are codes in blocks of 64 rows by 128 columns: (N / 64, K / 128, 16, 16), where [i, j] is row i + 16 * (j // 4)
and the scale j % 4 of the block.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import lax

from jmx.ffi.cutlass.config import padded
from jmx.numerics import formats, layouts
from jmx.numerics.formats import BlockScaled
from jmx.numerics.gate_up import is_interleaved, is_up_first
from jmx.numerics.layouts import Index, Layout, WeightSpec
from jmx.util.typing import Array, Shaped, UInt8, UInt32

# Of each of the four codes in a half word: (bits of the code, their shift to the left).
_SHIFTS = (((7, 6), (8, 12)), ((7, 3), (8, 9)), ((7, 0), (8, 6)), ((1, 13), (6, 9), (8, 11)))
_ONE = 127  # the code of scale 1.0


def _gated(spec: WeightSpec) -> bool:
    return spec.role == "gate_up" and spec.gate_up_order is not None


def _padded_shape(spec: WeightSpec) -> tuple[int, int]:
    halves = 2 if _gated(spec) else 1
    return halves * padded(spec.shape[0] // halves), padded(spec.shape[1])


def _forward_rows(
    array: Shaped[Array, "N C"], spec: WeightSpec, columns: int, fill: int
) -> Shaped[Array, "padded columns"]:
    """(N, C) -> the padded rows in the layout's order, padded to `columns` columns."""
    rows, _ = _padded_shape(spec)
    halves = array[None]
    if _gated(spec):
        interleaved = is_interleaved(spec.gate_up_order)
        halves = (
            array.reshape(-1, 2, array.shape[1]).swapaxes(0, 1) if interleaved else array.reshape(2, -1, array.shape[1])
        )
        halves = halves if is_up_first(spec.gate_up_order) else halves[::-1]
    widths = ((0, 0), (0, rows // len(halves) - halves.shape[1]), (0, columns - array.shape[1]))
    return jnp.pad(halves, widths, constant_values=fill).reshape(rows, columns)


def _inverse_rows(array: Shaped[Array, "padded C"], spec: WeightSpec, columns: int) -> Shaped[Array, "N columns"]:
    """The inverse of `_forward_rows`."""
    array = array[:, :columns]
    if not _gated(spec):
        return array[: spec.shape[0]]
    halves = array.reshape(2, -1, columns)[:, : spec.shape[0] // 2]
    halves = halves if is_up_first(spec.gate_up_order) else halves[::-1]
    halves = halves.swapaxes(0, 1) if is_interleaved(spec.gate_up_order) else halves
    return halves.reshape(-1, columns)


def _spread(pairs: UInt8[Array, "*shape 4"]) -> UInt32[Array, "*shape"]:
    """Bytes of two codes (..., 4) -> words (...): see the module."""
    codes = pairs.astype(jnp.uint32)
    codes = codes & 0xF | (codes >> 4) << 16
    word = jnp.zeros(pairs.shape[:-1], jnp.uint32)
    for i, shifts in enumerate(_SHIFTS):
        for bits, left in shifts:
            word |= (codes[..., i] & (bits | bits << 16)) << left
    return word


def _gather(word: UInt32[Array, "*shape"]) -> UInt8[Array, "*shape 4"]:
    """The inverse of `_spread`."""
    codes = [
        sum((word >> left & (bits | bits << 16) for bits, left in shifts), start=jnp.uint32(0)) for shifts in _SHIFTS
    ]
    return jnp.stack([(code | code >> 12).astype(jnp.uint8) for code in codes], axis=-1)


def _forward_one(
    values: UInt8[Array, "N n"], scales: UInt8[Array, "N b"], spec: WeightSpec
) -> tuple[UInt8[Array, "padded_N padded_n"], UInt8[Array, "R B 16 16"]]:
    """Values and scales of one expert in the layout."""
    rows, columns = _padded_shape(spec)
    values = _forward_rows(values, spec, columns // 2, 0)
    # Axes: row / 16, / 8 % 2, % 8; column / 64, / 32 % 2, / 16 % 2, / 8 % 2; and bytes of two columns.
    values = values.reshape(rows // 16, 2, 8, columns // 64, 2, 2, 2, 4)
    words = _spread(values.transpose(0, 5, 2, 3, 4, 7, 6, 1).reshape(rows, columns // 8, 4))
    values = lax.bitcast_convert_type(words, jnp.uint8).reshape(rows, columns // 2)
    scales = _forward_rows(scales, spec, columns // spec.format.block_size, _ONE)
    return values, scales.reshape(rows // 64, 4, 16, columns // 128, 4).transpose(0, 3, 2, 1, 4).reshape(
        rows // 64, columns // 128, 16, 16
    )


def _inverse_one(
    values: UInt8[Array, "padded_N padded_n"], scales: UInt8[Array, "R B 16 16"], spec: WeightSpec
) -> tuple[UInt8[Array, "N n"], UInt8[Array, "N b"]]:
    """The inverse of `_forward_one`."""
    rows, columns = _padded_shape(spec)
    words = lax.bitcast_convert_type(values.reshape(rows, columns // 8, 4), jnp.uint32)
    values = _gather(words).reshape(rows // 16, 2, 8, columns // 64, 2, 4, 2, 2)
    values = values.transpose(0, 7, 2, 3, 4, 1, 6, 5).reshape(rows, columns // 2)
    scales = scales.reshape(rows // 64, columns // 128, 16, 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows, -1)
    k = spec.shape[1]
    return _inverse_rows(values, spec, k // 2), _inverse_rows(scales, spec, k // spec.format.block_size)


def _each(function: Callable[..., Any], q: BlockScaled, lead: tuple[int, ...]) -> BlockScaled:
    """`function` of each expert, one at a time, so that temporaries are those of one expert."""
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
