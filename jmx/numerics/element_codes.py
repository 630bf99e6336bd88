"""Codes of e2m1 elements and e8m0 scales as floats, and bits of floats as integers, in few and fast operations.

Floats are rounded to codes as these integers. All results are exact. GPUs multiply floats, subnormals included. XLA's
CPU code treats subnormals as zero: there the bits are computed by integer operations, or all numbers are normal.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jmx.util.typing import Array, Float, Float32, Int32, UInt, UInt8, UInt16, UInt32

_BF16_INF = 0x7F80
_BF16_NAN = 0x7FC0
_F32_NAN = 0x7FC00000
F32_INF = 0xFF << 23
_SCALE_ONE = 127
SCALE_NAN = 255


def floats(blocks: UInt8[Array, "*lead n"], scales: UInt8[Array, "..."], dtype: Any) -> Float[Array, "*lead n 2"]:
    """Floats of packed bytes: `blocks` uint8 (..., n), `scales` uint8 broadcastable to it -> `dtype` (..., n, 2).

    `dtype` is bfloat16 or float32. The even element of a byte is its low nibble. See `quantization.dequantize`.
    """
    bits = lax.platform_dependent(blocks, scales, cuda=_bits_by_floats, default=_bits_by_integers)
    if dtype == jnp.float32:  # bfloat16, which holds every weight exactly, is the upper half of float32
        return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _bits_by_floats(blocks: UInt8[Array, "*lead n"], scales: UInt8[Array, "..."]) -> UInt16[Array, "*lead n 2"]:
    """bfloat16 bits (..., n, 2), the two of a byte stored as one 32-bit word."""
    one, scale = unit(), power_of_two(scales)
    even, odd = (lax.bitcast_convert_type(element(blocks, i, one) * scale, jnp.uint32) for i in (0, 1))
    return lax.bitcast_convert_type(even >> 16 | odd & jnp.uint32(0xFFFF0000), jnp.uint16)


def _bits_by_integers(blocks: UInt8[Array, "*lead n"], scales: UInt8[Array, "..."]) -> UInt16[Array, "*lead n 2"]:
    return jnp.stack([_bfloat16_bits(blocks, scales), _bfloat16_bits(blocks >> 4, scales)], axis=-1)


def _bfloat16_bits(elements: UInt8[Array, "*shape"], scale_codes: UInt8[Array, "..."]) -> UInt16[Array, "*shape"]:
    """bfloat16 bits of e2m1 codes in the low four bits of `elements`."""
    scale = scale_codes.astype(jnp.uint16)
    is_nan = scale == SCALE_NAN

    # This depends on the scale only: XLA computes it once for a block if it can. `half` has the bits of 0.5 * scale.
    base = jnp.where(is_nan, _BF16_NAN, (scale - 1) << 7)  # wraps below zero for scale code 0
    half = jnp.where(scale > 1, base, (scale + 1) << 5)
    least = jnp.where(is_nan, _BF16_NAN, 0).astype(jnp.uint16)
    most = jnp.where(is_nan, _BF16_NAN, _BF16_INF).astype(jnp.uint16)

    # Magnitude codes from 2 on are exponent and mantissa; 0 and 1 are subnormals of e2m1. With scale code 0, magnitudes
    # 2 and 3 are subnormals of the result: then the second argument of the maximum is correct.
    magnitude = (elements & 7).astype(jnp.uint16)
    normal = jnp.maximum(base + (magnitude << 6), magnitude << 5)
    bits = jnp.where(magnitude < 2, jnp.maximum(magnitude * half, least), normal)
    return jnp.minimum(bits, most) | (elements & 8).astype(jnp.uint16) << 12


def unit() -> Float32[Array, ""]:
    """2^126 for `element`, hidden from XLA's optimizer, which would multiply another factor by a constant first: that
    product could be infinite where the element is zero."""
    return lax.optimization_barrier(jnp.float32(2.0**126))


def element(word: UInt[Array, "*shape"], index: int, unit: Float32[Array, ""]) -> Float32[Array, "*shape"]:
    """The e2m1 element at nibble `index` of each word (uint8, uint16 or uint32) as float32; `unit` is `unit()`."""

    def by_bits(word: UInt[Array, "*shape"], unit: Float32[Array, ""]) -> Float32[Array, "*shape"]:
        # Sign, exponent and mantissa at the bits of a float32 give 2^-126 times the element, a subnormal if the element
        # is a subnormal of e2m1.
        signed = lax.shift_right_arithmetic(word.astype(jnp.int32) << 28 - 4 * index, jnp.int32(6))
        bits = signed & jnp.int32(-0x80000000 | 0x01C00000)
        return lax.bitcast_convert_type(bits, jnp.float32) * unit

    def by_table(word: UInt[Array, "*shape"], unit: Float32[Array, ""]) -> Float32[Array, "*shape"]:
        # Twice the magnitudes 0, 0.5, 1 ... 6 as integers, four bits each.
        code = (word >> 4 * index).astype(jnp.uint32)
        doubled = (jnp.uint32(0xC8643210) >> ((code & 7) << 2)) & 15
        return doubled.astype(jnp.int32).astype(jnp.float32) * jnp.where(code & 8, -0.5, 0.5)

    return lax.platform_dependent(word, unit, cuda=by_bits, default=by_table)


def power_of_two(scale_codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """e8m0 codes as float32: 2^(code - 127), NaN for 255."""
    code = scale_codes.astype(jnp.uint32)
    bits = jnp.maximum(code << 23, 1 << 22)  # code 0 is a subnormal of float32
    return lax.bitcast_convert_type(jnp.where(code == SCALE_NAN, jnp.uint32(_F32_NAN), bits), jnp.float32)


def scaled(x: Float32[Array, "*shape"], scale_codes: UInt8[Array, "..."]) -> Float32[Array, "*shape"]:
    """float32 x * 2^(code - 127), NaN for code 255; exact also if the power is subnormal and the product is not."""

    def by_halves(x: Float32[Array, "*shape"], scale_codes: UInt8[Array, "..."]) -> Float32[Array, "*shape"]:
        return x * power_of_two(jnp.maximum(scale_codes, 1)) * jnp.where(scale_codes == 0, 0.5, 1.0)

    def at_once(x: Float32[Array, "*shape"], scale_codes: UInt8[Array, "..."]) -> Float32[Array, "*shape"]:
        return x * power_of_two(scale_codes)

    return lax.platform_dependent(x, scale_codes, cuda=at_once, default=by_halves)


def float32_bits(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Bits of `x` as float32. Integers widen bfloat16, as a float conversion may flush subnormals."""
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def over_power_of_two(magnitude: Int32[Array, "*shape"], scale_codes: Int32[Array, "..."]) -> Int32[Array, "*shape"]:
    """float32 bits (int32, no sign) of magnitude / 2^(code - 127), exact and normalized: exponent fields may be below
    1. Zero gets a field so low that it rounds to zero in any format."""
    # Division by a power of two subtracts exponents, in bits whose exponent field may go below 0.
    shift = lax.clz(magnitude) - 8
    extended = jnp.where(magnitude < 1 << 23, (magnitude << shift) - (shift << 23), magnitude)
    return extended - ((scale_codes - _SCALE_ONE) << 23)
