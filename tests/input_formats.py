"""The rules of input formats, stated in numpy's floats and ml_dtypes."""

import jax.numpy as jnp
import numpy as np

from jmx.numerics.input_formats import FP8_BLOCK_UE8M0, FP8_STATIC, FP8_TENSOR, FP8_TOKEN, MXFP4, MXFP8, NVFP4

TINY = np.finfo(np.float32).tiny
SINGLE = np.float32


def shared(format, size):
    """How many elements of a row of `size` share a scale."""
    return format.block_size if isinstance(format.block_size, int) else size


def as_element(quotient, dtype):
    """float32 quotients, rounded to nearest, ties to even, saturating."""
    if dtype == np.int8:
        return np.clip(np.rint(quotient), -127, 127).astype(np.int8)
    most = SINGLE(float(jnp.finfo(dtype).max))
    return np.clip(quotient, -most, most).astype(dtype)


def power_of_two(exponents):
    return np.ldexp(1.0, np.clip(exponents, -127, 127))


def blocks_of(x, size):
    """x (..., K) as (..., blocks, size). A short last block is filled up with NaN."""
    whole = np.full((*x.shape[:-1], -(-x.shape[-1] // size) * size), np.nan)
    whole[..., : x.shape[-1]] = x
    return whole.reshape(*x.shape[:-1], -1, size)


def reference(x, format, static=None):
    """values and scales of finite `x`. Quotients rounded to float64 and then to float32 are as if rounded once."""
    x = np.asarray(x).astype(np.float64)
    if format == FP8_TENSOR:
        values, scales = reference(x.reshape(1, -1), FP8_TOKEN)
        return values.reshape(x.shape), scales.reshape(())
    blocks = blocks_of(x, shared(format, x.shape[-1]))
    amax = np.nanmax(np.abs(blocks), axis=-1)
    divisor = None
    if format == FP8_STATIC:
        scales = divisor = np.broadcast_to(np.float64(static), amax.shape)
    elif format == NVFP4:
        limit = SINGLE(6 * np.float64(static)).astype(np.float64)
        with np.errstate(over="ignore", under="ignore"):
            ratio = (amax / limit).astype(SINGLE)
        scales = np.clip(ratio, 2.0**-9, 448).astype(format.scale_dtype)  # the floor is the least e4m3
        divisor = (scales.astype(np.float64) * np.float64(static)).astype(SINGLE)
    elif format in (MXFP8, FP8_BLOCK_UE8M0):
        scales = power_of_two(-127 + np.searchsorted(448 * power_of_two(np.arange(-127, 128)), amax))
    elif format == MXFP4:
        fraction, exponent = np.frexp(amax)
        scales = power_of_two(np.where(amax == 0, 0, exponent - 1 + (fraction >= 0.875) - 2))
    else:
        scales = np.maximum(SINGLE(amax / format.largest), TINY)
    divisor = scales if divisor is None else divisor
    with np.errstate(under="ignore", over="ignore"):
        quotient = (blocks / divisor[..., None].astype(np.float64)).astype(SINGLE)
    quotient = quotient.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]
    values = as_element(quotient, format.element_dtype)
    return values, np.asarray(static) if format == FP8_STATIC else scales.astype(format.scale_dtype)


def worth(x, format, static=None):
    """The values of finite `x` after rounding, float64."""
    values, scales = (array.astype(np.float64) for array in reference(x, format, static))
    scales = scales * np.float64(static) if format == NVFP4 else scales
    return values * (
        np.repeat(scales, shared(format, x.shape[-1]), axis=-1)[..., : x.shape[-1]] if scales.ndim else scales
    )
