"""Input formats: the formats that activations are rounded to before a product, and the choice of a layer's format.

In a format the elements that share a scale are a block along the last axis, a row (a token), or the whole tensor.
*Dynamic* scales are computed from the elements that share them; *static* ones are found by calibration and stored in a
checkpoint.

Kernels and checkpoint tools differ in details. Here all formats follow the same rules, which never hide a NaN:

* Dynamic scales are at least the least positive scale: 2^-126 in float32 (the least that no platform flushes), 2^-9 in
  e4m3, 2^-127 in e8m0. Rows and blocks of zeros get it. (Only MXFP4 gives those a scale of 1.)
* An element is x divided by its scale: the float32 quotient, rounded to nearest, then rounded to the element dtype,
  ties to even both times. It is never a product with a reciprocal, whose last bit may differ.
* Elements saturate. Zeros keep their sign if the element dtype has one.
* NaN or infinity among elements that share a dynamic scale makes that scale NaN and these elements 0. With a static
  scale only (`fp8_static`) it makes the one element NaN. Products of that token are then NaN, and in `fp8_tensor`,
  whose tokens share one scale, those of all.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.core import Tracer

from jmx.numerics import element_codes, formats, mxfp8, quantization, rounding
from jmx.util.checks import check_array, check_instance, check_one_of
from jmx.util.typing import AnyArray, Array, Bool, Float, Float32, Int32, Integer, Num, Shaped, UInt8

StaticScale = Float32[AnyArray, ""] | np.float32


@dataclass(frozen=True)
class InputFormat:
    """A format that activations are rounded to before a product.

    Args:
        name: key in `INPUT_FORMATS`.
        element_dtype: dtype of the values.
        block_size: how many elements of the last axis share a scale; "row": the whole axis; "tensor": the whole tensor.
        scale_dtype: dtype of the scales.
        static: whether there is a static scale: float32, one for a tensor, a factor of every element's value.
        short_block: whether the last block of the last axis may be shorter.
    """

    name: str
    element_dtype: np.dtype
    block_size: int | Literal["row", "tensor"]
    scale_dtype: np.dtype
    static: bool = False
    short_block: bool = False

    @property
    def dynamic(self) -> bool:
        """Whether scales are computed from the elements."""
        return not self.static or self.block_size != "tensor"

    @property
    def by_token(self) -> bool:
        """Whether what becomes of a token does not depend on other tokens."""
        return self.static or self.block_size != "tensor"

    @property
    def largest(self) -> float:
        """The largest element; with both dynamic and static scales, times the largest dynamic scale."""
        element = 127.0 if self.element_dtype == np.int8 else float(ml_dtypes.finfo(self.element_dtype).max)
        return element * float(ml_dtypes.finfo(self.scale_dtype).max) if self.static and self.dynamic else element

    def check_size(self, name: str, size: int) -> None:
        """Raises ValueError, naming the argument `name`, unless `size` is a whole number of blocks, if it must be."""
        if isinstance(self.block_size, int) and not self.short_block and size % self.block_size:
            raise ValueError(f"`{name}` (={size}) must be a multiple of {self.block_size} for {self.name} inputs")

    def check_sizes(self, hidden_size: int, intermediate_size: int) -> None:
        """`check_size` of the inputs of both products."""
        self.check_size("hidden_size", hidden_size)
        self.check_size("intermediate_size", intermediate_size)

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of x of `shape` (..., K): (..., K / block_size rounded up), (..., 1) for rows, () for a
        tensor."""
        if self.block_size == "tensor":
            return ()
        return (*shape[:-1], 1 if self.block_size == "row" else -(-shape[-1] // self.block_size))


class QuantizedInputs(NamedTuple):
    """Activations in an input format; a pytree. An element represents value * scale * `global_scale`.

    `values` (..., K) of the format's element dtype, `scales` of its scale dtype and of `InputFormat.scales_shape`,
    `global_scale` float32 (): the static scale of formats that have dynamic scales too; else None, which counts as 1.
    """

    values: Shaped[Any, "*lead K"]
    scales: Shaped[Any, "..."]
    global_scale: Float32[Any, ""] | None = None


_E4M3, _E2M1 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float4_e2m1fn)
_F32, _E8M0 = np.dtype(jnp.float32), np.dtype(jnp.float8_e8m0fnu)

FP8_STATIC = InputFormat("fp8_static", _E4M3, "tensor", _F32, static=True)
FP8_TENSOR = InputFormat("fp8_tensor", _E4M3, "tensor", _F32)
FP8_TOKEN = InputFormat("fp8_token", _E4M3, "row", _F32)
FP8_BLOCK = InputFormat("fp8_block", _E4M3, 128, _F32, short_block=True)
FP8_BLOCK_UE8M0 = InputFormat("fp8_block_ue8m0", _E4M3, 128, _E8M0, short_block=True)
MXFP8 = InputFormat("mxfp8", _E4M3, formats.MXFP8.block_size, _E8M0)
MXFP4 = InputFormat("mxfp4", _E2M1, formats.MXFP4.block_size, _E8M0)
NVFP4 = InputFormat("nvfp4", _E2M1, 16, _E4M3, static=True)
INT8_TOKEN = InputFormat("int8_token", np.dtype(np.int8), "row", _F32)

INPUT_FORMATS: dict[str, InputFormat] = {
    format.name: format
    for format in (FP8_STATIC, FP8_TENSOR, FP8_TOKEN, FP8_BLOCK, FP8_BLOCK_UE8M0, MXFP8, MXFP4, NVFP4, INT8_TOKEN)
}

# Names for requests without a variant. Variants that are only dynamic come first, as they need no calibration; among
# these, those with finer scales come later, as they work with fewer weight formats, and then the one in which a token's
# result depends on the others.
FAMILIES: dict[str, tuple[str, ...]] = {
    "fp8": ("fp8_token", "fp8_block", "fp8_block_ue8m0", "fp8_tensor", "fp8_static"),
    "fp4": ("mxfp4", "nvfp4"),
    "int8": ("int8_token",),
}

_LEAST_SCALE = 1 << 23  # 2^-126, as float32 bits
_E4M3_NAN = 0x7F


def quantize(
    x: Float[AnyArray, "*lead K"], format: InputFormat, static_scale: StaticScale | None = None
) -> QuantizedInputs:
    """Rounds activations to an input format, the same bits on every platform. Traceable.

    Scales, with amax the largest magnitude among the elements that share one, float32 operations rounded to nearest:

    * `fp8_static`: `static_scale`. compressed-tensors (`lifecycle/forward.py`, static strategy "tensor") and vLLM
      (`static_scaled_fp8_quant`, which multiplies by the reciprocal).
    * `fp8_tensor`: amax / 448 of the whole tensor. compressed-tensors (dynamic strategy "tensor") and vLLM
      (`dynamic_scaled_fp8_quant`, which multiplies by the reciprocal).
    * `fp8_token`: amax / 448. compressed-tensors (strategy "token"; floor 2^-23) and vLLM
      (`dynamic_per_token_scaled_fp8_quant`; floor 1 / (448 * 512), which costs rows below 2^-9 precision).
    * `fp8_block`: amax / 448; the last block may be short. DeepGEMM (`per_token_cast_to_fp8`; amax at least 1e-4, and
      the reciprocal) and vLLM (`per_token_group_quant_8bit`; amax at least 1e-10, whole blocks).
    * `fp8_block_ue8m0`: 2^ceil(log2(amax / 448)), at least 2^-127; the last block may be short. DeepSeek-V3.2
      (`inference/kernel.py`, `act_quant` with a `scale_fmt`) and DeepGEMM (`per_token_cast_to_fp8` with `use_ue8m0`):
      the exponent of float32's amax / 448, one more where its mantissa is not 0, which is the same number; amax at
      least 1e-4 in both. No element saturates, and nothing but elements is rounded.
    * `int8_token`: amax / 127. vLLM (`dynamic_scaled_int8_quant`, which multiplies by 127 / amax; compressed-tensors
      divides amax by 127.5). No element reaches -128.
    * `mxfp8`: that of `fp8_block_ue8m0` in blocks of 32, see `jmx.numerics.mxfp8`.
    * `mxfp4`: see `quantization.quantize`, scale rule "round_even", that of compressed-tensors (`mxfp4_utils.py`).
    * `nvfp4`: e4m3 of amax / (6 * static_scale), at most 448; elements are x / (scale * static_scale). ModelOpt
      (`NVFP4QTensor`; blocks whose scale would be 0 differ there). The global scale of compressed-tensors is the
      reciprocal of `static_scale`, which here always multiplies.

    Args:
        x: float32, bfloat16 or float16 (..., K).
        format: one of `INPUT_FORMATS`.
        static_scale: float32 (), for formats that are `static`; None for others. It must be a normal float32 (2^-126
            or more), and small enough for the largest number of the format to be finite. If a traced one is not, the
            result is NaN.

    Raises:
        ValueError: another format, K not a whole number of blocks, a scalar, a static scale that is missing, not
            needed, of another shape or out of range.
        TypeError: another dtype, or not an array.
    """
    _check_format(format)
    if check_array("x", x).dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"`x` (dtype {x.dtype}) must be float32, bfloat16 or float16")
    if x.ndim == 0:
        raise ValueError("`x` (a scalar) must have a last axis to round along")
    format.check_size("x.shape[-1]", x.shape[-1])
    _check_static_scale(format, static_scale)
    if format == MXFP4:
        q = quantization.quantize(x, formats.MXFP4, scale_rule="round_even", nonfinite="nan_block")
        return QuantizedInputs(q.values, q.scales)
    if format.scale_dtype == _E8M0:
        return _quantize_by_powers_of_two(x, format)
    if format == FP8_TENSOR:
        q = _quantize_dynamic(x.reshape(1, -1), None, FP8_TOKEN)
        return QuantizedInputs(q.values.reshape(x.shape), q.scales.reshape(()))
    return (_quantize_dynamic if format.dynamic else _quantize_static)(x, static_scale, format)


def _check_format(format: Any) -> None:
    if format not in INPUT_FORMATS.values():
        raise ValueError(f"`format` (={format!r}) must be one of `INPUT_FORMATS`")


def _check_static_scale(format: InputFormat, scale: Any) -> None:
    if not format.static:
        if scale is not None:
            raise ValueError(
                f"`static_scale` (={scale}) must be None for {format.name} inputs: their scales are dynamic"
            )
        return
    if scale is None:
        raise ValueError(f"`static_scale` (=None) must be given for {format.name} inputs")
    if getattr(scale, "dtype", None) != jnp.float32:
        raise TypeError(f"`static_scale` ({getattr(scale, 'dtype', type(scale).__name__)}) must be a float32 scalar")
    if scale.shape != ():
        raise ValueError(f"`static_scale` (shape {scale.shape}) must be a scalar: one scale for a tensor")
    check_static_range("static_scale", scale, format)


def check_static_range(name: str, scales: Float32[AnyArray, "..."] | np.float32, format: InputFormat) -> None:
    """Raises ValueError for static scales, float32, outside `static_limits`; traced ones are not checked."""
    if isinstance(scales, Tracer):
        return
    least, most = static_limits(format)
    given = np.asarray(scales)
    if not ((given >= least) & (given <= most)).all():
        raise ValueError(f"`{name}` (={given}) must lie between {least} and {most} for {format.name} inputs")


def static_limits(format: InputFormat) -> tuple[np.float32, np.float32]:
    """The least and the largest static scale of a static format."""
    limits = np.finfo(np.float32)
    return limits.tiny, np.nextafter(limits.max / np.float32(format.largest), np.float32(0))


@partial(jax.jit, static_argnums=2)
def _quantize_static(
    x: Float[Array, "*lead K"], static_scale: Float32[Array, ""], format: InputFormat
) -> QuantizedInputs:
    magnitude, negative = _magnitude_and_sign(x)
    scale = _in_range(static_scale, format)
    elements = rounding.minifloat(rounding.divided(rounding.normalized(magnitude), scale), format.element_dtype)
    is_nan = (magnitude >= element_codes.F32_INF) | (scale == rounding.NAN)
    elements = jnp.where(is_nan, jnp.uint8(_E4M3_NAN), elements)
    return QuantizedInputs(
        _signed(elements, negative, format.element_dtype), lax.bitcast_convert_type(scale, jnp.float32)
    )


@partial(jax.jit, static_argnums=2)
def _quantize_dynamic(
    x: Float[Array, "*lead K"], static_scale: Float32[Array, ""] | None, format: InputFormat
) -> QuantizedInputs:
    magnitude, negative = _magnitude_and_sign(x)
    blocks = _in_blocks(magnitude, format)
    amax = blocks.max(axis=-1, keepdims=True, initial=0)  # float32 bits order as the magnitudes do
    is_nan = amax >= element_codes.F32_INF
    if static_scale is not None:
        given = _in_range(static_scale, format)
        is_nan |= given == rounding.NAN
        code, scale = _nvfp4_scale(amax, given)
        scales = lax.bitcast_convert_type(jnp.where(is_nan, jnp.uint8(_E4M3_NAN), code), format.scale_dtype)
    else:
        scale = rounding.divided(rounding.normalized(amax), rounding.bits_of(format.largest))
        scale = jnp.maximum(scale, _LEAST_SCALE)
        scales = lax.bitcast_convert_type(jnp.where(is_nan, rounding.NAN, scale), format.scale_dtype)
    quotient = rounding.divided(rounding.normalized(blocks), rounding.normalized(scale))
    if format == INT8_TOKEN:
        elements = rounding.integer(quotient).astype(jnp.int8)
    else:
        elements = rounding.minifloat(quotient, format.element_dtype)
    elements = _out_of_blocks(jnp.where(is_nan, jnp.zeros_like(elements), elements), x.shape)
    return QuantizedInputs(_signed(elements, negative, format.element_dtype), scales[..., 0], static_scale)


@partial(jax.jit, static_argnums=1)
def _quantize_by_powers_of_two(x: Float[Array, "*lead K"], format: InputFormat) -> QuantizedInputs:
    elements, scales = mxfp8.quantize_blocks(_in_blocks(element_codes.float32_bits(x), format))
    return QuantizedInputs(_out_of_blocks(elements, x.shape), scales)


def _in_blocks(x: Num[Array, "*lead K"], format: InputFormat) -> Num[Array, "*lead b n"]:
    """(..., K) as (..., blocks, elements of one); a short last block is padded with zeros, which change no scale."""
    *lead, size = x.shape
    shared = format.block_size if isinstance(format.block_size, int) else size
    count = format.scales_shape(x.shape)[-1]
    whole = jnp.pad(x, [(0, 0)] * len(lead) + [(0, count * shared - size)])
    return whole.reshape(*lead, count, shared)


def _out_of_blocks(blocks: Shaped[Array, "*lead b n"], shape: tuple[int, ...]) -> Shaped[Array, "*lead K"]:
    """The inverse of `_in_blocks`: (..., blocks, elements of one) to `shape`, (..., K)."""
    return blocks.reshape(*shape[:-1], blocks.shape[-2] * blocks.shape[-1])[..., : shape[-1]]


def _magnitude_and_sign(x: Float[Array, "*shape"]) -> tuple[Int32[Array, "*shape"], Bool[Array, "*shape"]]:
    bits = element_codes.float32_bits(x)
    return (bits & 0x7FFFFFFF).astype(jnp.int32), bits >> 31 == 1


def _in_range(static_scale: Float32[Array, ""], format: InputFormat) -> Int32[Array, ""]:
    """float32 bits of a static scale; NaN if it is traced, so that no error was raised, and out of range."""
    least, most = (rounding.bits_of(limit) for limit in static_limits(format))
    given = lax.bitcast_convert_type(static_scale, jnp.int32)
    return jnp.where((given >= least) & (given <= most), given, rounding.NAN)


def _nvfp4_scale(
    amax: Int32[Array, "*shape"], static_scale: Int32[Array, ""]
) -> tuple[UInt8[Array, "*shape"], Int32[Array, "*shape"]]:
    """Codes of the scales of blocks, and float32 bits of the divisors of elements."""
    limit = rounding.times(rounding.bits_of(6.0), static_scale)
    code = rounding.minifloat(rounding.divided(rounding.normalized(amax), limit), _E4M3)
    code = jnp.maximum(code, 1)
    return code, rounding.times(_float32_bits(lax.bitcast_convert_type(code, _E4M3)), static_scale)


def _signed(
    elements: Integer[Array, "*lead K"], negative: Bool[Array, "*lead K"], dtype: np.dtype
) -> Shaped[Array, "*lead K"]:
    """Magnitudes, as codes or integers, and signs -> `dtype`."""
    if dtype == np.int8:
        return jnp.where(negative, -elements, elements)
    if dtype == _E4M3:
        return lax.bitcast_convert_type(elements | negative.astype(jnp.uint8) << 7, dtype)
    elements |= negative.astype(jnp.uint8) << 3
    packed = elements[..., 0::2] | elements[..., 1::2] << 4
    return lax.bitcast_convert_type(packed, dtype).reshape(elements.shape)


def dequantize(q: QuantizedInputs, format: InputFormat) -> Float32[Array, "*lead K"]:
    """The values of `q`, in `format`: float32 (..., K), the exact product of value and scales, rounded to nearest, ties
    to even.

    The same bits on every platform, subnormals included; products too large are infinite. If the value or a scale is
    NaN, so is the result; an infinite scale counts as NaN. Traceable.

    Raises:
        ValueError: another format, scales that do not fit the values.
        TypeError: not `QuantizedInputs`.
    """
    _check_format(format)
    check_instance("q", q, QuantizedInputs, "a jmx.numerics.input_formats.QuantizedInputs")
    expected = format.scales_shape(q.values.shape)
    if q.scales.shape != expected:
        raise ValueError(
            f"`q.scales` (shape {q.scales.shape}) must be {expected} for {format.name} inputs of shape {q.values.shape}"
        )
    return _dequantize(q, format)


@partial(jax.jit, static_argnums=1)
def _dequantize(q: QuantizedInputs, format: InputFormat) -> Float32[Array, "*lead K"]:
    bits, scale = _float32_bits(q.values), _float32_bits(q.scales)
    by_block = format.block_size != "tensor"
    if by_block:
        bits, scale = _in_blocks(bits, format), scale[..., None]
    product = rounding.times(bits & 0x7FFFFFFF, scale)
    if q.global_scale is not None:  # value times scale is exact: six significant bits at most
        product = rounding.times(product, _float32_bits(q.global_scale))
    signed = lax.bitcast_convert_type(jnp.where(bits < 0, product | -0x80000000, product), jnp.float32)
    return _out_of_blocks(signed, q.values.shape) if by_block else signed


def _float32_bits(x: Shaped[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Signed float32 bits (int32) of values or scales, which float32 holds exactly."""
    if x.dtype == _E8M0:
        return lax.bitcast_convert_type(element_codes.power_of_two(lax.bitcast_convert_type(x, jnp.uint8)), jnp.int32)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def reduce_static_scales(scales: Float[AnyArray, " E"] | Float[AnyArray, "E P"]) -> np.float32:
    """One static scale for all experts: the largest, with which no more inputs saturate than before.

    Warns (UserWarning) if they differ, as experts with smaller scales then get coarser inputs. vLLM does the same.

    Args:
        scales: float32, bfloat16 or float16 (E,), or (E, P) if an expert has P of them; factors of elements' values.
            (Global scales that divide, like those of compressed-tensors, must be inverted first.)

    Raises:
        ValueError: scales that are NaN, infinite, zero or negative; an empty array; another rank; traced ones.
        TypeError: another dtype, or not an array.
    """
    if isinstance(scales, Tracer):
        raise ValueError("`scales` must be known, and are traced: reduce them outside jit")
    if check_array("scales", scales).dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"`scales` (dtype {scales.dtype}) must be float32, bfloat16 or float16")
    if scales.ndim not in (1, 2) or not scales.size:
        raise ValueError(f"`scales` (shape {scales.shape}) must be (E,) or (E, P)")
    given = np.asarray(scales).astype(np.float32)
    for wrong in np.argwhere(~(np.isfinite(given) & (given > 0))):
        index = ", ".join(map(str, wrong))
        raise ValueError(
            f"`scales[{index}]` (={given[tuple(wrong)]}) must be positive and finite, as all {given.size} must"
        )
    most = given.max()
    if smaller := int((given < most).reshape(len(given), -1).any(axis=1).sum()):
        warnings.warn(
            f"static input scales differ: {smaller} of {len(given)} experts' are below the largest, {most}, which all "
            f"now use; the least is {given.min()}",
            UserWarning,
            stacklevel=2,
        )
    return most


def resolve(checkpoint: str | None, user: str | None, supported: Sequence[str | None]) -> str | None:
    """The input format of a layer: a key of `INPUT_FORMATS`, or None for the activations' own 16 or 32 bits.

    A checkpoint's format is used; a user may name the same, or its family. If the checkpoint names none, the user's is
    used; for a family the first variant, in the order of `FAMILIES`, that is supported. If neither names one, it is
    None if supported, else the first supported format. vLLM resolves them likewise (`oracle/mxfp4.py`).

    Args:
        checkpoint: the format that a checkpoint declares, or None.
        user: the format or family (a key of `FAMILIES`) that a user requests, or None.
        supported: the supported formats, in order of preference, with None if inputs may stay in their dtype.

    Raises:
        ValueError: an unknown name, checkpoint and user disagreeing, or no supported format.
    """
    if checkpoint is not None and checkpoint not in INPUT_FORMATS:
        raise ValueError(f"`checkpoint` (={checkpoint!r}) must be one of {[*INPUT_FORMATS]}")
    check_one_of("input_format", user, (*INPUT_FORMATS, *FAMILIES, None))
    variants = FAMILIES.get(user, (user,)) if user is not None else ()
    if checkpoint is not None and user is not None and checkpoint not in variants:
        raise ValueError(
            f"`input_format` (={user!r}) must be {checkpoint!r}, which the checkpoint declares, its family, or None"
        )
    if checkpoint is not None:
        wanted: Sequence[str | None] = (checkpoint,)
    elif user is not None:
        wanted = variants
    else:
        wanted = (None, *supported)
    for name in wanted:
        if name in supported:
            return name
    asked = repr(checkpoint or user) if checkpoint or user else "any"
    raise ValueError(f"{asked} inputs are not supported; supported: {[*supported]}")
