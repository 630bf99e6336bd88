"""Quotients, products and rounding of floats by integer operations, for quantization: the same bits everywhere.

Float operations do not give the same bits on all platforms. XLA divides with correct rounding on CPUs, but within two
units in the last place on NVIDIA GPUs; it replaces division by a constant by multiplication with its reciprocal; its
CPU code flushes subnormals, and may fuse multiplication and addition.

Magnitudes are float32 bits without a sign, as int32. *Extended* bits may have an exponent field below 1 where float32
has a subnormal, so that the significand always has 24 bits; see `normalized`.
"""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jmx.numerics import element_codes
from jmx.util.typing import Array, Float32, Int32, UInt8

_BIAS = 127
_MANTISSA = 23  # bits of float32, of 24 in its significand
_HIDDEN = 1 << _MANTISSA
_NEVER_ROUNDS_UP = _MANTISSA + 2  # shifted by so many places, any significand is less than one half
NAN = 0x7FC00000  # as float32 bits


def bits_of(number: float | np.floating) -> int:
    """float32 bits of a constant that float32 represents."""
    return int(np.float32(number).view(np.int32))


def normalized(magnitude: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """float32 bits -> extended bits. Of zero: those of 2^-151, below every float32."""
    return element_codes.over_power_of_two(magnitude, jnp.int32(_BIAS))


def divided(dividend: Int32[Array, "*shape"], divisor: Int32[Array, "..."] | int) -> Int32[Array, "*shape"]:
    """Quotient of finite magnitudes, extended bits each, rounded to nearest to 24 bits: as in float32, except for
    subnormals. A quotient of 2^128 or more has exponent field 255."""
    m, n = _significand(dividend), _significand(divisor)
    less = (m < n).astype(jnp.int32)
    # A float quotient that is off by a few units has a remainder that fits into 32 bits, even if its terms overflow.
    # The remainder gives the correction. There are no ties: such a dividend would have more than 24 bits.
    quotient = (_about(m, n) * jnp.where(less == 1, 2.0**24, 2.0**23)).astype(jnp.int32)
    remainder = (m << (_MANTISSA + less)) - quotient * n
    off = jnp.rint(_about(remainder, n)).astype(jnp.int32)
    remainder -= off * n
    quotient += off + (2 * remainder > n).astype(jnp.int32) - (2 * remainder < -n).astype(jnp.int32)
    field = (dividend >> _MANTISSA) - (divisor >> _MANTISSA) + _BIAS - less
    return (jnp.minimum(field, 255) << _MANTISSA) + quotient - _HIDDEN


def _about(dividend: Int32[Array, "*shape"], divisor: Int32[Array, "..."] | int) -> Float32[Array, "*shape"]:
    return dividend.astype(jnp.float32) / jnp.asarray(divisor, jnp.float32)


def times(a: Int32[Array, "..."] | int, b: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Product of two magnitudes, float32 bits each, as float32 bits: rounded once, to nearest, ties to even, subnormals
    included. `a` has at most 8 significant bits, like every element and every narrow scale. NaN where either is NaN
    or infinite."""
    zero, finite = (a == 0) | (b == 0), (a < element_codes.F32_INF) & (b < element_codes.F32_INF)
    a, b = normalized(jnp.asarray(a, jnp.int32)), normalized(b)
    product = (_significand(a) >> 16).astype(jnp.uint32) * _significand(b).astype(jnp.uint32)  # 31 or 32 bits
    carry = (product >> 31).astype(jnp.int32)
    sticky = (product & 15 != 0).astype(jnp.int32)  # whether any of the truncated bits is set
    word = (product >> 4).astype(jnp.int32) | sticky
    field = (a >> _MANTISSA) + (b >> _MANTISSA) - _BIAS + carry
    significand = _shifted(word, jnp.minimum(3 + carry + jnp.maximum(1 - field, 0), 30))
    bits = jnp.minimum((jnp.clip(field - 1, 0, 254) << _MANTISSA) + significand, element_codes.F32_INF)
    return jnp.where(finite, jnp.where(zero, 0, bits), NAN)


def minifloat(bits: Int32[Array, "*shape"], dtype: Any) -> UInt8[Array, "*shape"]:
    """Extended bits -> codes (uint8, no sign) of a narrower float: to nearest, ties to even, saturating. `normalized`
    zero becomes zero, also after division by a float32 of 2^-140 or more."""
    limits = ml_dtypes.finfo(dtype)
    dropped = _MANTISSA - limits.nmant
    below = _BIAS + limits.minexp - 1  # float32's exponent field under which `dtype` has its subnormals
    bits = jnp.minimum(bits, bits_of(float(limits.max)))
    field = (bits >> _MANTISSA) - below
    normal = _shifted(bits - (below << _MANTISSA), jnp.int32(dropped))
    subnormal = _shifted(_significand(bits), jnp.clip(dropped + 1 - field, dropped + 1, _NEVER_ROUNDS_UP))
    return jnp.where(field >= 1, normal, subnormal).astype(jnp.uint8)


def integer(bits: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Extended bits of numbers below 2^22 -> int32: to nearest, ties to even."""
    places = _BIAS + _MANTISSA - (bits >> _MANTISSA)
    return _shifted(_significand(bits), jnp.clip(places, 1, _NEVER_ROUNDS_UP))


def _significand(bits: Int32[Array, "..."] | int) -> Any:
    return bits & _HIDDEN - 1 | _HIDDEN


def _shifted(word: Int32[Array, "*shape"], places: Int32[Array, "..."]) -> Int32[Array, "*shape"]:
    """word / 2^places, rounded to nearest, ties to even."""
    return (word + (1 << (places - 1)) - 1 + (word >> places & 1)) >> places
