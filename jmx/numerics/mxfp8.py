"""Activations in MXFP8: e4m3 elements; each 32 along the last axis share an e8m0 scale.

value = element * 2^(scale_code - 127), as in the OCP Microscaling Formats (MX) Specification v1.0, section 5. The
rule for scales is not part of it. Here it is the rule of the kernels that take such activations (FlashInfer 0.7.2,
`cvt_warp_fp16_to_mxfp8` and, for CPUs, `mxfp8_quantize_host`): 2^ceil(log2(amax / 448)), amax the block's
largest magnitude and 448 the largest of e4m3. So nothing saturates. The rule of the specification (section 6.3),
2^(floor(log2 amax) - 8), gives half of that to blocks with amax above 448 times it, whose largest elements saturate.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmx.numerics import element_codes, rounding
from jmx.numerics.formats import MXFP8, BlockScaled
from jmx.util.typing import AnyArray, Array, Float, Float32, Shaped, UInt32

_E4M3_MAX_EXPONENT = 8  # of 448 = 1.75 * 2^8
_CARRY = (1 << 21) - 1  # carries above float32 mantissa 1.75


def quantize(x: Float[AnyArray, "*lead K"]) -> BlockScaled:
    """Rounds floats to MXFP8, the same bits on every platform. Traceable.

    Elements round to nearest, ties to even; zeros keep their sign. A block of zeros gets scale code 0. A block with
    NaN or infinity gets scale code 255, which is NaN, and elements 0.

    Args:
        x: float32, bfloat16 or float16 (..., K).

    Returns:
        `BlockScaled`: values float8_e4m3fn (..., K), scales float8_e8m0fnu (..., K / 32).

    Raises:
        ValueError: K not a multiple of 32, or a scalar.
        TypeError: another dtype.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"`x` (dtype {x.dtype}) must be float32, bfloat16 or float16")
    if x.ndim == 0:
        raise ValueError("`x` (a scalar) must have a last axis, of blocks")
    MXFP8.check_size("x.shape[-1]", x.shape[-1])
    return _quantize(x)


@jax.jit
def _quantize(x: Float[Array, "*lead K"]) -> BlockScaled:
    bits = element_codes.float32_bits(x).reshape(*x.shape[:-1], x.shape[-1] // MXFP8.block_size, MXFP8.block_size)
    elements, scales = quantize_blocks(bits)
    return BlockScaled(elements.reshape(x.shape), scales)


def quantize_blocks(
    bits: UInt32[Array, "*lead b n"],
) -> tuple[Float[Array, "*lead b n"], Shaped[Array, "*lead b"]]:
    """Quantizes blocks of any size by the rule of this module.

    Args:
        bits: uint32 (..., blocks, elements), those of float32.

    Returns:
        Elements float8_e4m3fn of the same shape, and scales float8_e8m0fnu (..., blocks).
    """
    magnitude = (bits & 0x7FFFFFFF).astype(jnp.int32)
    amax = magnitude.max(axis=-1, keepdims=True, initial=0)  # float32 bits order as the magnitudes do
    scale = jnp.maximum(((amax + _CARRY) >> 23) - _E4M3_MAX_EXPONENT, 0)
    scale = jnp.where(amax >= element_codes.F32_INF, element_codes.SCALE_NAN, scale)
    elements = rounding.minifloat(element_codes.over_power_of_two(magnitude, scale), MXFP8.element_dtype)
    elements |= (bits >> 24).astype(jnp.uint8) & 0x80
    elements = jnp.where(scale == element_codes.SCALE_NAN, jnp.uint8(0), elements)
    return (
        lax.bitcast_convert_type(elements, MXFP8.element_dtype),
        lax.bitcast_convert_type(scale[..., 0].astype(jnp.uint8), MXFP8.scale_dtype),
    )


def dequantize(q: BlockScaled) -> Float32[Array, "*lead K"]:
    """The values of `q`, a result of `quantize`: float32 (..., K).

    Exact if the result is a normal float32, else infinite or, on platforms without float subnormals, zero.
    """
    scales = lax.bitcast_convert_type(q.scales, jnp.uint8)[..., None]
    values = q.values.astype(jnp.float32).reshape(*q.scales.shape, MXFP8.block_size)
    return element_codes.scaled(values, scales).reshape(q.values.shape)
