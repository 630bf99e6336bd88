"""Quantizes one row to e4m3, for one thread of the warpgroup: load, find the largest magnitude, divide, round."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.numerics.input_formats import InputFormat, static_limits
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.sm90.accumulator import load_words
from jmx.pallas.sm90.mlir import address_of, constant, i8, i32, i64, less, pair, run, thread_index, utils, wide
from jmx.pallas.sm90.tiles import THREADS

WORDS = 4  # for the largest magnitude in each warp
_LANES = 32
_VECTOR = 8  # elements of a row that a thread loads at a time
_PIECE = THREADS * _VECTOR  # columns that a warpgroup loads at a time
_INFINITY = {2: 0x7F80, 4: 0x7F800000}  # bits; of float16 0x7C00
_MOST_448 = 0x43E00000
_LEAST_SCALE = 0x00800000  # 2^-126
_NAN = 0x7FC00000
_AS_FLOAT = {
    "bfloat16": ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xFFFF0000;"),
    "float16": tuple(
        f"{{ .reg .b16 l, h; .reg .f32 f; mov.b32 {{l, h}}, $1; cvt.f32.f16 f, {half}; mov.b32 $0, f; }}"
        for half in "lh"
    ),
}
_LARGER = {2: "max.u16x2 $0, $1, $2;", 4: "max.u32 $0, $1, $2;"}
_MAGNITUDE = {2: "and.b32 $0, $1, 0x7FFF7FFF;", 4: "and.b32 $0, $1, 0x7FFFFFFF;"}
_LARGER_HALF = "{ .reg .b32 h; shr.u32 h, $1, 16; and.b32 $0, $1, 0xFFFF; max.u32 $0, $0, h; }"
_ACROSS = "shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
_QUOTIENT = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; div.rn.f32 a, a, b; mov.b32 $0, a; }"
_SMALL, _RAISE, _ONE = 0x1F800000, 0x5F800000, 0x3F800000  # 2^-64, 2^64, 1
_PRODUCT = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; mul.rn.f32 a, a, b; mov.b32 $0, a; }"
_CORRECTED = (  # of a value, a scale, its reciprocal, and the power of two that both are multiplied by; keeps -0
    "{ .reg .f32 a, b, r, k, q, e; .reg .b32 s; mov.b32 a, $1; mov.b32 b, $2; mov.b32 r, $3; mov.b32 k, $4; "
    "mul.rn.f32 a, a, k; mul.rn.f32 q, a, r; neg.f32 b, b; "
    "fma.rn.f32 e, q, b, a; fma.rn.f32 q, e, r, q; fma.rn.f32 e, q, b, a; fma.rn.f32 q, e, r, q; "
    "mov.b32 s, q; lop3.b32 $0, $1, 0x80000000, s, 0xEA; }"  # (value & sign) | quotient
)
_BEYOND = 0x44000000  # 512, which like all larger quotients becomes the largest element
_LIMITED = (  # `min` and `max` drop NaN, which `_SPOIL` restores
    "{ .reg .f32 a, b, c; mov.b32 a, $1; mov.b32 b, $2; neg.f32 c, b; "
    "min.f32 a, a, b; max.f32 a, a, c; mov.b32 $0, a; }"
)
_SPOIL = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; fma.rn.f32 b, a, 0f00000000, b; mov.b32 $0, b; }"
_ROUND = (
    "{ .reg .b16 l, h; .reg .f32 a, b, c, d; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; mov.b32 d, $4; "
    "cvt.rn.satfinite.e4m3x2.f32 l, b, a; cvt.rn.satfinite.e4m3x2.f32 h, d, c; mov.b32 $0, {l, h}; }"
)


def _in_range(static: ir.Value, format: InputFormat) -> ir.Value:
    """Bits of the static scale; NaN if it is not a valid one."""
    given = llvm.load(i32(), address_of(static, constant(0), i32()))
    least, most = (constant(int(limit.view(np.int32))) for limit in static_limits(format))
    fits = arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, given, least), arith.cmpi(arith.CmpIPredicate.sle, given, most)
    )
    return arith.select(fits, given, constant(_NAN))


class GlobalRows:
    """The places of a row in global memory."""

    def __init__(self, values: ir.Value, scales: ir.Value, rows: InputRows, places: list[ir.Value]):
        self._values, self._scales, self._places = values, scales, places
        self.columns = rows.padded_columns

    def store(self, two: ir.Value, column: ir.Value) -> None:
        """Eight elements, in two words."""
        self._each(lambda row: self._store_at(two, row, column))

    def _store_at(self, two: ir.Value, row: ir.Value, column: ir.Value) -> None:
        at = arith.addi(arith.muli(row, constant(self.columns, i64())), wide(column))
        llvm.store(two, address_of(self._values, at, i8()), alignment=8)

    def store_scale(self, scale: ir.Value, unit: ir.Value | None) -> None:
        """Of all columns, or of a unit."""
        first = constant(0) if unit is None else arith.muli(unit, constant(ir.MemRefType(self._scales.type).shape[-1]))
        self._each(lambda row: llvm.store(scale, address_of(self._scales, arith.addi(wide(first), row), i32())))

    def _each(self, store: Callable[[ir.Value], Any]) -> None:
        for place in self._places:
            with utils.when(arith.cmpi(arith.CmpIPredicate.sge, place, constant(0))):
                store(wide(place))


class SharedRow:
    """The place of some units of a row in shared memory; see `quantize_row_to_shared`."""

    def __init__(
        self, values: ir.Value, scales: ir.Value, place: ir.Value, first: ir.Value, num_units: int, columns: int
    ):
        self._values, self._scales, self._place = values, scales, place
        self._first, self._num_units = first, num_units
        self.columns = columns

    def store(self, two: ir.Value, column: ir.Value) -> None:
        """Eight elements, in two words."""

        def store(slot: ir.Value) -> None:
            strides, _ = ir.MemRefType(self._values.type).get_strides_and_offset()
            line = arith.addi(arith.muli(slot, constant(strides[0])), arith.muli(self._place, constant(UNIT_COLUMNS)))
            sixteen = arith.xori(
                arith.divui(arith.remui(column, constant(UNIT_COLUMNS)), constant(16)),
                arith.remui(self._place, constant(8)),
            )
            at = arith.addi(arith.muli(sixteen, constant(16)), arith.remui(column, constant(16)))
            llvm.store(two, address_of(self._values, arith.addi(line, at), i8()), alignment=8)

        self._if_inside(arith.divui(column, constant(UNIT_COLUMNS)), store)

    def store_scale(self, scale: ir.Value, unit: ir.Value | None) -> None:
        """Of all columns, or of a unit."""
        if unit is None:
            llvm.store(scale, address_of(self._scales, self._place, i32()))
            return
        *_, rows = ir.MemRefType(self._scales.type).shape

        def store(slot: ir.Value) -> None:
            at = arith.addi(arith.muli(slot, constant(rows)), self._place)
            llvm.store(scale, address_of(self._scales, at, i32()))

        self._if_inside(unit, store)

    def _if_inside(self, unit: ir.Value, store: Callable[[ir.Value], None]) -> None:
        """Calls `store` with the slot of a unit, if it has one."""
        slot = arith.subi(unit, self._first)
        with utils.when(less(slot, constant(self._num_units))):
            store(slot)


class RowQuantizer:
    """One row, for one thread of the warpgroup that quantizes it."""

    def __init__(
        self, rows: InputRows, x: ir.Value, source: ir.Value, warp_maxima: ir.Value, to: GlobalRows | SharedRow
    ):
        self.dtype, self.columns, self.format = np.dtype(rows.values.dtype), rows.columns, rows.format
        self.x, self.warp_maxima, self.to = x, warp_maxima, to
        # `mov` hides the bound from LLVM, which would drop the branches of whole pieces; see `_store`.
        self.first = run("mov.b32 $0, $1;", arith.muli(thread_index(), constant(_VECTOR)))
        _, stride = ir.MemRefType(self.x.type).shape
        self.line = arith.muli(wide(source), constant(stride, i64()))
        self.pieces = range(-(-to.columns // _PIECE))

    def round(self, static: ir.Value | None) -> None:
        static_scale = None if static is None else _in_range(static, self.format)
        pieces = [self._load(piece) for piece in self.pieces]
        if static_scale is not None:
            self._store_scale(static_scale, None)
            scales = [(static_scale, None)] * len(pieces)
        elif self.format.block_size == "row":
            largest = self._largest([self._largest(words) for words in pieces])
            scale, finite = self._scale(self._across_warps(self._across_lanes(largest, _LANES)))
            self._store_scale(scale, None)
            scales = [(scale, finite)] * len(pieces)
        else:
            of_block = UNIT_COLUMNS // _VECTOR
            scales = [self._scale(self._across_lanes(self._largest(words), of_block)) for words in pieces]
            for piece, (scale, _) in enumerate(scales):
                self._store_scale(scale, piece)
        for piece, (words, scale) in enumerate(zip(pieces, scales, strict=True)):
            self._store(piece, words, *scale)

    def _column(self, piece: int) -> ir.Value:
        return arith.addi(self.first, constant(piece * _PIECE))

    def _load(self, piece: int) -> list[ir.Value]:
        """The thread's 8 elements, in 4 or 8 words; zeros past the last column."""
        column, element = self._column(piece), ir.MemRefType(self.x.type).element_type
        inside = less(column, constant(self.columns))
        at = arith.addi(self.line, wide(arith.select(inside, column, constant(0))))
        words = []
        for part in range(self.dtype.itemsize // 2):
            address = address_of(self.x, arith.addi(at, constant(4 * part, i64())), element)
            loaded = llvm.load(ir.VectorType.get((4,), i32()), address, alignment=16)
            words += [llvm.extractelement(loaded, constant(i)) for i in range(4)]
        return [arith.select(inside, word, constant(0)) for word in words]

    def _largest(self, words: list[ir.Value]) -> ir.Value:
        """The largest magnitude in words, or in each half of them."""
        size = self.dtype.itemsize
        magnitudes = [run(_MAGNITUDE[size], word) for word in words]
        while len(magnitudes) > 1:
            pairs = zip(magnitudes[::2], magnitudes[1::2], strict=False)
            rest = magnitudes[len(magnitudes) // 2 * 2 :]
            magnitudes = [run(_LARGER[size], one, other) for one, other in pairs] + rest
        return magnitudes[0]

    def _across_lanes(self, largest: ir.Value, lanes: int) -> ir.Value:
        """The largest, in words or in each half of them, over groups of so many lanes."""
        distance = lanes // 2
        while distance:
            other = utils.inline_ptx(
                _ACROSS.format(distance=distance), largest, result_types=i32(), has_side_effects=True
            )
            largest = run(_LARGER[self.dtype.itemsize], largest, other)
            distance //= 2
        return largest

    def _across_warps(self, largest: ir.Value) -> ir.Value:
        """The same over warps, in each of which all lanes have the same value."""
        warp = arith.divui(thread_index(), constant(_LANES))
        utils.warpgroup_barrier()  # all have read the words of the row before
        llvm.store(largest, address_of(self.warp_maxima, warp, i32()))  # all lanes store the same
        utils.warpgroup_barrier()
        return self._largest(load_words(self.warp_maxima, constant(0), WORDS))

    def _scale(self, largest: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Float32 bits of the scale for a largest magnitude, and whether that is finite."""
        size = self.dtype.itemsize
        if size == 2:
            largest = run(_LARGER_HALF, largest)
        infinity = 0x7C00 if self.dtype == np.float16 else _INFINITY[size]
        finite = less(largest, constant(infinity))
        if size == 2:
            largest = run(_AS_FLOAT[self.dtype.name][0], largest)
        scale = run(_QUOTIENT, largest, constant(_MOST_448))
        scale = arith.maxui(scale, constant(_LEAST_SCALE))
        return arith.select(finite, scale, constant(_NAN)), finite

    def _store_scale(self, scale: ir.Value, piece: int | None) -> None:
        if piece is None:
            with utils.when(less(thread_index(), constant(1))):
                self.to.store_scale(scale, None)
            return
        column = self._column(piece)
        leads = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(column, constant(UNIT_COLUMNS)), constant(0))
        with utils.when(arith.andi(leads, less(column, constant(self.to.columns)))):
            self.to.store_scale(scale, arith.divui(column, constant(UNIT_COLUMNS)))

    def _store(self, piece: int, words: list[ir.Value], scale: ir.Value, finite: ir.Value | None) -> None:
        """Rounds and stores. `finite`: whether the scale's elements are; None if the scale is static.

        Rounding is inside the branch: otherwise ptxas rounds all pieces at once, in twice as many registers.
        """
        column = self._column(piece)
        with utils.when(less(column, constant(self.to.columns))):
            self.to.store(pair(*self._rounded(words, scale, finite)), column)

    def _rounded(self, words: list[ir.Value], scale: ir.Value, finite: ir.Value | None) -> list[ir.Value]:
        """Two words of four elements each."""
        if self.dtype.itemsize == 2:
            floats = [run(text, word) for word in words for text in _AS_FLOAT[self.dtype.name]]
        else:
            floats = words
        if finite is None:  # values may be arbitrarily large, and infinity becomes NaN
            beyond = run(_PRODUCT, scale, constant(_BEYOND))
            quotients = self._quotients([run(_LIMITED, value, beyond) for value in floats], scale)
            quotients = [run(_SPOIL, value, quotient) for value, quotient in zip(floats, quotients, strict=True)]
        else:
            quotients = self._quotients(floats, scale)
        rounded = [run(_ROUND, *quotients[i : i + 4]) for i in (0, 4)]
        return rounded if finite is None else [arith.select(finite, word, constant(0)) for word in rounded]

    def _quotients(self, values: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
        """Quotients of values of at most 512 times the scale, so that the multiplication does not overflow."""
        power = arith.select(less(scale, constant(_SMALL)), constant(_RAISE), constant(_ONE))
        scaled = run(_PRODUCT, scale, power)
        reciprocal = run(_QUOTIENT, constant(_ONE), scaled)
        return [run(_CORRECTED, value, scaled, reciprocal, power) for value in values]
