"""PTX that decodes two 4-bit weights per instruction, one from each of two 16-bit words in a 32-bit register.

A word holds four elements, at *positions* 0 to 3. One text decodes the elements at one position of both words and
multiplies them by their *factors*: scales and offsets of zero points, one per group of elements. Its operands are the
words, then the factors (16 bits each, so one register holds those of both words).
"""

import jax.numpy as jnp
import numpy as np

from jmx.numerics.formats import MXFP4, NVFP4, WHOLE_ROW, Format, with_float_scales

WORD_ELEMENTS = 4

_MINUS_ZERO = "0x80008000"  # -0, twice: added to a product it changes nothing, not even the sign of a zero

# e2m1: moved to bfloat16's sign, the low bits of its exponent and the high bits of its mantissa, an element is 2^-126
# times its value, and subnormal where the element is.
_E2M1_MASK = 0x81C081C0
_UNIT = 0x7E807E80  # 2^126, twice; the product is normal, and multiplying it by a power of two is exact

# In an element the sign is next to the exponent; in bfloat16 it is seven bits above. So signs are first moved six bits
# up, into bits of elements at other positions: signs of positions 0 and 1 to those of 2 and 3, and vice versa. _SIGNS
# masks them there, for either two positions. One rotation then aligns both the element and its sign.
_SIGNS = 0x22002200, 0x00220022
_ROTATIONS = 6, 2, 30, 26

# The factors of the two scale codes in $1, by the dtype of scales. e8m0: the powers of two; 2^-127, code 0, is the only
# subnormal one. e4m3: moved to bfloat16's exponent and mantissa, the bits of a code are 2^-120 times its value.
FACTORS = {
    MXFP4.scale_dtype: "{ .reg .b32 t, least; mov.b32 least, 0x00400040; shl.b32 t, $1, 7; max.bf16x2 $0, t, least; }",
    NVFP4.scale_dtype: "{ .reg .b32 t, sign, unit, none; mov.b32 unit, 0x7B807B80; "
    f"mov.b32 none, {_MINUS_ZERO}; shl.b32 t, $1, 4; shl.b32 sign, $1, 8; and.b32 t, t, 0x07F007F0; "
    "lop3.b32 t, sign, 0x80008000, t, 0xEA; fma.rn.bf16x2 $0, t, unit, none; }",
}

# The 32 bits from bit $3 on of the two words $1 (low) and $2 (high).
FUNNEL_SHIFT = "shf.r.wrap.b32 $0, $1, $2, $3;"

# Factors, already times 2^126, of two e8m0 codes below 128, which the selectors $3 and $4 pick from the words $1 and
# $2: bits are 0x3F00 + code * 2^7, an exponent of code + 126.
SCALED_FACTORS = (
    "{ .reg .b32 t, high; prmt.b32 t, $1, 0, $3; prmt.b32 high, $2, 0, $4; mad.lo.u32 t, t, 0x80, 0x3F003F00; "
    "mad.lo.u32 $0, high, 0x00800000, t; }"
)

# int4: with its sign bit flipped and placed in the low bits of 128, an element is exactly 128 + 8 + its value.
_INT4_MASK = "0x000F000F"
_INT4_SIGNS = "0x43084308"
OFFSET = 0xC308  # bits of -(128 + 8); the lowest bit is worth 1, so a zero point is subtracted from them as an integer
_SHIFTS = 0, 4, 8, 12


def decoder_for(format: Format, scale_dtype: np.dtype) -> tuple[str, ...]:
    """PTX for each position of a 4-bit format whose scales, unpacked, are of `scale_dtype`.

    For e2m1 elements `scale_dtype` bfloat16 means that factors are those of SCALED_FACTORS; no format of FORMAT_NAMES
    has such elements with scales in bfloat16.
    """
    if format.element_dtype != jnp.int4:
        return _E2M1_SCALED if scale_dtype == jnp.bfloat16 else _E2M1
    return _INT4["zero_points" in format.arrays, num_factors(format, scale_dtype)]


def num_factors(format: Format, scale_dtype: np.dtype) -> int:
    """Factors per group scale: none where scales are per row, and two where bfloat16 does not hold the scale."""
    if format.block_size == WHOLE_ROW:
        return 0
    return 1 if np.dtype(scale_dtype).itemsize == 1 or scale_dtype == jnp.bfloat16 else 2


def _e2m1(position: int, scaled: bool) -> str:
    """Small rotations to the left are shifts, for which an SM has more units."""
    signs, rotation = _SIGNS[position // 2], _ROTATIONS[position]
    rotate = f"shl.b32 t, t, {rotation}" if rotation <= 6 else f"shf.l.wrap.b32 t, t, t, {rotation}"
    unit = "" if scaled else "fma.rn.bf16x2 t, t, unit, none; "
    return (
        f"{{ .reg .b32 t, unit, none; mov.b32 unit, {_UNIT:#x}; mov.b32 none, {_MINUS_ZERO}; "
        f"shf.l.wrap.b32 t, $1, $1, 6; lop3.b32 t, t, $1, {signs:#x}, 0xE4; {rotate}; and.b32 t, t, {_E2M1_MASK:#x}; "
        f"{unit}fma.rn.bf16x2 $0, t, $2, none; }}"
    )


_E2M1, _E2M1_SCALED = (tuple(_e2m1(position, scaled) for position in range(WORD_ELEMENTS)) for scaled in (False, True))


def _int4(shift: int, zero_points: bool, factors: int) -> str:
    """The difference is an integer, and exact. The larger of two factors multiplies last, so rounding happens once."""
    offset = "$2" if zero_points else f"{OFFSET << 16 | OFFSET:#x}"
    first = 3 if zero_points else 2
    products = {
        0: "mov.b32 $0, t;",
        1: f"fma.rn.bf16x2 $0, t, ${first}, none;",
        2: f"fma.rn.bf16x2 low, t, ${first + 1}, none; fma.rn.bf16x2 $0, t, ${first}, low;",
    }[factors]
    return (
        f"{{ .reg .b32 t, one, offset, none, low; mov.b32 one, 0x3F803F80; mov.b32 offset, {offset}; "
        f"mov.b32 none, {_MINUS_ZERO}; shr.b32 t, $1, {shift}; lop3.b32 t, t, {_INT4_MASK}, {_INT4_SIGNS}, 0x6A; "
        f"fma.rn.bf16x2 t, t, one, offset; {products} }}"
    )


_INT4 = {
    (zero_points, factors): tuple(_int4(shift, zero_points, factors) for shift in _SHIFTS)
    for zero_points in (False, True)
    for factors in range(3)
}

# Formats of 4-bit elements. Elements of 8 bits would need other instructions and twice the bandwidth. `decode` handles
# the scales of MXFP4 and of NVFP4 each in its own way.
FORMAT_NAMES = (MXFP4.name, NVFP4.name, *with_float_scales(jnp.int4))
