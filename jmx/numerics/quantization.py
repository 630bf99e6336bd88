"""Quantization: floats to weights in a block format, weights to floats, and random weights.

MXFP4 is computed by integer operations, exact and the same bits on every platform. The other formats are defined by
float32 arithmetic, each operation rounded to nearest even:

    weight = (element - zero_point) * scale, times global_scale if the format has one
    element = round(x / scale + zero_point), saturated; for scale see `quantize`
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jmx.numerics import element_codes, formats, mxfp8, rounding
from jmx.numerics.formats import (
    MXFP4,
    MXFP8,
    NVFP4,
    WHOLE_ROW,
    BlockScaled,
    Format,
    logical_shape,
    pack,
    unpack,
)
from jmx.util.checks import check_array, check_dtype, check_key, check_one_of
from jmx.util.typing import AnyArray, Array, Bool, Float, Float32, Int32, Key, Shaped, UInt8, UInt32

# A scale is the power of two of the block's largest magnitude, truncated to its float32 exponent and divided by 2^2,
# e2m1's largest power of two. The rules differ only in what is added to the float32 bits before truncation.
SCALE_RULES: dict[str, int] = {
    "ocp": 0,  # 2^(floor(log2 amax) - 2); OCP MX specification 6.3
    "round_up": (1 << 22) - 1,  # 2^ceil(log2(amax / 6)): carries above mantissa 1.5, so that no element saturates
    "round_even": 1 << 21,  # carries from mantissa 1.75, where amax itself would round up; compressed-tensors, torchao
}

NONFINITE = ("refuse", "nan_block")

_E2M1_MAX_EXPONENT = 2
_SCALE_ONE = 127
_LEAST_NORMAL = 1 << 23  # as float32 bits


def _midpoints() -> list[int]:
    """Float32 bits from which a magnitude rounds to e2m1 code 1, 2, ... 7: ties go to the even code."""
    magnitudes = np.arange(8, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
    bits = ((magnitudes[:-1] + magnitudes[1:]) / 2).view(np.int32)
    return [int(b) + (code % 2 == 0) for code, b in enumerate(bits)]


def quantize(
    x: Float[AnyArray, "*lead K"], format: Format | str = MXFP4, *, scale_rule: str = "ocp", nonfinite: str = "refuse"
) -> BlockScaled:
    """Rounds floats to a block format.

    Elements round to nearest, ties to even, and saturate; zeros keep their sign if elements have one. A block of
    zeros gets scale 1.0. Scales are:

    * MXFP4: a power of two by `scale_rule`, its exponent clamped to [-127, 127].
    * MXFP8: 2^ceil(log2(amax / 448)), at least 2^-127, which blocks of zeros have.
    * NVFP4: amax / 6 over the global scale, in e4m3. The global scale is 1 / (448 * 6 / the tensor's amax), rounded
      twice: files of compressed-tensors hold the divisor, which so gives these bits.
    * MXINT4, INT4 and INT8: amax / 7.5 or / 127.5; with zero points (max - min) / 15 or / 255, 0 in between.
    * FP8: amax / 448, of the whole tensor, a row, or a block of rows and columns.
    * Floats have none: values are rounded to nearest, ties to even, and saturate. NaN and infinity stay.

    All but MXFP4's follow compressed-tensors' observers. A scale that would round to zero is the least positive
    number of its dtype, for 16 and 32 bits the least normal one.

    Args:
        x: float32, bfloat16 or float16 (..., N, K), K the contracted axis; (K,) if no scale spans rows. For formats
            with scales of a whole tensor, the tensor is the last two axes.
        format: the block format, without "order", which needs calibration.
        scale_rule: of MXFP4, a key of `SCALE_RULES`: "ocp" 2^(floor(log2 amax) - 2), "round_up" 2^ceil(log2(amax / 6)),
            "round_even" amax rounded to a power of two at mantissa 1.75, then as "ocp".
        nonfinite: "refuse" raises on NaN and infinity; "nan_block" gives a block with any of them the
            scale NaN and elements 0.

    Returns:
        Canonical `BlockScaled`: values (..., K), scales (..., blocks).

    Raises:
        ValueError: K not a multiple of the block, an unknown rule, NaN or infinity with "refuse", and traced values
            with "refuse".
        TypeError: another dtype.
    """
    format = formats.get(format)
    check_array("x", x)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"`x` (dtype {x.dtype}) must be float32, bfloat16 or float16")
    if x.ndim == 0:
        raise ValueError("`x` (a scalar) must have a last axis, of blocks")
    if x.ndim == 1 and rows_share_scales(format):
        raise ValueError(f"`x` (shape {x.shape}) must be (..., N, K) for {format.name.upper()}")
    format.check_size("x.shape[-1]", x.shape[-1])
    check_one_of("scale_rule", scale_rule, SCALE_RULES)
    check_one_of("nonfinite", nonfinite, NONFINITE)
    if scale_rule != "ocp" and format != MXFP4:
        raise ValueError(f"`scale_rule` (={scale_rule!r}) must be 'ocp': other rules are for MXFP4 only")
    if "order" in format.arrays:
        raise ValueError(f"`format` (={format.name!r}) must have no order of columns, which needs calibration")
    if nonfinite == "refuse":
        _refuse_nonfinite(x)
    if format == MXFP4:
        return _quantize_mxfp4(x, format.block_size, SCALE_RULES[scale_rule])
    if format == MXFP8:
        return mxfp8.quantize(x)
    return _rounded(x, format) if format.is_float else _quantize(x, format)


def rows_share_scales(format: Format) -> bool:
    """Whether rows of one tensor share scales, so that gate and up are quantized separately."""
    return format == NVFP4 or format.block_rows != 1


def _refuse_nonfinite(x: Float[AnyArray, "..."]) -> None:
    if isinstance(x, Tracer):
        raise ValueError(
            "`nonfinite` (='refuse') needs the values of `x`, which is traced: "
            "quantize outside jit, or pass nonfinite='nan_block'"
        )
    finite = jnp.isfinite(x)
    if not finite.all():
        bad = np.argwhere(~np.asarray(finite))
        first = tuple(int(i) for i in bad[0])
        raise ValueError(f"`x` holds {len(bad)} NaN or infinite values, the first (={x[first]}) at {first}")


@partial(jax.jit, static_argnums=(1, 2))
def _quantize_mxfp4(x: Float[Array, "*lead K"], block_size: int, scale_addend: int) -> BlockScaled:
    bits = element_codes.float32_bits(x).reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)
    magnitude = (bits & 0x7FFFFFFF).astype(jnp.int32)
    amax = magnitude.max(axis=-1, keepdims=True, initial=0)  # float32 bits order as the magnitudes do
    # A subnormal amax has exponent field 0, below the least scale: the clamp gives the correct result.
    scale = jnp.maximum(((amax + scale_addend) >> 23) - _E2M1_MAX_EXPONENT, 0)
    scale = jnp.where(amax == 0, _SCALE_ONE, scale)
    scale = jnp.where(amax >= element_codes.F32_INF, element_codes.SCALE_NAN, scale)

    quotient = element_codes.over_power_of_two(magnitude, scale)
    elements = _e2m1(quotient) | (bits >> 28).astype(jnp.uint8) & 8
    elements = jnp.where(scale == element_codes.SCALE_NAN, jnp.uint8(0), elements).reshape(x.shape)
    return unpack(BlockScaled(_pairs(elements), scale[..., 0].astype(jnp.uint8)))


def _e2m1(magnitude: Int32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """e2m1 codes (uint8) of magnitudes, given as float32 bits."""
    return reduce(jnp.add, [(magnitude >= midpoint).astype(jnp.uint8) for midpoint in _midpoints()])


def _pairs(elements: UInt8[Array, "*lead K"]) -> UInt8[Array, "*lead bytes"]:
    """Two 4-bit codes in a byte, the even one in the low nibble."""
    return elements[..., 0::2] | elements[..., 1::2] << 4


@partial(jax.jit, static_argnums=1)
def _rounded(x: Float[Array, "*lead K"], format: Format) -> BlockScaled:
    """Floats of the format's dtype."""
    if np.can_cast(x.dtype, format.element_dtype, "safe"):
        return BlockScaled(x.astype(format.element_dtype))
    x, most = x.astype(jnp.float32), float(jnp.finfo(format.element_dtype).max)
    return BlockScaled(jnp.where(jnp.isfinite(x), jnp.clip(x, -most, most), x).astype(format.element_dtype))


_E4M3_MAX, _E2M1_MAX = 448.0, 6.0


@partial(jax.jit, static_argnums=1)
def _quantize(x: Float[Array, "*lead K"], format: Format) -> BlockScaled:
    x = x.astype(jnp.float32)
    shape = x.shape
    blocks = _in_blocks(x, format)
    steps = jnp.float32(_steps(format))
    bad = ~jnp.isfinite(blocks).all(axis=-1)
    blocks = jnp.where(bad[..., None], 0, blocks)
    amax = jnp.abs(blocks).max(axis=-1, initial=0)
    if format.block_rows != 1:
        amax, bad = _over_rows(amax, format.block_rows), _over_rows(bad, format.block_rows)
    global_scales, zero_points = None, None
    if format == NVFP4:
        total = jnp.broadcast_to(amax.max(axis=(-2, -1), keepdims=True, initial=0)[..., 0], amax.shape[:-1])
        divisor = _divide(jnp.full_like(total, _E4M3_MAX * _E2M1_MAX), total)
        largest = 1 / jnp.finfo(jnp.float32).smallest_normal  # whose reciprocal is a normal number
        divisor = jnp.where(total == 0, 1, jnp.minimum(divisor, largest))
        global_scales = _divide(jnp.ones_like(divisor), divisor)
        scales = _scales(_divide(_divide(amax, steps), global_scales[..., None]), format.scale_dtype, amax == 0)
        step = scales.astype(jnp.float32) * global_scales[..., None]
    elif "zero_points" in format.arrays:
        least, most = blocks.min(axis=-1, initial=0), blocks.max(axis=-1, initial=0)
        scales = _scales(_divide(most - least, steps), format.scale_dtype, amax == 0)
        step = scales.astype(jnp.float32)
        low, high = _integer_range(format)
        zero_points = jnp.clip(jnp.round(low - _divide(least, step)), low, high)
    else:
        scales = _scales(_divide(amax, steps), format.scale_dtype, amax == 0)
        step = scales.astype(jnp.float32)
    quotients = _divide(blocks, step[..., None]) + (0 if zero_points is None else zero_points[..., None])
    scales = jnp.where(bad, jnp.array(jnp.nan, scales.dtype), scales)
    quotients = lax.collapse(quotients, quotients.ndim - 2)[..., : shape[-1]]
    zero_points = None if zero_points is None else zero_points.astype(jnp.int8)
    return BlockScaled(_elements_of(quotients, format), scales, global_scales, zero_points)


def _divide(a: Float32[Array, "*shape"], b: Float32[Array, "..."]) -> Float32[Array, "*shape"]:
    """a / b, rounded once, for positive b; results below the least normal number become zero."""
    bits = rounding.divided(_extended(a), _extended(b))
    bits = jnp.where((a == 0) | (bits < _LEAST_NORMAL), 0, jnp.minimum(bits, element_codes.F32_INF))
    return jnp.copysign(lax.bitcast_convert_type(bits, jnp.float32), a)


def _extended(x: Float32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Extended bits of a float32's magnitude, as `rounding` takes them."""
    return rounding.normalized((element_codes.float32_bits(x) & 0x7FFFFFFF).astype(jnp.int32))


def _in_blocks(x: Float[Array, "*lead K"], format: Format) -> Float[Array, "*lead b n"]:
    """(..., K) to (..., blocks, block_size), the last block padded with zeros."""
    size = x.shape[-1]
    block = size if format.block_size == WHOLE_ROW else format.block_size
    widths = [(0, 0)] * (x.ndim - 1) + [(0, -size % max(block, 1))]
    return jnp.pad(x, widths).reshape(*x.shape[:-1], format.num_blocks(size, "x.shape[-1]"), block)


def _over_rows(array: Shaped[Array, "*lead N b"], block_rows: int) -> Shaped[Array, "*lead N b"]:
    """Each `block_rows` rows of (..., N, blocks), or all of them if `WHOLE_ROW`, replaced by their maximum."""
    rows = array.shape[-2]
    count = max(rows, 1) if block_rows == WHOLE_ROW else block_rows
    filled = jnp.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, -rows % count), (0, 0)])
    grouped = filled.reshape(*array.shape[:-2], filled.shape[-2] // count, count, array.shape[-1])
    spread = jnp.broadcast_to(grouped.max(axis=-2, keepdims=True, initial=0), grouped.shape)
    return spread.reshape(filled.shape)[..., :rows, :]


def _steps(format: Format) -> float:
    """What a block's largest magnitude is divided by to give its scale; with zero points, its range."""
    if format.element_dtype == jnp.float8_e4m3fn:
        return _E4M3_MAX
    if format.element_dtype == jnp.float4_e2m1fn:
        return _E2M1_MAX
    return (2**format.element_bits - 1) / (1 if "zero_points" in format.arrays else 2)


def _integer_range(format: Format) -> tuple[int, int]:
    return -(2 ** (format.element_bits - 1)), 2 ** (format.element_bits - 1) - 1


def _scales(exact: Float32[Array, "*shape"], dtype: np.dtype, empty: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """float32 rounded to `dtype`, neither zero nor infinite; 1 where `empty`."""
    info = jnp.finfo(dtype)
    if dtype == jnp.float8_e4m3fn:
        rounded = _e4m3(jnp.maximum(exact, float(info.smallest_subnormal)))
    else:
        rounded = jnp.clip(exact, float(info.smallest_normal), float(info.max)).astype(dtype)
    return jnp.where(empty, jnp.ones((), dtype), rounded)


def _e4m3(x: Float32[Array, "*shape"]) -> Float[Array, "*shape"]:
    """float32 to float8_e4m3fn, saturated and rounded once, unlike some platforms' conversions."""
    sign = (element_codes.float32_bits(x) >> 24).astype(jnp.uint8) & 0x80
    return lax.bitcast_convert_type(rounding.minifloat(_extended(x), jnp.float8_e4m3fn) | sign, jnp.float8_e4m3fn)


def _elements_of(quotients: Float32[Array, "*lead K"], format: Format) -> Shaped[Array, "*lead K"]:
    """float32 rounded and saturated to elements."""
    if format.element_dtype == jnp.float8_e4m3fn:
        return _e4m3(quotients)
    if format.element_dtype == jnp.float4_e2m1fn:
        bits = element_codes.float32_bits(quotients)
        elements = _e2m1((bits & 0x7FFFFFFF).astype(jnp.int32)) | (bits >> 28).astype(jnp.uint8) & 8
        pairs = lax.bitcast_convert_type(_pairs(elements), jnp.float4_e2m1fn)
        return pairs.reshape(quotients.shape)
    return jnp.clip(jnp.round(quotients), *_integer_range(format)).astype(jnp.int8).astype(format.element_dtype)


def dequantize(q: BlockScaled, dtype: Any = jnp.bfloat16, format: Format | str = MXFP4) -> Float[Array, "*lead K"]:
    """Floats of a weight, in the order of inputs.

    MXFP4 is computed by integer operations, the same bits on every platform: exact if `dtype` can represent the value
    (subnormals included), else +-inf; scale code 255 makes the whole block NaN; zeros keep their sign. Other formats
    are computed in float32 and rounded to `dtype` once; a NaN scale makes its block NaN.

    Args:
        q: canonical or packed weight of logical shape (..., K).
        dtype: bfloat16 or float32.
        format: the block format of `q`.

    Returns:
        (..., K) of `dtype`.

    Raises:
        ValueError: arrays that do not fit each other.
        TypeError: arrays or a `dtype` of another type. (float16 is rejected: most scales are outside its range.)
    """
    format = formats.get(format)
    logical_shape(q, format)
    return _dequantize(q, check_dtype("dtype", dtype, jnp.bfloat16, jnp.float32), format)


@partial(jax.jit, static_argnums=(1, 2))
def _dequantize(q: BlockScaled, dtype: np.dtype, format: Format) -> Float[Array, "*lead K"]:
    weights, rows = expand(q, dtype if format == MXFP4 else jnp.float32, format)
    if rows is not None:
        weights *= rows[..., None]
    if q.order is not None:
        places = jnp.broadcast_to(jnp.argsort(q.order)[..., None, :], weights.shape)
        weights = jnp.take_along_axis(weights, places, axis=-1)
    return weights.astype(dtype)


def expand(
    q: BlockScaled, dtype: Any, format: Format
) -> tuple[Float[Array, "*rows K"], Float32[Array, "*rows"] | None]:
    """A weight as (floats (..., N, K) of `dtype`, float32 factors (..., N) of rows or None), columns in their order.

    A product multiplies a row's sum by its factor. So floats in bfloat16 are exact except in formats with scales of
    more than four bits in groups (MXINT4, INT4 and INT8 in groups, FP8_BLOCK), where they are rounded once.
    """
    if format.is_float:
        return q.values.astype(dtype), None
    q = pack(q)  # uint8: XLA's CPU compiler widens whole float4 arrays that are sliced in a loop
    if format == MXFP4:
        blocks = q.values.reshape(*q.scales.shape, format.block_size // 2)
        *rows, num_bytes = q.values.shape
        return element_codes.floats(blocks, q.scales[..., None], dtype).reshape(*rows, 2 * num_bytes), None
    weights = _elements(q.values, format)
    if format == MXFP8:
        blocks = weights.reshape(*q.scales.shape, format.block_size)
        return element_codes.scaled(blocks, q.scales[..., None]).reshape(weights.shape).astype(dtype), None
    if q.zero_points is not None:
        weights -= _spread(q.zero_points.astype(jnp.float32), weights.shape, format)
    scales = q.scales
    if scales.dtype == jnp.uint8:
        scales = lax.bitcast_convert_type(scales, format.scale_dtype)
    scales = scales.astype(jnp.float32)
    if format.block_size == WHOLE_ROW:
        return weights.astype(dtype), scales[..., 0]
    return (weights * _spread(scales, weights.shape, format)).astype(dtype), q.global_scales


def _elements(values: UInt8[Array, "*rows bytes"], format: Format) -> Float32[Array, "*rows K"]:
    """Packed bytes (..., n) as float32 elements (..., K)."""
    if format.element_bits == 8:
        return lax.bitcast_convert_type(values, format.element_dtype).astype(jnp.float32)
    if format.element_dtype == jnp.int4:
        signed = lax.bitcast_convert_type(values, jnp.int8)
        pair = [lax.shift_right_arithmetic(signed << shift, jnp.int8(4)).astype(jnp.float32) for shift in (4, 0)]
    else:
        unit = element_codes.unit()
        pair = [element_codes.element(values, index, unit) for index in (0, 1)]
    return jnp.stack(pair, axis=-1).reshape(*values.shape[:-1], 2 * values.shape[-1])


def _spread(by_block: Float32[Array, "*rows b"], shape: tuple[int, ...], format: Format) -> Float32[Array, "*rows K"]:
    """(..., blocks), repeated for each of a block's columns."""
    if format.block_size == WHOLE_ROW:
        return jnp.broadcast_to(by_block, shape)
    wide = jnp.broadcast_to(by_block[..., None], (*by_block.shape, format.block_size))
    return wide.reshape(*by_block.shape[:-1], by_block.shape[-1] * format.block_size)[..., : shape[-1]]


def random(key: Key[Array, ""] | UInt32[AnyArray, "2"], shape: tuple[int, ...], format: Format = MXFP4) -> BlockScaled:
    """A random packed weight of logical `shape` (..., N, K), codes and scales drawn directly.

    Codes are uniform over all element codes that are numbers. Scales are two neighboring powers of two such that the
    standard deviation is K ** -0.5 within a factor of 2; global scales such that scales are near 1. FP8_BLOCK has one
    scale for each 128 rows. Zero points are -1, 0 or 1; orders are random permutations. Floats are normal.
    """
    check_key("key", key)
    return _random(key, tuple(shape), format)


@partial(jax.jit, static_argnums=(1, 2))
def _random(key: Key[Array, ""] | UInt32[AnyArray, "2"], shape: tuple[int, ...], format: Format) -> BlockScaled:
    if format.is_float:
        return BlockScaled((jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(format.element_dtype))
    abstract = format.abstract(shape, packed=True)
    keys = jax.random.split(key, 4)
    values = jax.random.bits(keys[0], abstract.values.shape, jnp.uint8)
    if format.element_dtype == jnp.float8_e4m3fn:
        values = jnp.where(values & 0x7F == 0x7F, jnp.uint8(0), values)
    exponent = int(np.floor(np.log2(shape[-1] ** -0.5 / np.nanstd(format.elements()))))
    global_scales = zero_points = order = None
    if abstract.global_scales is not None:
        global_scales, exponent = jnp.full(abstract.global_scales.shape, 2.0**exponent, jnp.float32), 0
    if abstract.zero_points is not None:
        zero_points = jax.random.randint(keys[2], abstract.zero_points.shape, -1, 2, jnp.int8)
    if abstract.order is not None:
        columns = jnp.broadcast_to(jnp.arange(shape[-1], dtype=jnp.int32), abstract.order.shape)
        order = jax.random.permutation(keys[3], columns, axis=-1, independent=True)
    above = jax.random.randint(keys[1], abstract.scales.shape, 0, 2, jnp.int32)
    if format.block_rows > 1:
        above = above[..., np.arange(shape[-2]) // format.block_rows * format.block_rows, :]
    if format.scale_dtype == jnp.float8_e8m0fnu:
        scales = (_SCALE_ONE + exponent + above).astype(jnp.uint8)
    else:
        scales = (2.0**exponent * (1 + above).astype(jnp.float32)).astype(format.scale_dtype)
        if scales.dtype.itemsize == 1:
            scales = lax.bitcast_convert_type(scales, jnp.uint8)
    return BlockScaled(values, scales, global_scales, zero_points, order)
