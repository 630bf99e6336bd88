"""Four elements of each word of 16 bits, as bfloat16, in operations of Pallas Triton.

Compiled, a thread works on two words at a time, in one register, and makes two weights by each instruction. Interpreted
on a CPU, where PTX does not run, jnp says the same.

An element's *place* is which of its word's four it is. Elements of one place stand next to each other in a register,
those of one word do not. So columns come in another order, the *turned* one, which x is brought into: of every CHUNK
columns first those of place 0, every fourth one, then those of place 1, and so on.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

Array = jax.Array

PLACES = 4  # elements of a word
RUN = 16  # words whose elements of a place stand together: as many columns as an instruction of tensor cores takes
CHUNK = PLACES * RUN
_NAN = 255  # scale code

# The bits of an element, where bfloat16 has its sign, the end of its exponent and the beginning of its mantissa, are
# 2^-126 times the element, subnormal where the element is.
_PLACE = 0x81C081C0
_UNIT = 0x7E807E80  # 2^126, twice; from here on elements are normal, and a power of any code keeps them exact
_NONE = 0x80008000  # -0, twice: what leaves every product alone

# A sign stands next to its exponent, and must be seven bits from it. So signs are brought six bits up first, among
# elements whose turn is another time: those of places 0 and 1 to where 2 and 3 are, and the other way round. SIGNS has
# where they then are, for either two places. After that an element, with its sign, is one turn away from its place.
SIGNS = np.array([0x22002200, 0x00220022], np.int32)
TURNS = np.array([6, 2, 30, 26], np.int32)

# The powers of two that the two codes in $1 name. 2^-127, of code 0, is the one subnormal power.
POWERS = "{ .reg .b32 t, least; mov.b32 least, 0x00400040; shl.b32 t, $1, 7; max.bf16x2 $0, t, least; }"


def _weights(signs: str, turn: str) -> str:
    """Two weights of $1, two words side by side, times the two powers in $2."""
    return (
        f"{{ .reg .b32 t, unit, none; mov.b32 unit, {_UNIT:#x}; mov.b32 none, {_NONE:#x}; "
        f"shf.l.wrap.b32 t, $1, $1, 6; lop3.b32 t, t, $1, {signs}, 0xE4; {turn}; and.b32 t, t, {_PLACE:#x}; "
        "fma.rn.bf16x2 t, t, unit, none; fma.rn.bf16x2 $0, t, $2, none; }"
    )


def _weights_at(place: int) -> str:
    """`_weights` of one place. Left by a few bits is a shift, which more units of a multiprocessor do than a turn."""
    turn = TURNS[place]
    return _weights(
        f"{SIGNS[place // 2]:#x}", f"shl.b32 t, t, {turn}" if turn <= 6 else f"shf.l.wrap.b32 t, t, t, {turn}"
    )


WEIGHTS = tuple(map(_weights_at, range(PLACES)))
# The same for any place: $3 is its entry of SIGNS and $5 of TURNS, once for either word, as are $4 and $6.
WEIGHTS_OF_ANY = _weights("$3", "shf.l.wrap.b32 t, t, t, $5")


def turned(x: Array) -> Array:
    """(rows, K) -> (rows, K up to a multiple of CHUNK): columns in the turned order, zeros where there are none."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK)))
    return x.reshape(x.shape[0], -1, RUN, PLACES).swapaxes(2, 3).reshape(x.shape)


def column_at(index: Any) -> Any:
    """The column that stands at each index of the turned order."""
    return index // CHUNK * CHUNK + index % RUN * PLACES + index % CHUNK // RUN


def index_of(place: int, word: Any) -> Any:
    """Where the element at `place` of each word stands in the turned order."""
    return word // RUN * CHUNK + place * RUN + word % RUN


def weights_by_place(words: Array, codes: Array, interpret: bool) -> list[Array]:
    """The elements at each place of words, times 2^(code - 127): exact where bfloat16 has it, infinite beyond.

    Args:
        words: int16 (N, n).
        codes: uint8 (N, groups), each of n / groups words; of code 255 anything may come.
        interpret: whether to say it in jnp.

    Returns:
        PLACES arrays, bfloat16 (N, n).
    """
    if interpret:
        return [_element(words, place, _spread(codes.astype(jnp.int32), words)) for place in range(PLACES)]
    powers = _powers(codes, words)
    return [_pairs(text, words, powers) for text in WEIGHTS]


def weights_turned(words: Array, codes: Array, interpret: bool, signs: Array, turns: Array) -> Array:
    """`weights_by_place` of all places, bfloat16 (N, PLACES * n), in the turned order.

    Args:
        signs, turns: SIGNS and TURNS, loaded: Triton moves layouts over loads alone.
    """
    if interpret:
        places = [weights.reshape(-1, RUN) for weights in weights_by_place(words, codes, interpret)]
        return jnp.stack(places, axis=1).reshape(words.shape[0], -1)
    shape = (words.shape[0], words.shape[1] // RUN, PLACES, RUN)

    def of_words(array: Array) -> Array:
        return jnp.broadcast_to(array.reshape(*shape[:2], 1, RUN), shape).reshape(shape[0], -1)

    def of_places(array: Array) -> Array:
        array = jnp.broadcast_to(array[:, None], (array.size, PLACES // array.size)).reshape(PLACES)
        return jnp.broadcast_to(array[None, None, :, None], shape).reshape(shape[0], -1)

    powers = _powers(codes, words)
    return _pairs(WEIGHTS_OF_ANY, of_words(words), of_words(powers), of_places(signs), of_places(turns))


def _powers(codes: Array, words: Array) -> Array:
    return _spread(_pairs(POWERS, codes.astype(jnp.int16)), words)


def _spread(codes: Array, words: Array) -> Array:
    shape = (*codes.shape, words.shape[1] // codes.shape[1])
    return jnp.broadcast_to(codes[:, :, None], shape).reshape(words.shape)


def _pairs(text: str, *arguments: Array) -> Array:
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


_BITS = 0x8E00 - 0x10000  # of an element, where float16 has them: they are 2^-14 times the element
_EXPONENT = 127 - 14


def _element(words: Array, place: int, code: Array) -> Array:
    """By way of float32, which has the elements as normal numbers: a CPU makes zeros of subnormal ones.

    The power is two factors, neither of which nor their products with an element leave the normal numbers before the
    result does.
    """
    bits = (((words.astype(jnp.int32) << 28 - 4 * place) >> 19) & _BITS).astype(jnp.int16)
    element = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    half = (code - _EXPONENT) >> 1
    low, high = (lax.bitcast_convert_type(power + 127 << 23, jnp.float32) for power in (half, code - _EXPONENT - half))
    return (element * low * jnp.where(code == _NAN, jnp.nan, high)).astype(jnp.bfloat16)
