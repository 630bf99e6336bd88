"""Dequantizes a thread's share of a tile: pairs of bfloat16 from words, scales and zero points, in PTX.

A placed pair (see `elements`) becomes the weight times a power of two, which the epilogue reverts, by

    mul        floats with scales that are exact in bfloat16 (e8m0, e4m3, bfloat16), or with scales of whole rows only
    fma        integers with such scales: (element + offset) * scale - offset * scale. The last term is exact, since the
               offset is a power of two, so the result is rounded once
    mul, fma   scales of more bits, float16 and float32, which are split into the sum of two bfloat16

With zero points, and for integers in the last case, a `sub` first makes the integer, exactly. Element times scale is
exact if bfloat16 holds it: always with e8m0 and e4m3 scales, and without block scales. Otherwise it is rounded to
nearest.

The instructions are passed to a function `run`, so that tests can execute the same ones in numpy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmx.numerics.formats import Format
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
from jmx.pallas.mosaic_sm90.layout import Tile, is_shifted
from jmx.pallas.sm90.tiles import TILE

Register = Any  # of 32 bits: an MLIR value, or in tests a numpy array
Registers = Sequence[Register]
Place = tuple[Register, int]  # a word, and which of the values in it
Run = Callable[..., Register]  # (PTX text, operands $1, $2, ...) -> $0
_EIGHTS = TILE // 8  # groups of 8 columns in a tile; a thread has a pair in each, for each of its two rows
_SCALE_EXPONENT = 96  # scales of 16 and 32 bits are multiplied by 2 to this power
# Even bits of $1, odd bits of $2. lop3's table computes (a & c) | (b & ~c).
_MIX = f"lop3.b32 $0, $1, $2, {EVEN:#x}, 0xE4;"
# Up to 6 no bit wraps around, so a shift suffices.
_TURNS = tuple(f"shl.b32 t, $1, {left};" if left <= 6 else f"shf.l.wrap.b32 t, $1, $1, {left};" for left in ROTATIONS)
_E2M1 = tuple(f"{{ .reg .b32 t; {turn} and.b32 $0, t, {PLACE:#x}; }}" for turn in _TURNS)
# Of the first or the second one of two neighboring slices: its pairs' rotations differ by 8.
_SLICE_MASK = f"mad.lo.u32 $0, $1, {int(EVEN) + 1:#x}, 0xFFFFFFFF;"  # of the first all bits, else the even ones
_SLICE_LEFT = "shl.b32 $0, $1, 3;"
_SLICE_MIX = "lop3.b32 $0, $1, $2, $3, 0xE4;"
_SLICE_E2M1 = tuple(
    f"{{ .reg .b32 t; add.u32 t, $2, {left}; shf.l.wrap.b32 t, $1, $1, t; and.b32 $0, t, {PLACE:#x}; }}"
    for left in ROTATIONS[:4]
)
_INT4 = tuple(f"{{ .reg .b32 t; shr.u32 t, $1, {4 * nth}; and.b32 $0, t, {NIBBLES:#x}; }}" for nth in range(4))
_INT8 = tuple(f"prmt.b32 $0, $1, 0, {select:#x};" for select in (0x4140, 0x4342))
_E4M3 = (
    f"and.b32 $0, $1, {E4M3_PLACE:#x};",
    f"{{ .reg .b32 t, u; shf.l.wrap.b32 t, $1, $1, 28; and.b32 t, t, {E4M3_UPPER:#x}; shl.b32 u, $1, 4; "
    f"lop3.b32 $0, u, {E4M3_LOWER:#x}, t, 0xEA; }}",  # (a & b) | c
)
# Byte {byte} of $1, twice, as the exponents of two bfloat16; $2 is added to both.
_EXPONENT = "{{ .reg .b32 t; prmt.b32 t, $1, 0, {select:#x}; mad.lo.u32 $0, t, 0x80, $2; }}"
# Bytes 0 and 2, or 1 and 3, of e4m3 as bfloat16, times 2^118. In position they are their value times 2^-120.
_E4M3_SCALES = tuple(
    f"{{ .reg .b32 t, c; {shift}.b32 t, $1, 4; and.b32 t, t, 0x07F007F0; mov.b32 c, 0x7B007B00; "
    "mul.bf16x2 t, t, c; mul.bf16x2 $0, t, c; }"
    for shift in ("shl", "shr")
)
_E4M3_SCALE_EXPONENT = 118
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
class Decoder:
    """Dequantizes tiles of `format` with scales of `scale_dtype` to bfloat16.

    The results are the weights times 2^-`rescale_exponent`, and of formats with a shift times 2^-shift (see `layout`).
    Scales of whole rows are not included. The epilogue applies all of these to sums.
    """

    format: Format
    scale_dtype: np.dtype

    @property
    def tile(self) -> Tile:
        return Tile.of(self.format)

    @property
    def rescale_exponent(self) -> int:
        """The power of two by which the epilogue rescales sums."""
        if is_shifted(self.format):
            return 0
        e4m3_scales = self.tile.scales and self.scale_dtype.itemsize == 1
        return self.tile.elements.unit - (_E4M3_SCALE_EXPONENT if e4m3_scales else _SCALE_EXPONENT)

    @property
    def scale_words(self) -> int:
        """Words of a tile's scales that a thread reads: those of its group of 4 lanes."""
        return 2 * self.tile.scales * self.scale_dtype.itemsize // 4

    @property
    def zero_point_words(self) -> int:
        """The same of zero points."""
        return self.tile.zero_points

    def pairs(
        self, words: Registers, scales: Registers, zero_points: Registers, exponent: Register | None, run: Run
    ) -> np.ndarray:
        """A thread's share of a tile as registers of two bfloat16: (8 groups of 8 columns, its 2 rows).

        Args:
            words: of its values.
            scales, zero_points: `scale_words` and `zero_point_words` of them.
            exponent: of formats with a shift: (`elements.unit` - shift) in the exponents of two bfloat16.
            run: emits or executes an instruction; see the module's docstring.
        """
        tile = self.tile
        blocks = max(1, tile.scales, tile.zero_points)
        per_word = 4 // self.scale_dtype.itemsize

        def scaling(row: int, block: int) -> Callable[[Register], Register]:
            nth = row * tile.scales + block
            scale = (scales[nth // per_word], nth % per_word) if tile.scales else None
            nth = row * tile.zero_points + (block if tile.zero_points > 1 else 0)
            zero_point = (zero_points[nth // 2], nth % 2) if tile.zero_points else None
            return self._scaling(scale, zero_point, exponent, run)

        scaled = [[scaling(row, block) for block in range(blocks)] for row in (0, 1)]
        out = np.empty((_EIGHTS, 2), dtype=object)
        for nth, placed in enumerate(self._placed(words, run)):
            eight, row = divmod(nth, 2)
            out[eight, row] = scaled[row][eight * blocks // _EIGHTS](placed)
        return out

    @property
    def slice_words(self) -> int:
        """Words that hold a thread's values of 16 columns, the second of two neighboring slices in E2M1 beside the
        first."""
        return 1 if self.tile.elements == INT4 else 2

    def slice_pairs(
        self,
        words: Registers,
        odd: Register,
        scales: Registers,
        zero_points: Registers,
        exponent: Register | None,
        run: Run,
    ) -> np.ndarray:
        """`pairs` of one slice of 16 columns, which may be another one in each warp: (its 2 groups of 8 columns, rows).

        Args:
            words: `slice_words`, of E2M1 those of two slices.
            odd: whether it is the second one of two neighboring slices, 0 or 1.
            scales, zero_points: those of the slice, in the lowest bits of a word for each of the 2 rows.
            exponent, run: as for `pairs`.
        """
        if self.tile.elements == E2M1:
            mask, left = run(_SLICE_MASK, odd), run(_SLICE_LEFT, odd)
            sources = (run(_SLICE_MIX, *words, mask), run(_SLICE_MIX, *words[::-1], mask))
            placed = [run(text, sources[nth // 2], left) for nth, text in enumerate(_SLICE_E2M1)]
        else:
            placed = self._placed(words, run)
        out = np.empty((2, 2), dtype=object)
        for row in (0, 1):
            scale = (scales[row], 0) if self.tile.scales else None
            zero_point = (zero_points[row], 0) if self.tile.zero_points else None
            scaled = self._scaling(scale, zero_point, exponent, run)
            for eight in (0, 1):
                out[eight, row] = scaled(placed[2 * eight + row])
        return out

    def _placed(self, words: Registers, run: Run) -> list[Register]:
        """All 16 placed pairs: for each group of 8 columns those of both rows."""
        elements = self.tile.elements
        if elements == E2M1:
            out = []
            for first, second in zip(words[::2], words[1::2], strict=True):
                sources = (first, second, run(_MIX, first, second), run(_MIX, second, first))
                out += [run(text, sources[nth // 2]) for nth, text in enumerate(_E2M1)]
            return out
        texts = {INT4: _INT4, E4M3: _E4M3}.get(elements, _INT8)
        return [run(text, word) for word in words for text in texts]

    def _scaling(
        self, scale: Place | None, zero_point: Place | None, exponent: Register | None, run: Run
    ) -> Callable[[Register], Register]:
        """A function that maps a row's placed pairs of one block to weights; what they share is computed here, once."""
        offset = self.tile.elements.offset
        low = None  # of the scale, where bfloat16 `high` is not all of it
        zero = None  # (zero point + offset) * 2^-133, twice
        less = None  # -offset times the scale
        if scale is None:
            high = run(_ROW)
        else:
            word, nth = scale
            match self.scale_dtype.itemsize, self.scale_dtype.name:
                case 1, _ if is_shifted(self.format):
                    high = run(_EXPONENT.format(select=0x4040 + 0x101 * nth), word, exponent)
                case 1, _:
                    two = run(_E4M3_SCALES[nth % 2], word)
                    high = run(_TWICE[nth // 2], two)
                case 2, "bfloat16":
                    high = run(_BF16[nth], word)
                case size, _:
                    load = _F16[nth] if size == 2 else _F32[0]
                    high = run(_HIGH.format(load=load), word)
                    low = run(_LOW.format(load=load), word, high)
        if offset and zero_point is not None:
            word, nth = zero_point
            zero = run(_TWICE[nth], word)
        elif offset and low is not None:
            zero = run(_ZERO.format(zero=offset * 0x10001))
        elif offset:
            less = run(_OFFSET.format(less=(0x8000 | offset) * 0x10001), high)

        def scaled(placed: Register) -> Register:
            if less is not None:
                return run(_ADD, placed, high, less)
            if zero is not None:
                placed = run(_SUBTRACT, placed, zero)
            return run(_MULTIPLY, placed, high) if low is None else run(_ADD, placed, high, run(_MULTIPLY, placed, low))

        return scaled


def decoder_of(format: Format, scale_dtype: Any) -> Decoder:
    """`scale_dtype`: of the layout's array, in which scales of one byte are uint8."""
    return Decoder(format, np.dtype(scale_dtype) if scale_dtype != jnp.uint8 else format.scale_dtype)
