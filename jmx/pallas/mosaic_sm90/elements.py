"""The bit order of a thread's elements of a tile within words, by element type: few instructions extract them.

A thread holds 16 *pairs* of a tile: two elements of neighboring columns each, which become one register of two
bfloat16, the even column in the lower half word, the odd one in the upper half word. One or two instructions extract
the *placed* pair from a word: each half word is a bfloat16 with the exact value

    (element + offset) * 2^-unit

A multiplication by the scale and a power of two follows. Integers below 256 are bfloat16 as they are, in units of
2^-133: the subnormal numbers and the first normal ones are equally spaced. So an integer only needs an offset that
makes it positive. A float needs the bits of its magnitude below bit 10 and its sign at bit 15.

    e2m1  magnitudes at 8:6, signs at 15. Two words hold 8 pairs. A rotation and a mask (`PLACE`) position each pair:
          rotated by even numbers, the mask's bits cover 64 bits exactly, but cannot cover 32. So half of the pairs have
          their even bits in one word and their odd bits in the other, and one select combines a word of two such pairs.
          That is five sixths of the work of four pairs in each word, of which two would have sign and magnitude
          separated, and less than two thirds of the work of codes in checkpoint order.
    int4  with 8 added; a word holds 4 pairs: shifted by 0, 4, 8, 12 and masked.
    int8  with 128 added; a word holds 2 pairs, byte by byte.
    e4m3  magnitudes at 10:4, signs at 15. A word holds 2 pairs: one in position; of the other the exponents and signs
          are 4 bits to the left of their position (wrapping around), and the mantissas 4 bits to the right.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmx.numerics.formats import Format
from jmx.util.typing import Array, UInt, UInt32

PAIRS = 16  # of a thread in a tile
PLACE = np.uint32(0x81C081C0)  # bits of two bfloat16 that hold signs and magnitudes of e2m1
EVEN = np.uint32(0x55555555)  # bits of a mixed word that come from the first of two words
# By how much a pair's word is rotated to the left. Pair 4 * s + 2 * h + r has columns 16 * s + 8 * h and row 8 * r,
# from the thread's first ones on. Pairs 0 and 1 are in the first word, 2 and 3 in the second, others in the mixed ones.
ROTATIONS = (6, 2, 4, 0, 14, 10, 12, 8)
NIBBLES = np.uint32(0x000F000F)
E4M3_PLACE = np.uint32(0x87F087F0)
E4M3_UPPER = np.uint32(0x87808780)  # signs and exponents
E4M3_LOWER = np.uint32(0x00700070)  # mantissas


@dataclass(frozen=True)
class Elements:
    """An element type in tiles.

    Args:
        bits: of an element, and 32-bit words of a thread.
        unit, offset: of the value of a placed pair: see the module's docstring.
        spread: pairs (..., 16), uint8 of two 4-bit codes or uint16 of two 8-bit codes, the even column's in the lower
            bits -> words uint32 (..., bits).
        gather: the inverse of `spread`.
    """

    bits: int
    unit: int
    offset: int
    spread: Callable[[Array], Array]
    gather: Callable[[Array], Array]


def _rotate(word: UInt32[Array, "..."], left: int) -> UInt32[Array, "..."]:
    return word << left | word >> (32 - left) if left else word


def _halves(pairs: UInt[Array, "..."], bits: int) -> UInt32[Array, "..."]:
    """Codes of pairs, each in the lowest bits of its half word."""
    pairs = pairs.astype(jnp.uint32)
    return (pairs & ((1 << bits) - 1)) | (pairs >> bits) << 16


def _joined(halves: UInt32[Array, "..."], bits: int) -> UInt[Array, "..."]:
    """The inverse of `_halves`."""
    return (halves | halves >> (16 - bits)).astype(jnp.uint8 if bits == 4 else jnp.uint16)


def _mixed(one: UInt32[Array, "..."], other: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Even bits of one word, odd bits of the other. Applied to both mixed words it restores the original ones."""
    return one & EVEN | other & ~EVEN


def _spread_e2m1(pairs: UInt[Array, "*lead 16"]) -> UInt32[Array, "*lead words"]:
    halves = _halves(pairs, 4).reshape(*pairs.shape[:-1], 2, 8)
    placed = (halves & 0x00070007) << 6 | (halves & 0x00080008) << 12
    turned = [_rotate(placed[..., p], -left % 32) for p, left in enumerate(ROTATIONS)]
    first, second, *mixed = (one | other for one, other in zip(turned[::2], turned[1::2], strict=True))
    words = jnp.stack([first | _mixed(*mixed), second | _mixed(*mixed[::-1])], axis=-1)
    return words.reshape(*pairs.shape[:-1], 4)


def _gather_e2m1(words: UInt32[Array, "*lead words"]) -> UInt[Array, "*lead 16"]:
    first, second = words[..., ::2], words[..., 1::2]
    sources = (first, second, _mixed(first, second), _mixed(second, first))
    placed = jnp.stack([_rotate(sources[p // 2], left) & PLACE for p, left in enumerate(ROTATIONS)], axis=-1)
    halves = placed >> 6 & 0x00070007 | placed >> 12 & 0x00080008
    return _joined(halves, 4).reshape(*words.shape[:-1], PAIRS)


def _spread_int4(pairs: UInt[Array, "*lead 16"]) -> UInt32[Array, "*lead words"]:
    halves = _halves(pairs ^ jnp.uint8(0x88), 4).reshape(*pairs.shape[:-1], 4, 4)
    return functools.reduce(operator.or_, (halves[..., nth] << 4 * nth for nth in range(4)))


def _gather_int4(words: UInt32[Array, "*lead words"]) -> UInt[Array, "*lead 16"]:
    halves = jnp.stack([words >> 4 * nth & NIBBLES for nth in range(4)], axis=-1)
    return _joined(halves, 4).reshape(*words.shape[:-1], PAIRS) ^ jnp.uint8(0x88)


def _spread_int8(pairs: UInt[Array, "*lead 16"]) -> UInt32[Array, "*lead words"]:
    pairs = (pairs ^ jnp.uint16(0x8080)).astype(jnp.uint32)
    return pairs[..., ::2] | pairs[..., 1::2] << 16


def _gather_int8(words: UInt32[Array, "*lead words"]) -> UInt[Array, "*lead 16"]:
    pairs = jnp.stack([words & 0xFFFF, words >> 16], axis=-1).astype(jnp.uint16)
    return pairs.reshape(*words.shape[:-1], PAIRS) ^ jnp.uint16(0x8080)


def _spread_e4m3(pairs: UInt[Array, "*lead 16"]) -> UInt32[Array, "*lead words"]:
    halves = _halves(pairs, 8)
    placed = (halves & 0x007F007F) << 4 | (halves & 0x00800080) << 8
    first, second = placed[..., ::2], placed[..., 1::2]
    return first | _rotate(second & E4M3_UPPER, 4) | (second & E4M3_LOWER) >> 4


def _gather_e4m3(words: UInt32[Array, "*lead words"]) -> UInt[Array, "*lead 16"]:
    second = _rotate(words, 28) & E4M3_UPPER | words << 4 & E4M3_LOWER
    placed = jnp.stack([words & E4M3_PLACE, second], axis=-1)
    halves = placed >> 4 & 0x007F007F | placed >> 8 & 0x00800080
    return _joined(halves, 8).reshape(*words.shape[:-1], PAIRS)


E2M1 = Elements(4, 126, 0, _spread_e2m1, _gather_e2m1)
INT4 = Elements(4, 133, 8, _spread_int4, _gather_int4)
INT8 = Elements(8, 133, 128, _spread_int8, _gather_int8)
E4M3 = Elements(8, 120, 0, _spread_e4m3, _gather_e4m3)
_BY_DTYPE: dict[Any, Elements] = {
    np.dtype(jnp.float4_e2m1fn): E2M1,
    np.dtype(jnp.int4): INT4,
    np.dtype(jnp.int8): INT8,
    np.dtype(jnp.float8_e4m3fn): E4M3,
}


def elements_of(format: Format) -> Elements:
    return _BY_DTYPE[format.element_dtype]
