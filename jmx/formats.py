"""Block formats: what they are made of; and of 4-bit weights: quantize, dequantize, pack, pad.

A block format cuts the last (contracted) axis of a weight into blocks that share one scale. MXFP4 is the first:
32 elements e2m1, one scale e8m0, value = element * 2 ** (scale_code - 127), as in the OCP Microscaling Formats (MX)
Specification v1.0, section 5.

Weights come in two forms. *Canonical* arrays have one float4 element per weight; *packed* arrays are the uint8 bytes
of checkpoints, two weights a byte, the even element of the contracted axis in the low nibble.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jmx import codes

Array = Any  # a jax.Array, a numpy array (with ml_dtypes), or a tracer


class BlockScaled(NamedTuple):
    """A weight of logical shape (..., N, K) in a block format; a pytree.

    Canonical: `values` float4_e2m1fn (..., N, K), `scales` float8_e8m0fnu (..., N, K / block_size).
    Packed: `values` uint8 (..., N, K / 2), `scales` uint8 (..., N, K / block_size).
    """

    values: Array
    scales: Array


@dataclass(frozen=True)
class Format:
    """A block format: element type, block, scale type, and the arrays that a weight is made of.

    Args:
        name: key in `FORMATS`.
        element_dtype: dtype of canonical values.
        element_bits: bits of one value in memory.
        block_size: elements that share a scale, along the last axis.
        scale_dtype: dtype of canonical scales.
        arrays: names of the arrays that hold one weight.
    """

    name: str
    element_dtype: np.dtype
    element_bits: int
    block_size: int
    scale_dtype: np.dtype
    arrays: tuple[str, ...] = ("values", "scales")

    def check_size(self, name: str, size: int) -> None:
        """Raises ValueError, naming the argument `name`, unless `size` is a whole number of blocks."""
        if size % self.block_size:
            raise ValueError(f"`{name}` (={size}) must be a multiple of {self.block_size} for {self.name.upper()}")

    def num_blocks(self, size: int, what: str) -> int:
        """Blocks along an axis of `size` elements; ValueError naming `what` unless they are whole."""
        self.check_size(what, size)
        return size // self.block_size

    def abstract(self, shape: tuple[int, ...], *, packed: bool = False) -> BlockScaled:
        """Shapes and dtypes (`jax.ShapeDtypeStruct`) of the arrays of a weight of logical `shape` (..., N, K)."""
        *lead, size = shape
        blocks = self.num_blocks(size, "shape[-1]")
        if packed:
            values = jax.ShapeDtypeStruct((*lead, size * self.element_bits // 8), jnp.uint8)
            return BlockScaled(values, jax.ShapeDtypeStruct((*lead, blocks), jnp.uint8))
        values = jax.ShapeDtypeStruct((*lead, size), self.element_dtype)
        return BlockScaled(values, jax.ShapeDtypeStruct((*lead, blocks), self.scale_dtype))

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes in memory of a weight of logical `shape`: packed values plus scales."""
        return sum(prod(array.shape) * array.dtype.itemsize for array in self.abstract(shape, packed=True))


MXFP4 = Format(
    name="mxfp4",
    element_dtype=np.dtype(jnp.float4_e2m1fn),
    element_bits=4,
    block_size=32,
    scale_dtype=np.dtype(jnp.float8_e8m0fnu),
)

# Of activations: what block-scaled products take beside MXFP4 weights. See `jmx.mxfp8`.
MXFP8 = Format(
    name="mxfp8",
    element_dtype=np.dtype(jnp.float8_e4m3fn),
    element_bits=8,
    block_size=32,
    scale_dtype=np.dtype(jnp.float8_e8m0fnu),
)

# Of weights.
FORMATS: dict[str, Format] = {MXFP4.name: MXFP4}


# A scale is the power of two of the block's largest magnitude, cut to its float32 exponent and divided by 2^2, e2m1's
# largest power of two. The rules differ only in what is added to the float32 bits before the mantissa is cut off.
SCALE_RULES: dict[str, int] = {
    "ocp": 0,  # 2^(floor(log2 amax) - 2); OCP MX specification 6.3
    "round_up": (1 << 22) - 1,  # 2^ceil(log2(amax / 6)): carries above mantissa 1.5, so that nothing saturates
    "round_even": 1 << 21,  # carries from mantissa 1.75, where amax itself would round up; compressed-tensors, torchao
}

_E2M1_MAX_EXPONENT = 2
_SCALE_ONE = 127


def _midpoints() -> list[int]:
    """Float32 bits from which a magnitude rounds to e2m1 code 1, 2, ... 7: ties go to the even code."""
    magnitudes = np.arange(8, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
    bits = ((magnitudes[:-1] + magnitudes[1:]) / 2).view(np.int32)
    return [int(b) + (code % 2 == 0) for code, b in enumerate(bits)]


def quantize(x: Array, format: Format = MXFP4, *, scale_rule: str = "ocp", nonfinite: str = "refuse") -> BlockScaled:
    """Rounds floats to a block format, the same bits on every platform.

    Elements round to nearest, ties to even, and saturate at +-6 times the scale; zeros keep their sign. A block of
    zeros gets scale 1.0. Scale exponents are clamped to [-127, 127].

    Args:
        x: float32, bfloat16 or float16 (..., K), K the contracted axis.
        format: the block format.
        scale_rule: a key of `SCALE_RULES`: "ocp" 2^(floor(log2 amax) - 2), "round_up" 2^ceil(log2(amax / 6)),
            "round_even" amax rounded to a power of two at mantissa 1.75, then as "ocp".
        nonfinite: "refuse" raises on NaN and infinity; "nan_block" gives a block that has any of them
            scale code 255, which dequantizes to NaN, and element codes 0.

    Returns:
        Canonical `BlockScaled`: values (..., K), scales (..., K / block_size).

    Raises:
        ValueError: K not a multiple of the block, an unknown rule, NaN or infinity under "refuse", and "refuse" of
            traced values, which cannot be looked at.
        TypeError: another dtype.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"`x` (dtype {x.dtype}) must be float32, bfloat16 or float16")
    if x.ndim == 0:
        raise ValueError("`x` (a scalar) must have a last axis to cut into blocks")
    format.check_size("x.shape[-1]", x.shape[-1])
    if scale_rule not in SCALE_RULES:
        raise ValueError(f"`scale_rule` (={scale_rule!r}) must be one of {sorted(SCALE_RULES)}")
    if nonfinite == "refuse":
        _refuse_nonfinite(x)
    elif nonfinite != "nan_block":
        raise ValueError(f"`nonfinite` (={nonfinite!r}) must be 'refuse' or 'nan_block'")
    return _quantize(x, format.block_size, SCALE_RULES[scale_rule])


def _refuse_nonfinite(x: Array) -> None:
    if isinstance(x, Tracer):
        raise ValueError(
            "`nonfinite` (='refuse') must look at the values of `x`, which is traced: "
            "quantize outside jit, or pass nonfinite='nan_block'"
        )
    finite = jnp.isfinite(x)
    if not finite.all():
        bad = np.argwhere(~np.asarray(finite))
        first = tuple(int(i) for i in bad[0])
        raise ValueError(f"`x` holds {len(bad)} NaN or infinite values, the first (={x[first]}) at {first}")


@partial(jax.jit, static_argnums=(1, 2))
def _quantize(x: Array, block_size: int, scale_addend: int) -> BlockScaled:
    bits = codes.float32_bits(x).reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)
    magnitude = (bits & 0x7FFFFFFF).astype(jnp.int32)
    amax = magnitude.max(axis=-1, keepdims=True, initial=0)  # float32 bits order as the magnitudes do
    # A subnormal amax has exponent field 0, two below the least scale: the clamp is its right answer.
    scale = jnp.maximum(((amax + scale_addend) >> 23) - _E2M1_MAX_EXPONENT, 0)
    scale = jnp.where(amax == 0, _SCALE_ONE, scale)
    scale = jnp.where(amax >= codes.F32_INF, codes.SCALE_NAN, scale)

    quotient = codes.over_power_of_two(magnitude, scale)
    elements = sum((quotient >= midpoint).astype(jnp.uint8) for midpoint in _midpoints())
    elements |= (bits >> 28).astype(jnp.uint8) & 8
    elements = jnp.where(scale == codes.SCALE_NAN, jnp.uint8(0), elements).reshape(x.shape)
    packed = elements[..., 0::2] | elements[..., 1::2] << 4
    return unpack(BlockScaled(packed, scale[..., 0].astype(jnp.uint8)))


def dequantize(q: BlockScaled, dtype: Any = jnp.bfloat16, format: Format = MXFP4) -> jax.Array:
    """Floats of a weight, built by integer operations: the same bits on every platform.

    Exact wherever `dtype` can represent the value (subnormals included), else +-inf; scale code 255 makes the whole
    block NaN; zeros keep their sign.

    Args:
        q: canonical or packed weight of logical shape (..., K).
        dtype: bfloat16 or float32.
        format: the block format of `q`.

    Returns:
        (..., K) of `dtype`.

    Raises:
        ValueError: arrays that do not fit each other.
        TypeError: arrays or a `dtype` of another type. (float16 is refused: most scales lie outside its range.)
    """
    shape = logical_shape(q, format)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"`dtype` (={jnp.dtype(dtype)}) must be bfloat16 or float32")
    return _dequantize(q, shape, jnp.dtype(dtype), format.block_size)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _dequantize(q: BlockScaled, shape: tuple[int, ...], dtype: np.dtype, block_size: int) -> jax.Array:
    values, scales = pack(q)  # uint8: XLA's CPU compiler widens whole float4 arrays that are sliced in a loop
    blocks = values.reshape(*scales.shape, block_size // 2)
    return codes.floats(blocks, scales[..., None], dtype).reshape(shape)


def is_packed(q: BlockScaled) -> bool:
    """Whether the values of `q` are uint8 bytes of two weights each."""
    return q.values.dtype == jnp.uint8


def logical_shape(q: BlockScaled, format: Format = MXFP4) -> tuple[int, ...]:
    """Shape (..., N, K) of the weight that `q` holds, canonical or packed.

    Raises:
        TypeError: dtypes that are neither the format's nor uint8, or values and scales of which one is packed.
        ValueError: scales that do not fit the values.
    """
    packed = is_packed(q)
    *lead, size = q.values.shape
    shape = (*lead, size * 8 // format.element_bits if packed else size)
    for name, array, expected in zip(format.arrays, q, format.abstract(shape, packed=packed), strict=True):
        if array.dtype != expected.dtype:
            raise TypeError(
                f"`{name}` (dtype {array.dtype}) must be {expected.dtype} for "
                f"{'packed' if packed else 'canonical'} {format.name.upper()}"
            )
        if array.shape != expected.shape:
            raise ValueError(
                f"`{name}` (shape {array.shape}) must be {expected.shape} for {format.name.upper()} of shape {shape}"
            )
    return shape


def pack(q: BlockScaled) -> BlockScaled:
    """Canonical to packed: uint8 values (..., K / 2), even elements in the low nibbles, and uint8 scales.

    numpy arrays (of ml_dtypes) stay in numpy, others are bitcast by XLA. A packed `q` is returned as it is.
    """
    if is_packed(q):
        return q
    pairs = q.values.reshape(*q.values.shape[:-1], q.values.shape[-1] // 2, 2)
    if isinstance(q.values, np.ndarray):
        nibbles = pairs.view(np.uint8) & 15
        return BlockScaled(nibbles[..., 0] | nibbles[..., 1] << 4, q.scales.view(np.uint8))
    return BlockScaled(lax.bitcast_convert_type(pairs, jnp.uint8), lax.bitcast_convert_type(q.scales, jnp.uint8))


def unpack(q: BlockScaled, format: Format = MXFP4) -> BlockScaled:
    """Packed to canonical, the inverse of `pack`. A canonical `q` is returned as it is."""
    if not is_packed(q):
        return q
    shape = logical_shape(q, format)
    if isinstance(q.values, np.ndarray):
        nibbles = np.stack([q.values & 15, q.values >> 4], axis=-1).reshape(shape)
        return BlockScaled(nibbles.view(format.element_dtype), q.scales.view(format.scale_dtype))
    values = lax.bitcast_convert_type(q.values, format.element_dtype).reshape(shape)
    return BlockScaled(values, lax.bitcast_convert_type(q.scales, format.scale_dtype))


def pad(q: BlockScaled, shape: tuple[int, int], format: Format = MXFP4) -> BlockScaled:
    """Extends the last two axes (N, K) to `shape` with zero values and scales of 1.0, canonical or packed.

    Raises:
        ValueError: `shape` below the present one, or its K not a whole number of blocks.
    """
    *lead, rows, columns = logical_shape(q, format)
    if shape[0] < rows or shape[1] < columns:
        raise ValueError(f"`shape` (={tuple(shape)}) must be at least {(rows, columns)}, the weight's own")
    target = format.abstract((*lead, *shape), packed=is_packed(q))
    # e8m0 has no zero: a scale filled with zeros would be NaN.
    one = _SCALE_ONE if is_packed(q) else 1.0
    return BlockScaled(_extend(q.values, target.values, 0), _extend(q.scales, target.scales, one))


def _extend(array: Array, target: jax.ShapeDtypeStruct, fill: float) -> jax.Array:
    widths = [(0, new - old, 0) for old, new in zip(array.shape, target.shape, strict=True)]
    return lax.pad(array, jnp.array(fill, target.dtype), widths)


def unpad(q: BlockScaled, shape: tuple[int, int], format: Format = MXFP4) -> BlockScaled:
    """Cuts the last two axes to `shape` (N, K), the inverse of `pad`.

    Raises:
        ValueError: `shape` above the present one, or its K not a whole number of blocks.
    """
    *lead, rows, columns = logical_shape(q, format)
    if shape[0] > rows or shape[1] > columns:
        raise ValueError(f"`shape` (={tuple(shape)}) must be at most {(rows, columns)}, the weight's own")
    target = format.abstract((*lead, *shape), packed=is_packed(q))
    return BlockScaled(*(a[..., : t.shape[-2], : t.shape[-1]] for a, t in zip(q, target, strict=True)))


def random(key: Array, shape: tuple[int, ...], format: Format = MXFP4) -> BlockScaled:
    """A random packed weight of logical `shape` (..., N, K), codes and scales drawn directly.

    Codes are uniform over all element codes. Scales are two neighbouring powers of two such that the standard
    deviation is K ** -0.5 within a factor of 2.
    """
    abstract = format.abstract(shape, packed=True)
    codes_key, scales_key = jax.random.split(key)
    elements = np.arange(1 << format.element_bits, dtype=np.uint8).view(format.element_dtype).astype(np.float64)
    exponent = int(np.floor(np.log2(shape[-1] ** -0.5 / elements.std())))
    values = jax.random.bits(codes_key, abstract.values.shape, jnp.uint8)
    low = _SCALE_ONE + exponent
    scales = jax.random.randint(scales_key, abstract.scales.shape, low, low + 2, jnp.int32)
    return BlockScaled(values, scales.astype(jnp.uint8))
