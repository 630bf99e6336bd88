"""Four elements of each word of 16 bits, as bfloat16, in operations of Pallas Triton.

Compiled, a thread works on two words at a time, in one register, and makes two weights by each instruction: see
`elements`. Interpreted on a CPU, where PTX does not run, jnp computes the same.

Elements of one place stand next to each other in a register, those of one word do not. So columns come in another
order, the *turned* one, which x is brought into: of every CHUNK columns first those of place 0, every fourth one, then
those of place 1, and so on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jmx.numerics.formats import MXFP4, NVFP4, Format
from jmx.pallas.triton.elements import FACTORS, OFFSET, PLACES, Elements, elements_of, num_factors

Array = jax.Array

RUN = 16  # words whose elements of a place stand together: as many columns as an instruction of tensor cores takes
CHUNK = PLACES * RUN


class Groups(NamedTuple):
    """What elements share by the block: arrays (N, groups), each group of as many words; None: not by the block.

    Args:
        scales: of a packed weight's dtype: uint8 codes, or floats. Of codes also their factors, bfloat16.
        zero_points: int8.
    """

    scales: Any
    zero_points: Any


def turned(x: Array) -> Array:
    """(rows, K) -> (rows, K up to a multiple of CHUNK): columns in the turned order, zeros where there are none."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK)))
    return x.reshape(x.shape[0], -1, RUN, PLACES).swapaxes(2, 3).reshape(x.shape)


def column_at(index: Any) -> Any:
    """The column that stands at each index of the turned order."""
    return index // CHUNK * CHUNK + index % RUN * PLACES + index % CHUNK // RUN


def index_of(place: Any, word: Any) -> Any:
    """Where the element at `place` of each word stands in the turned order."""
    return word // RUN * CHUNK + place * RUN + word % RUN


def elements(format: Format, scale_dtype: Any) -> Elements:
    """Those of a packed weight with scales of `scale_dtype`."""
    return elements_of(format, format.scale_dtype if scale_dtype == jnp.uint8 else scale_dtype)


def are_nan(codes: Any, format: Format) -> Any:
    """Which scale codes are NaN, bool. What is decoded with one may be anything; floats pass their NaN on."""
    return codes == 255 if format == MXFP4 else (codes & 0x7F) == 0x7F


def weights_by_place(words: Array, groups: Groups, format: Format, interpret: bool) -> list[Array]:
    """The elements at each place of words, less their zero points, times their scales.

    Exact where bfloat16 has it, infinite beyond; of integers times scales of blocks rounded to nearest.

    Args:
        words: int16 (N, n).
        groups: each of n / groups words.
        format: of 4 bits an element.
        interpret: whether to compute it in jnp, for a CPU.

    Returns:
        PLACES arrays, bfloat16 (N, n).
    """
    if interpret:
        spread = Groups(*(None if array is None else _spread(array, words) for array in groups))
        return [_interpreted(words, place, spread, format) for place in range(PLACES)]
    factors = _factors(groups, words, format)
    return [pairs(text, words, *factors) for text in _elements(groups, format).at]


def weights_turned(words: Array, groups: Groups, format: Format, interpret: bool, tables: list[Array]) -> Array:
    """`weights_by_place` of all places, bfloat16 (N, PLACES * n), in the turned order.

    Args:
        tables: those of `elements`, loaded: Triton moves layouts over loads alone.
    """
    if interpret:
        places = [weights.reshape(-1, RUN) for weights in weights_by_place(words, groups, format, interpret)]
        return jnp.stack(places, axis=1).reshape(words.shape[0], -1)
    shape = (words.shape[0], words.shape[1] // RUN, PLACES, RUN)

    def of_words(array: Array) -> Array:
        return jnp.broadcast_to(array.reshape(*shape[:2], 1, RUN), shape).reshape(shape[0], -1)

    def of_places(array: Array) -> Array:
        array = jnp.broadcast_to(array[:, None], (array.size, PLACES // array.size)).reshape(PLACES)
        return jnp.broadcast_to(array[None, None, :, None], shape).reshape(shape[0], -1)

    arguments = [of_words(array) for array in (words, *_factors(groups, words, format))]
    return pairs(_elements(groups, format).at_any, *arguments, *map(of_places, tables))


def _elements(groups: Groups, format: Format) -> Elements:
    return elements(format, format.scale_dtype if groups.scales is None else groups.scales.dtype)


def _factors(groups: Groups, words: Array, format: Format) -> list[Array]:
    """What the texts of `elements` take beside words, 16 bits each, of words' shape."""
    factors = []
    if groups.zero_points is not None:
        factors.append(offsets(groups.zero_points))
    if groups.scales is not None and groups.scales.dtype == jnp.uint8:
        factors.append(pairs(FACTORS[format.scale_dtype], groups.scales.astype(jnp.int16)))
    elif groups.scales is not None and num_factors(format, groups.scales.dtype) == 1:
        factors.append(groups.scales)
    elif groups.scales is not None:
        factors += halves(groups.scales)
    return [_spread(factor, words) for factor in factors]


def offsets(zero_points: Array) -> Array:
    """int8 zero points from -8 to 119 as the factor that subtracts them: bits of bfloat16."""
    return zero_points.astype(jnp.int16) + jnp.int16(OFFSET - (1 << 16))


def halves(scales: Array) -> tuple[Array, Array]:
    """Two bfloat16 whose sum is a scale, to 15 bits: the larger one is cut, since rounded it could be infinite."""
    scales = scales.astype(jnp.float32)
    bits = lax.bitcast_convert_type(scales, jnp.int32) & jnp.int32(-1 << 16)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (scales - high).astype(jnp.bfloat16)


def _spread(array: Array, words: Array) -> Array:
    if array.shape[1] == 1:
        return jnp.broadcast_to(array, words.shape)
    shape = (*array.shape, words.shape[1] // array.shape[1])
    return jnp.broadcast_to(array[:, :, None], shape).reshape(words.shape)


def pairs(text: str, *arguments: Array) -> Array:
    """PTX on two neighbours at a time: in one register, where they have 16 bits, else in two."""
    registers = sum(array.dtype.itemsize // 2 for array in arguments)
    (result,) = plgpu.elementwise_inline_asm(
        text,
        args=arguments,
        constraints=",".join(["=r", *["r"] * registers]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, jnp.bfloat16)],
    )
    return result


# Interpreted. By way of float32, which has all elements as normal numbers: a CPU makes zeros of subnormal ones.

_BITS = 0x8E00 - 0x10000  # of an element e2m1, where float16 has them: they are 2^-14 times the element
_SHIFT = 14


def _interpreted(words: Array, place: int, groups: Groups, format: Format) -> Array:
    top = words.astype(jnp.int32) << 28 - 4 * place
    if format.element_dtype == jnp.int4:
        element = (top >> 28).astype(jnp.float32)
        if groups.zero_points is not None:
            element -= groups.zero_points.astype(jnp.float32)
        scaled = element if groups.scales is None else element * groups.scales.astype(jnp.float32)
        return scaled.astype(jnp.bfloat16)
    bits = ((top >> 19) & _BITS).astype(jnp.int16)
    element = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    if format == NVFP4:
        scale = lax.bitcast_convert_type(groups.scales, format.scale_dtype).astype(jnp.float32)
        return (element * 2.0**_SHIFT * scale).astype(jnp.bfloat16)
    # Neither of the power's two factors nor their products with an element leave the normal numbers before the result.
    code = groups.scales.astype(jnp.int32) - (127 - _SHIFT)
    low, high = (lax.bitcast_convert_type(power + 127 << 23, jnp.float32) for power in (code >> 1, code - (code >> 1)))
    return (element * low * jnp.where(are_nan(groups.scales, format), jnp.nan, high)).astype(jnp.bfloat16)
