"""Quantizes one row to 8 bits, for one thread of the warpgroup: load, find the largest magnitude, divide, round."""

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
_ROUND_INTEGERS = (
    "{ .reg .s32 e, f, g, h; .reg .f32 a, b, c, d; .reg .b32 u; "
    "mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; mov.b32 d, $4; "
    "cvt.rni.s32.f32 e, a; cvt.rni.s32.f32 f, b; cvt.rni.s32.f32 g, c; cvt.rni.s32.f32 h, d; "
    "cvt.pack.sat.s8.s32.b32 u, h, g, 0; cvt.pack.sat.s8.s32.b32 $0, f, e, u; }"
)

Store = Callable[[ir.Value, Any], None]  # of elements from a column on, or of a scale of a unit


def _in_range(static: ir.Value, format: InputFormat) -> ir.Value:
    """Bits of the static scale; NaN if it is not a valid one."""
    given = llvm.load(i32(), address_of(static, constant(0), i32()))
    least, most = (constant(int(limit.view(np.int32))) for limit in static_limits(format))
    fits = arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, given, least), arith.cmpi(arith.CmpIPredicate.sle, given, most)
    )
    return arith.select(fits, given, constant(_NAN))


def stores_to_global(values: ir.Value, scales: ir.Value, columns: int, places: list[ir.Value]) -> tuple[Store, Store]:
    """How a row is stored in global memory: its values, of so many `columns`, and its scales.

    Args:
        places: the rows that it is written to; negative ones are skipped.
    """

    def each(store: Callable[[ir.Value], Any]) -> None:
        for place in places:
            with utils.when(arith.cmpi(arith.CmpIPredicate.sge, place, constant(0))):
                store(wide(place))

    def store_values(two: ir.Value, column: ir.Value) -> None:
        def store(row: ir.Value) -> None:
            at = arith.addi(arith.muli(row, constant(columns, i64())), wide(column))
            llvm.store(two, address_of(values, at, i8()), alignment=8)

        each(store)

    def store_scale(scale: ir.Value, unit: ir.Value | None) -> None:
        first = constant(0) if unit is None else arith.muli(unit, constant(ir.MemRefType(scales.type).shape[-1]))
        each(lambda row: llvm.store(scale, address_of(scales, arith.addi(wide(first), row), i32())))

    return store_values, store_scale


def stores_to_shared(
    values: ir.Value, scales: ir.Value, place: ir.Value, first_unit: ir.Value, num_units: int
) -> tuple[Store, Store]:
    """How some units of a row are stored in shared memory; see `quantize_row_to_shared`."""

    def if_inside(unit: ir.Value, store: Callable[[ir.Value], None]) -> None:
        """Calls `store` with the slot of a unit, if it has one."""
        slot = arith.subi(unit, first_unit)
        with utils.when(less(slot, constant(num_units))):
            store(slot)

    def store_values(two: ir.Value, column: ir.Value) -> None:
        def store(slot: ir.Value) -> None:
            strides, _ = ir.MemRefType(values.type).get_strides_and_offset()
            line = arith.addi(arith.muli(slot, constant(strides[0])), arith.muli(place, constant(UNIT_COLUMNS)))
            sixteen = arith.xori(
                arith.divui(arith.remui(column, constant(UNIT_COLUMNS)), constant(16)),
                arith.remui(place, constant(8)),
            )
            at = arith.addi(arith.muli(sixteen, constant(16)), arith.remui(column, constant(16)))
            llvm.store(two, address_of(values, arith.addi(line, at), i8()), alignment=8)

        if_inside(arith.divui(column, constant(UNIT_COLUMNS)), store)

    def store_scale(scale: ir.Value, unit: ir.Value | None) -> None:
        if unit is None:
            llvm.store(scale, address_of(scales, place, i32()))
            return
        *_, rows = ir.MemRefType(scales.type).shape

        def store(slot: ir.Value) -> None:
            at = arith.addi(arith.muli(slot, constant(rows)), place)
            llvm.store(scale, address_of(scales, at, i32()))

        if_inside(unit, store)

    return store_values, store_scale


def round_row(
    rows: InputRows,
    x: ir.Value,
    row: ir.Value,
    static: ir.Value | None,
    warp_maxima: ir.Value,
    columns: int,
    store_values: Store,
    store_scale: Store,
) -> None:
    """Quantizes one row, for one thread of the warpgroup.

    Args:
        rows: how.
        x: the rows' values, of which it is row `row`.
        static: the static scale, if there is one.
        warp_maxima: int32 (WORDS,) of shared memory.
        columns: of the result: whole units, with zeros after the row's own columns.
        store_values: stores eight elements, in two words, from a column on.
        store_scale: stores the scale of a unit; unit None: of all columns.
    """
    dtype, pieces = np.dtype(rows.values.dtype), range(-(-columns // _PIECE))
    # `mov` hides the bound from LLVM, which would drop the branches of whole pieces; see `store`.
    first = run("mov.b32 $0, $1;", arith.muli(thread_index(), constant(_VECTOR)))
    _, stride = ir.MemRefType(x.type).shape
    line = arith.muli(wide(row), constant(stride, i64()))

    def column_of(piece: int) -> ir.Value:
        return arith.addi(first, constant(piece * _PIECE))

    def store_scale_of(piece: int | None, scale: ir.Value) -> None:
        if piece is None:
            with utils.when(less(thread_index(), constant(1))):
                store_scale(scale, None)
            return
        column = column_of(piece)
        leads = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(column, constant(UNIT_COLUMNS)), constant(0))
        with utils.when(arith.andi(leads, less(column, constant(columns)))):
            store_scale(scale, arith.divui(column, constant(UNIT_COLUMNS)))

    static_scale = None if static is None else _in_range(static, rows.format)
    loaded = [_load(x, line, column_of(piece), rows.columns, dtype) for piece in pieces]
    if static_scale is not None:
        store_scale_of(None, static_scale)
        scales = [(static_scale, None)] * len(loaded)
    elif rows.format.block_size == "row":
        largest = _largest([_largest(words, dtype) for words in loaded], dtype)
        scale, finite = _scale(
            _across_warps(_across_lanes(largest, _LANES, dtype), warp_maxima, dtype), rows.format, dtype
        )
        store_scale_of(None, scale)
        scales = [(scale, finite)] * len(loaded)
    else:
        lanes = UNIT_COLUMNS // _VECTOR
        scales = [_scale(_across_lanes(_largest(words, dtype), lanes, dtype), rows.format, dtype) for words in loaded]
        for piece, (scale, _) in enumerate(scales):
            store_scale_of(piece, scale)
    for piece, words, scale in zip(pieces, loaded, scales, strict=True):
        column = column_of(piece)
        # Rounding is inside the branch: otherwise ptxas rounds all pieces at once, in twice as many registers.
        with utils.when(less(column, constant(columns))):
            store_values(pair(*_rounded(words, *scale, rows.format, dtype)), column)


def _load(x: ir.Value, line: ir.Value, column: ir.Value, columns: int, dtype: np.dtype[Any]) -> list[ir.Value]:
    """The thread's 8 elements, in 4 or 8 words; zeros past the last column."""
    element = ir.MemRefType(x.type).element_type
    inside = less(column, constant(columns))
    at = arith.addi(line, wide(arith.select(inside, column, constant(0))))
    words = []
    for part in range(dtype.itemsize // 2):
        address = address_of(x, arith.addi(at, constant(4 * part, i64())), element)
        loaded = llvm.load(ir.VectorType.get((4,), i32()), address, alignment=16)
        words += [llvm.extractelement(loaded, constant(i)) for i in range(4)]
    return [arith.select(inside, word, constant(0)) for word in words]


def _largest(words: list[ir.Value], dtype: np.dtype[Any]) -> ir.Value:
    """The largest magnitude in words, or in each half of them."""
    magnitudes = [run(_MAGNITUDE[dtype.itemsize], word) for word in words]
    while len(magnitudes) > 1:
        pairs = zip(magnitudes[::2], magnitudes[1::2], strict=False)
        rest = magnitudes[len(magnitudes) // 2 * 2 :]
        magnitudes = [run(_LARGER[dtype.itemsize], one, other) for one, other in pairs] + rest
    return magnitudes[0]


def _across_lanes(largest: ir.Value, lanes: int, dtype: np.dtype[Any]) -> ir.Value:
    """The largest, in words or in each half of them, over groups of so many lanes."""
    distance = lanes // 2
    while distance:
        other = utils.inline_ptx(_ACROSS.format(distance=distance), largest, result_types=i32(), has_side_effects=True)
        largest = run(_LARGER[dtype.itemsize], largest, other)
        distance //= 2
    return largest


def _across_warps(largest: ir.Value, warp_maxima: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
    """The same over warps, in each of which all lanes have the same value."""
    warp = arith.divui(thread_index(), constant(_LANES))
    utils.warpgroup_barrier()  # all have read the words of the row before
    llvm.store(largest, address_of(warp_maxima, warp, i32()))  # all lanes store the same
    utils.warpgroup_barrier()
    return _largest(load_words(warp_maxima, constant(0), WORDS), dtype)


def _scale(largest: ir.Value, format: InputFormat, dtype: np.dtype[Any]) -> tuple[ir.Value, ir.Value]:
    """Float32 bits of the scale for a largest magnitude, and whether that is finite."""
    if dtype.itemsize == 2:
        largest = run(_LARGER_HALF, largest)
    infinity = 0x7C00 if dtype == np.float16 else _INFINITY[dtype.itemsize]
    finite = less(largest, constant(infinity))
    if dtype.itemsize == 2:
        largest = run(_AS_FLOAT[dtype.name][0], largest)
    scale = run(_QUOTIENT, largest, constant(int(np.float32(format.largest).view(np.int32))))
    scale = arith.maxui(scale, constant(_LEAST_SCALE))
    return arith.select(finite, scale, constant(_NAN)), finite


def _rounded(
    words: list[ir.Value], scale: ir.Value, finite: ir.Value | None, format: InputFormat, dtype: np.dtype[Any]
) -> list[ir.Value]:
    """Two words of four elements each. `finite`: whether the scale's elements are; None if the scale is static."""
    floats = [run(text, word) for word in words for text in _AS_FLOAT[dtype.name]] if dtype.itemsize == 2 else words
    if finite is None:  # values may be arbitrarily large, and infinity becomes NaN
        beyond = run(_PRODUCT, scale, constant(_BEYOND))
        quotients = _quotients([run(_LIMITED, value, beyond) for value in floats], scale)
        quotients = [run(_SPOIL, value, quotient) for value, quotient in zip(floats, quotients, strict=True)]
    else:
        quotients = _quotients(floats, scale)
    text = _ROUND_INTEGERS if format.element_dtype == np.int8 else _ROUND
    rounded = [run(text, *quotients[i : i + 4]) for i in (0, 4)]
    return rounded if finite is None else [arith.select(finite, word, constant(0)) for word in rounded]


def _quotients(values: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    """Quotients of values of at most 512 times the scale, so that the multiplication does not overflow."""
    power = arith.select(less(scale, constant(_SMALL)), constant(_RAISE), constant(_ONE))
    scaled = run(_PRODUCT, scale, power)
    reciprocal = run(_QUOTIENT, constant(_ONE), scaled)
    return [run(_CORRECTED, value, scaled, reciprocal, power) for value in values]
