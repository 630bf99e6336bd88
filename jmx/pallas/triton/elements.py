"""PTX that makes two weights at a time, of two words side by side in one register, by the kind of their elements.

An element's *place* is which of its word's four it is. A text makes the elements at one place of both words and
multiplies them by their *factors*, which come as scales and zero points do, once for a block of elements. Its operands
are the words, then the factors, 16 bits each and so one register for both words, then, in the text for any place, what
`tables` have for the place, 32 bits and so a register for either word.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jmx.numerics.formats import FORMATS, MXFP4, NVFP4, WHOLE_ROW, Format

PLACES = 4  # elements of a word

_NONE = "0x80008000"  # -0, twice: what leaves every product alone

# e2m1: the bits of an element, where bfloat16 has its sign, the end of its exponent and the beginning of its mantissa,
# are 2^-126 times the element, subnormal where the element is.
_E2M1 = 0x81C081C0
_UNIT = 0x7E807E80  # 2^126, twice; from here on elements are normal, and a power of any code keeps them exact

# A sign stands next to its exponent, and must be seven bits from it. So signs are brought six bits up first, among
# elements whose turn is another time: those of places 0 and 1 to where 2 and 3 are, and the other way round. SIGNS has
# where they then are, for either two places. After that an element, with its sign, is one turn away from its place.
SIGNS = np.array([0x22002200, 0x00220022], np.int32)
TURNS = np.array([6, 2, 30, 26], np.int32)

# The factor of a scale: for e8m0 the powers of two that the two codes in $1 name. 2^-127, of code 0, is the one
# subnormal power. For e4m3 the bits of a code, where bfloat16 has them, are 2^-120 times its value.
FACTORS = {
    MXFP4.scale_dtype: "{ .reg .b32 t, least; mov.b32 least, 0x00400040; shl.b32 t, $1, 7; max.bf16x2 $0, t, least; }",
    NVFP4.scale_dtype: "{ .reg .b32 t, sign, unit, none; mov.b32 unit, 0x7B807B80; "
    f"mov.b32 none, {_NONE}; shl.b32 t, $1, 4; shl.b32 sign, $1, 8; and.b32 t, t, 0x07F007F0; "
    "lop3.b32 t, sign, 0x80008000, t, 0xEA; fma.rn.bf16x2 $0, t, unit, none; }",
}

# The word that begins $3 bits behind the one in $1, with $2 the one after that.
SHIFTED = "shf.r.wrap.b32 $0, $1, $2, $3;"

# Factors of the codes below 128 of e8m0 that $3 and $4 pick out of the words $1 and $2, times 2^126 already: what that
# is above bfloat16's 2^0 goes into its exponent.
SCALED_FACTORS = (
    "{ .reg .b32 t, high; prmt.b32 t, $1, 0, $3; prmt.b32 high, $2, 0, $4; mad.lo.u32 t, t, 0x80, 0x3F003F00; "
    "mad.lo.u32 $0, high, 0x00800000, t; }"
)

# int4: below the bits of 128, an element whose sign was turned over is 128 + 8 more than itself, and exact.
_NIBBLES = "0x000F000F"
_TURNED_OVER = "0x43084308"
OFFSET = 0xC308  # bits of -(128 + 8), whose last one is worth 1: a zero point is subtracted from them as an integer
SHIFTS = np.array([0, 4, 8, 12], np.int32)


@dataclass(frozen=True)
class Elements:
    """How the elements of a format become weights.

    Args:
        at: the text for each place.
        at_any: the text for any.
        tables: what `at_any` takes beside factors, int32, for a place or for neighbouring ones.
    """

    at: tuple[str, ...]
    at_any: str
    tables: tuple[np.ndarray, ...]


def elements_of(format: Format, scale_dtype: np.dtype) -> Elements:
    """Of weights of 4 bits whose scales, unpacked, are of `scale_dtype`; for e2m1 bfloat16 means SCALED_FACTORS."""
    if format.element_dtype != jnp.int4:
        return _E2M1_SCALED if scale_dtype == jnp.bfloat16 else _E2M1_ELEMENTS
    return _INT4_ELEMENTS["zero_points" in format.arrays, num_factors(format, scale_dtype)]


def num_factors(format: Format, scale_dtype: np.dtype) -> int:
    """Factors that the scale of a block is: none where a row has one, and two where bfloat16 does not hold it."""
    if format.block_size == WHOLE_ROW:
        return 0
    return 1 if np.dtype(scale_dtype).itemsize == 1 or scale_dtype == jnp.bfloat16 else 2


def _e2m1(signs: str, turn: str, scaled: bool) -> str:
    unit = "" if scaled else "fma.rn.bf16x2 t, t, unit, none; "
    return (
        f"{{ .reg .b32 t, unit, none; mov.b32 unit, {_UNIT:#x}; mov.b32 none, {_NONE}; "
        f"shf.l.wrap.b32 t, $1, $1, 6; lop3.b32 t, t, $1, {signs}, 0xE4; {turn}; and.b32 t, t, {_E2M1:#x}; "
        f"{unit}fma.rn.bf16x2 $0, t, $2, none; }}"
    )


def _e2m1_at(place: int, scaled: bool) -> str:
    """Left by a few bits is a shift, which an SM has more units for than for a turn."""
    turn = TURNS[place]
    turned = f"shl.b32 t, t, {turn}" if turn <= 6 else f"shf.l.wrap.b32 t, t, t, {turn}"
    return _e2m1(f"{SIGNS[place // 2]:#x}", turned, scaled)


def _e2m1_elements(scaled: bool) -> Elements:
    """At any place $3 is its entry of SIGNS and $5 of TURNS, once for either word, as are $4 and $6."""
    at = tuple(_e2m1_at(place, scaled) for place in range(PLACES))
    return Elements(at, _e2m1("$3", "shf.l.wrap.b32 t, t, t, $5", scaled), (SIGNS, TURNS))


_E2M1_ELEMENTS, _E2M1_SCALED = (_e2m1_elements(scaled) for scaled in (False, True))


def _int4(shift: str, zero_points: bool, factors: int) -> str:
    """The difference is an integer, and exact. Of two factors the larger one comes last, and so is all that rounds."""
    offset = "$2" if zero_points else f"{OFFSET << 16 | OFFSET:#x}"
    first = 3 if zero_points else 2
    products = {
        0: "mov.b32 $0, t;",
        1: f"fma.rn.bf16x2 $0, t, ${first}, none;",
        2: f"fma.rn.bf16x2 low, t, ${first + 1}, none; fma.rn.bf16x2 $0, t, ${first}, low;",
    }[factors]
    return (
        f"{{ .reg .b32 t, one, offset, none, low; mov.b32 one, 0x3F803F80; mov.b32 offset, {offset}; "
        f"mov.b32 none, {_NONE}; shr.b32 t, $1, {shift}; lop3.b32 t, t, {_NIBBLES}, {_TURNED_OVER}, 0x6A; "
        f"fma.rn.bf16x2 t, t, one, offset; {products} }}"
    )


def _int4_elements(zero_points: bool, factors: int) -> Elements:
    entry = f"${2 + zero_points + factors}"
    at = tuple(_int4(str(shift), zero_points, factors) for shift in SHIFTS)
    return Elements(at, _int4(entry, zero_points, factors), (SHIFTS,))


_INT4_ELEMENTS = {
    (zero_points, factors): _int4_elements(zero_points, factors)
    for zero_points in (False, True)
    for factors in range(3)
}

# What has elements of 4 bits. Those of 8 would be read at half the speed, by instructions of their own.
NAMES = tuple(format.name for format in FORMATS.values() if format.element_bits == 4)
