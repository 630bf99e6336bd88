"""Decodes the four elements of each 16-bit word to bfloat16, in operations of Pallas Triton.

Compiled, a thread processes two words at a time, in one register, and each instruction yields two weights: see `ptx`.
Interpreted on a CPU, where PTX does not run, jnp computes the same.

In a register, elements at one position of neighboring words are adjacent; the elements of one word are not. So columns
are *permuted*, those of x included: of every CHUNK columns, first every fourth one, which are position 0 of RUN words,
then the ones after those, position 1, and so on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jmx.numerics.formats import MXFP4, NVFP4, Format
from jmx.pallas.triton.ptx import FACTORS, OFFSET, WORD_ELEMENTS, decoder_for, num_factors
from jmx.util.typing import AnyArray, Array, Bool, Float, Int8, Int16, Integer, Shaped

RUN = 16  # words whose elements at one position are adjacent: the columns that a tensor core instruction takes
CHUNK = WORD_ELEMENTS * RUN


class GroupParams(NamedTuple):
    """What elements share by group: (N, groups), each group of equally many words. None where the format has none.

    Args:
        scales: of a packed weight's dtype: uint8 codes, or floats. In place of codes also their factors, bfloat16.
        zero_points: int8.
    """

    scales: Shaped[Any, "N g"] | None
    zero_points: Int8[Any, "N g"] | None


def permute_columns(x: Shaped[Array, "R K"]) -> Shaped[Array, "R padded"]:
    """(rows, K) -> (rows, K rounded up to a multiple of CHUNK): columns in the permuted order, padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK)))
    return x.reshape(x.shape[0], -1, RUN, WORD_ELEMENTS).swapaxes(2, 3).reshape(x.shape)


def column_at(index: Any) -> Any:
    """The column at each index of the permuted order."""
    return index // CHUNK * CHUNK + index % RUN * WORD_ELEMENTS + index % CHUNK // RUN


def permuted_index(position: Any, word: Any) -> Any:
    """The index in the permuted order of the element at `position` of each word."""
    return word // RUN * CHUNK + position * RUN + word % RUN


def packed_decoder(format: Format, scale_dtype: Any) -> tuple[str, ...]:
    """`decoder_for` a packed weight with scales of `scale_dtype`, uint8 for codes."""
    return decoder_for(format, format.scale_dtype if scale_dtype == jnp.uint8 else scale_dtype)


def are_nan(codes: Integer[AnyArray, "..."], format: Format) -> Bool[AnyArray, "..."]:
    """Which scale codes are NaN. Weights decoded with such a code are undefined; NaN of float scales propagate."""
    return codes == 255 if format == MXFP4 else (codes & 0x7F) == 0x7F


def decode_by_position(
    words: Int16[Array, "N n"], groups: GroupParams, format: Format, interpret: bool
) -> list[Float[Array, "N n"]]:
    """(element - zero point) * scale of the elements at each position of words.

    Exact where bfloat16 holds the result, infinite beyond; integers times group scales are rounded to nearest.

    Args:
        words: int16 (N, n).
        groups: each of n / groups words.
        format: of 4-bit elements.
        interpret: whether to compute in jnp, for a CPU.

    Returns:
        WORD_ELEMENTS arrays, bfloat16 (N, n).
    """
    if interpret:
        spread = GroupParams(*(None if array is None else _spread(array, words) for array in groups))
        return [_decode_interpreted(words, position, spread, format) for position in range(WORD_ELEMENTS)]
    factors = _factors(groups, words, format)
    return [apply_ptx(text, words, *factors) for text in _decoder(groups, format)]


def decode_permuted(
    words: Int16[Array, "N n"], groups: GroupParams, format: Format, interpret: bool
) -> Float[Array, "N 4*n"]:
    """`decode_by_position` of all positions in one array, bfloat16 (N, WORD_ELEMENTS * n), in the permuted order."""
    weights = decode_by_position(words, groups, format, interpret)
    while len(weights) > 1:  # Triton joins two arrays at a time
        weights = [jnp.stack(pair, axis=-1) for pair in zip(weights[::2], weights[1::2], strict=True)]
    by_run = weights[0].reshape(words.shape[0], -1, RUN, 2, 2)  # a position's low bit, then its high one
    return by_run.transpose(0, 1, 4, 3, 2).reshape(words.shape[0], -1)


def _decoder(groups: GroupParams, format: Format) -> tuple[str, ...]:
    return packed_decoder(format, format.scale_dtype if groups.scales is None else groups.scales.dtype)


def _factors(groups: GroupParams, words: Int16[Array, "N n"], format: Format) -> list[Shaped[Array, "N n"]]:
    """What the PTX takes besides words, 16 bits each, of words' shape."""
    factors = []
    if groups.zero_points is not None:
        factors.append(zero_point_offsets(groups.zero_points))
    if groups.scales is not None and groups.scales.dtype == jnp.uint8:
        factors.append(apply_ptx(FACTORS[format.scale_dtype], groups.scales.astype(jnp.int16)))
    elif groups.scales is not None and num_factors(format, groups.scales.dtype) == 1:
        factors.append(groups.scales)
    elif groups.scales is not None:
        factors += split_scales(groups.scales)
    return [_spread(factor, words) for factor in factors]


def zero_point_offsets(zero_points: Int8[Array, "*shape"]) -> Int16[Array, "*shape"]:
    """Zero points from -8 to 119 as the bits of the bfloat16 number whose addition subtracts them."""
    return zero_points.astype(jnp.int16) + jnp.int16(OFFSET - (1 << 16))


def split_scales(scales: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Two bfloat16 whose sum is the scale, to 15 bits. The larger is truncated: rounded it could be infinite."""
    scales = scales.astype(jnp.float32)
    bits = lax.bitcast_convert_type(scales, jnp.int32) & jnp.int32(-1 << 16)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (scales - high).astype(jnp.bfloat16)


def _spread(array: Shaped[Array, "N g"], words: Shaped[Array, "N n"]) -> Shaped[Array, "N n"]:
    """Repeats each group's entry for each of its words."""
    if array.shape[1] == 1:
        return jnp.broadcast_to(array, words.shape)
    shape = (*array.shape, words.shape[1] // array.shape[1])
    return jnp.broadcast_to(array[:, :, None], shape).reshape(words.shape)


def apply_ptx(text: str, *arguments: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """bfloat16 results of PTX on two neighbors at a time: arguments of 16 bits share a register, others take two."""
    registers = sum(array.dtype.itemsize // 2 for array in arguments)
    (result,) = plgpu.elementwise_inline_asm(
        text,
        args=arguments,
        constraints=",".join(["=r", *["r"] * registers]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, jnp.bfloat16)],
    )
    return result


# Interpreted, e2m1 elements pass through float32, where all are normal numbers: CPUs flush subnormals to zero.

_FLOAT16_MASK = 0x8E00 - 0x10000  # bits of an e2m1 element moved to those of float16, which is 2^-14 times its value
_FLOAT16_EXPONENT = 14


def _decode_interpreted(
    words: Int16[Array, "N n"], position: int, groups: GroupParams, format: Format
) -> Float[Array, "N n"]:
    top = words.astype(jnp.int32) << 28 - 4 * position
    if format.element_dtype == jnp.int4:
        element = (top >> 28).astype(jnp.float32)
        if groups.zero_points is not None:
            element -= groups.zero_points.astype(jnp.float32)
        scaled = element if groups.scales is None else element * groups.scales.astype(jnp.float32)
        return scaled.astype(jnp.bfloat16)
    assert groups.scales is not None
    bits = ((top >> 19) & _FLOAT16_MASK).astype(jnp.int16)
    element = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    if format == NVFP4:
        scale = lax.bitcast_convert_type(groups.scales, format.scale_dtype).astype(jnp.float32)
        return (element * 2.0**_FLOAT16_EXPONENT * scale).astype(jnp.bfloat16)
    # The power of two is applied as two factors, so that they and the first product are normal numbers.
    code = groups.scales.astype(jnp.int32) - (127 - _FLOAT16_EXPONENT)
    low, high = (lax.bitcast_convert_type(power + 127 << 23, jnp.float32) for power in (code >> 1, code - (code >> 1)))
    return (element * low * jnp.where(are_nan(groups.scales, format), jnp.nan, high)).astype(jnp.bfloat16)
