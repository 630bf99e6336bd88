"""Four elements of each word of 16 bits, as bfloat16, in operations of Pallas Triton.

Compiled, a thread works on two words at a time, in one register, and makes two weights by each instruction. Interpreted
on a CPU, where PTX does not run, jnp says the same.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

Array = jax.Array

PHASES = 4  # elements of a word
_NAN = 255  # scale code

# The bits of an element, where bfloat16 has its sign, the end of its exponent and the beginning of its mantissa, are
# 2^-126 times the element, subnormal where the element is.
_PLACE = 0x81C081C0
_UNIT = 0x7E807E80  # 2^126, twice; from here on elements are normal, and a power of any code keeps them exact
_NONE = 0x80008000  # -0, twice: what leaves every product alone


def _ptx(signs: int, turn: str) -> str:
    """Two weights of $1, two words side by side, times the two powers in $2.

    A sign stands next to its exponent, and must be seven bits from it. So signs are brought six bits up first, among
    elements whose turn is another time: those of places 0 and 1 to where 2 and 3 are, and the other way round. Then an
    element, with its sign, is one turn away from its place. Compilers see that places share what comes before that.
    """
    return (
        f"{{ .reg .b32 t, unit, none; mov.b32 unit, {_UNIT:#x}; mov.b32 none, {_NONE:#x}; "
        f"shf.l.wrap.b32 t, $1, $1, 6; lop3.b32 t, t, $1, {signs:#x}, 0xE4; {turn}; and.b32 t, t, {_PLACE:#x}; "
        "fma.rn.bf16x2 t, t, unit, none; fma.rn.bf16x2 $0, t, $2, none; }"
    )


# The powers of two that the two codes in $1 name. 2^-127, of code 0, is the one subnormal power.
POWERS = "{ .reg .b32 t, least; mov.b32 least, 0x00400040; shl.b32 t, $1, 7; max.bf16x2 $0, t, least; }"
WEIGHTS = (  # one a place
    _ptx(0x22002200, "shl.b32 t, t, 6"),
    _ptx(0x22002200, "shl.b32 t, t, 2"),
    _ptx(0x00220022, "shf.l.wrap.b32 t, t, t, 30"),
    _ptx(0x00220022, "shf.l.wrap.b32 t, t, t, 26"),
)


def decoded(words: Array, codes: Array, interpret: bool) -> list[Array]:
    """The elements at each place of words, times 2^(code - 127): exact where bfloat16 has it, infinite beyond.

    Args:
        words: int16 (N, n).
        codes: uint8 (N, groups), each of n / groups words; of code 255 anything may come.
        interpret: whether to say it in jnp.

    Returns:
        PHASES arrays, bfloat16 (N, n).
    """
    if interpret:
        return [_element(words, place, _spread(codes.astype(jnp.int32), words)) for place in range(PHASES)]
    powers = _spread(_pairs(POWERS, codes.astype(jnp.int16)), words)
    return [_pairs(text, words, powers) for text in WEIGHTS]


def _spread(codes: Array, words: Array) -> Array:
    shape = (*codes.shape, words.shape[1] // codes.shape[1])
    return jnp.broadcast_to(codes[:, :, None], shape).reshape(words.shape)


def _pairs(text: str, *arguments: Array) -> Array:
    """PTX on registers of two neighbours each."""
    (result,) = plgpu.elementwise_inline_asm(
        text,
        args=arguments,
        constraints=",".join(["=r", *("r" for _ in arguments)]),
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
