"""What a thread makes of its share of a tile: pairs of bfloat16 out of words, scales and zero points, in PTX.

A placed pair (see `elements`) becomes the weight times a power of two, which the epilogue takes back, by

    mul   floats under scales that bfloat16 holds: e8m0, e4m3, bfloat16; or none but the epilogue's
    fma   integers under such scales: the element with its offset times the scale, less the offset times it, which is a
          power of two: rounded once
    mul, fma   under scales of more bits, float16 and float32, which are the sum of two bfloat16

and, before the latter and where there are zero points, a `sub` that makes the integer, exactly. Element times scale is
exact where bfloat16 holds it: always under e8m0 and e4m3, and without scales of blocks. Else it is rounded to nearest.

Nothing here writes a program: `run` does, so that tests can run the very instructions in numpy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmx.numerics.formats import MXFP4, Format
from jmx.pallas.mosaic_sm90.elements import (
    E2M1,
    E4M3,
    E4M3_LOWER,
    E4M3_PLACE,
    E4M3_UPPER,
    EVEN,
    INT4,
    NIBBLES,
    PLACE,
    ROTATIONS,
)
from jmx.pallas.mosaic_sm90.layout import Tile
from jmx.pallas.sm90.tiles import TILE

Register = Any  # 32 bits
Run = Callable[..., Register]  # (PTX text, operands $1, $2, ...) -> $0
_EIGHTS = TILE // 8  # groups of 8 columns in a tile, of which a thread has a pair for each of its two rows
_RAISED = 96  # scales of 16 and 32 bits are multiplied by two to this power
# Even bits of $1, odd bits of $2. lop3's table is that of (a & c) | (b & ~c).
_MIX = f"lop3.b32 $0, $1, $2, {EVEN:#x}, 0xE4;"
# Up to 6 nothing wraps around: a shift will do.
_TURNS = tuple(f"shl.b32 t, $1, {left};" if left <= 6 else f"shf.l.wrap.b32 t, $1, $1, {left};" for left in ROTATIONS)
_E2M1 = tuple(f"{{ .reg .b32 t; {turn} and.b32 $0, t, {PLACE:#x}; }}" for turn in _TURNS)
_INT4 = tuple(f"{{ .reg .b32 t; shr.u32 t, $1, {4 * nth}; and.b32 $0, t, {NIBBLES:#x}; }}" for nth in range(4))
_INT8 = tuple(f"prmt.b32 $0, $1, 0, {select:#x};" for select in (0x4140, 0x4342))
_E4M3 = (
    f"and.b32 $0, $1, {E4M3_PLACE:#x};",
    f"{{ .reg .b32 t, u; shf.l.wrap.b32 t, $1, $1, 28; and.b32 t, t, {E4M3_UPPER:#x}; shl.b32 u, $1, 4; "
    f"lop3.b32 $0, u, {E4M3_LOWER:#x}, t, 0xEA; }}",  # (a & b) | c
)
# Byte {byte} of $1, twice, as the exponents of two bfloat16; $2 is added to both.
_EXPONENT = "{{ .reg .b32 t; prmt.b32 t, $1, 0, {select:#x}; mad.lo.u32 $0, t, 0x80, $2; }}"
# Bytes 0 and 2, or 1 and 3, of e4m3 as bfloat16 of 2^118 times as much. Placed they are 2^-120 times as much.
_E4M3_SCALES = tuple(
    f"{{ .reg .b32 t, c; {shift}.b32 t, $1, 4; and.b32 t, t, 0x07F007F0; mov.b32 c, 0x7B007B00; "
    "mul.bf16x2 t, t, c; mul.bf16x2 $0, t, c; }"
    for shift in ("shl", "shr")
)
_E4M3_RAISED = 118
_TWICE = ("prmt.b32 $0, $1, 0, 0x1010;", "prmt.b32 $0, $1, 0, 0x3232;")  # the lower half of $1, or its upper one
_BF16 = tuple(
    f"{{ .reg .b32 t, c; prmt.b32 t, $1, 0, {select}; mov.b32 c, 0x6F806F80; mul.bf16x2 $0, t, c; }}"
    for select in ("0x1010", "0x3232")
)
# Scales of more bits, times 2^96, as the sum of two bfloat16.
_F32 = ("mov.b32 f, $1;",)
_F16 = tuple(f"prmt.b32 t, $1, 0, {select}; cvt.u16.u32 h, t; cvt.f32.f16 f, h;" for select in ("0x4410", "0x4432"))
_REGISTERS = ".reg .b32 t; .reg .b16 h; .reg .f32 f, g;"
_HIGH = "{{ " + _REGISTERS + " {load} mul.f32 f, f, 0f6F800000; cvt.rn.bf16x2.f32 $0, f, f; }}"
_LOW = (
    "{{ " + _REGISTERS + " {load} mul.f32 f, f, 0f6F800000; and.b32 t, $2, 0xFFFF0000; mov.b32 g, t; "
    "sub.f32 f, f, g; cvt.rn.bf16x2.f32 $0, f, f; }}"
)
_ROW = "mov.b32 $0, 0x6F806F80;"
_OFFSET = "{{ .reg .b32 c; mov.b32 c, {less:#x}; mul.bf16x2 $0, $1, c; }}"  # $1 times -offset * 2^-133
_ZERO = "mov.b32 $0, {zero:#x};"
_SUBTRACT = "sub.bf16x2 $0, $1, $2;"
_MULTIPLY = "mul.bf16x2 $0, $1, $2;"
_ADD = "fma.rn.bf16x2 $0, $1, $2, $3;"


@dataclass(frozen=True)
class _Factor:
    """What a row's pairs of one block meet. `low`: None where `high` is all of the scale."""

    high: Register
    low: Register | None
    zero: Register | None  # (zero point + offset) * 2^-133, twice; None for floats, and integers under `less` alone
    less: Register | None  # -offset times the scale


@dataclass(frozen=True)
class Decoder:
    """How tiles of `format` under scales of `scale_dtype` become bfloat16.

    Weights come out 2^-`raised` times what they are; of MXFP4 further lowered by its shift. Scales of rows are not in
    them.
    """

    format: Format
    scale_dtype: np.dtype

    @property
    def tile(self) -> Tile:
        return Tile.of(self.format)

    @property
    def raised(self) -> int:
        if self.format == MXFP4:
            return 0
        e4m3_scales = self.tile.scales and self.scale_dtype.itemsize == 1
        return self.tile.elements.unit - (_E4M3_RAISED if e4m3_scales else _RAISED)

    @property
    def scale_words(self) -> int:
        """Words of a tile's scales that a thread reads, those of its lane group of 4."""
        return 2 * self.tile.scales * self.scale_dtype.itemsize // 4

    @property
    def zero_point_words(self) -> int:
        return self.tile.zero_points

    def pairs(
        self,
        words: Sequence[Register],
        scales: Sequence[Register],
        zero_points: Sequence[Register],
        exponent: Register | None,
        run: Run,
    ) -> np.ndarray:
        """A thread's share of a tile as registers of two bfloat16: (8 groups of 8 columns, its 2 rows).

        Args:
            words: of its values.
            scales, zero_points: what `scale_words` and `zero_point_words` count.
            exponent: of MXFP4: (126 - shift) in the exponents of two bfloat16.
            run: see the module.
        """
        blocks = max(1, self.tile.scales, self.tile.zero_points)
        factors = [[self._factor(row, b, scales, zero_points, exponent, run) for b in range(blocks)] for row in (0, 1)]
        out = np.empty((_EIGHTS, 2), dtype=object)
        for nth, placed in enumerate(self._placed(words, run)):
            eight, row = divmod(nth, 2)
            out[eight, row] = _weight(placed, factors[row][eight * blocks // _EIGHTS], run)
        return out

    def _placed(self, words: Sequence[Register], run: Run) -> list[Register]:
        """All 16 placed pairs: of each group of 8 columns those of both rows."""
        elements = self.tile.elements
        if elements == E2M1:
            out = []
            for first, second in zip(words[::2], words[1::2], strict=True):
                sources = (first, second, run(_MIX, first, second), run(_MIX, second, first))
                out += [run(text, sources[nth // 2]) for nth, text in enumerate(_E2M1)]
            return out
        texts = {INT4: _INT4, E4M3: _E4M3}.get(elements, _INT8)
        return [run(text, word) for word in words for text in texts]

    def _factor(
        self,
        row: int,
        block: int,
        scales: Sequence[Register],
        zero_points: Sequence[Register],
        exponent: Register | None,
        run: Run,
    ) -> _Factor:
        tile, offset, low = self.tile, self.tile.elements.offset, None
        nth = row * tile.scales + block
        match self.scale_dtype.itemsize, self.scale_dtype.name:
            case _ if not tile.scales:
                high = run(_ROW)
            case 1, _ if self.format == MXFP4:
                high = run(_EXPONENT.format(select=0x4040 + 0x101 * nth), scales[0], exponent)
            case 1, _:
                two = run(_E4M3_SCALES[block % 2], scales[row])
                high = run(_TWICE[block // 2], two)
            case 2, "bfloat16":
                high = run(_BF16[nth % 2], scales[nth // 2])
            case size, _:
                load, word = (_F16[nth % 2], scales[nth // 2]) if size == 2 else (_F32[0], scales[nth])
                high = run(_HIGH.format(load=load), word)
                low = run(_LOW.format(load=load), word, high)
        if not offset:
            return _Factor(high, low, None, None)
        if tile.zero_points:
            nth = row * tile.zero_points + (block if tile.zero_points > 1 else 0)
            return _Factor(high, low, run(_TWICE[nth % 2], zero_points[nth // 2]), None)
        if low is not None:
            return _Factor(high, low, run(_ZERO.format(zero=offset * 0x10001)), None)
        return _Factor(high, None, None, run(_OFFSET.format(less=(0x8000 | offset) * 0x10001), high))


def _weight(placed: Register, factor: _Factor, run: Run) -> Register:
    if factor.less is not None:
        return run(_ADD, placed, factor.high, factor.less)
    if factor.zero is not None:
        placed = run(_SUBTRACT, placed, factor.zero)
    if factor.low is None:
        return run(_MULTIPLY, placed, factor.high)
    return run(_ADD, placed, factor.high, run(_MULTIPLY, placed, factor.low))


def decoder_of(format: Format, scale_dtype: Any) -> Decoder:
    """`scale_dtype`: that of the array as the layout holds it, uint8 where a scale is a byte."""
    return Decoder(format, np.dtype(scale_dtype) if scale_dtype != jnp.uint8 else format.scale_dtype)
