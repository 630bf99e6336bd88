"""Quantizes one row to 8 bits, for one thread of the warpgroup: load, find the largest magnitude, divide, round."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.numerics.input_formats import InputFormat
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.sm90.mlir import address_of, constant, i8, i32, i64, less, pair, run, thread_index, utils, wide
from jmx.pallas.sm90.row import (
    LANES,
    PIECE,
    across_lanes,
    across_warps,
    each_place,
    floats_of,
    in_range,
    largest_of,
    limited_quotients,
    load,
    quotients,
    scale_of_row,
)
from jmx.pallas.sm90.tiles import VECTOR

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


def stores_to_global(values: ir.Value, scales: ir.Value, columns: int, places: list[ir.Value]) -> tuple[Store, Store]:
    """How a row is stored in global memory: its values, of so many `columns`, and its scales.

    Args:
        places: the rows that it is written to; negative ones are skipped.
    """

    def store_values(two: ir.Value, column: ir.Value) -> None:
        def store(row: ir.Value) -> None:
            at = arith.addi(arith.muli(row, constant(columns, i64())), wide(column))
            llvm.store(two, address_of(values, at, i8()), alignment=8)

        each_place(places, store)

    def store_scale(scale: ir.Value, unit: ir.Value | None) -> None:
        first = constant(0) if unit is None else arith.muli(unit, constant(ir.MemRefType(scales.type).shape[-1]))
        each_place(places, lambda row: llvm.store(scale, address_of(scales, arith.addi(wide(first), row), i32())))

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
    dtype, pieces = np.dtype(rows.values.dtype), range(-(-columns // PIECE))
    # `mov` hides the bound from LLVM, which would drop the branches of whole pieces; see `store`.
    first = run("mov.b32 $0, $1;", arith.muli(thread_index(), constant(VECTOR)))
    _, stride = ir.MemRefType(x.type).shape
    line = arith.muli(wide(row), constant(stride, i64()))

    def column_of(piece: int) -> ir.Value:
        return arith.addi(first, constant(piece * PIECE))

    def store_scale_of(piece: int | None, scale: ir.Value) -> None:
        if piece is None:
            with utils.when(less(thread_index(), constant(1))):
                store_scale(scale, None)
            return
        column = column_of(piece)
        leads = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(column, constant(UNIT_COLUMNS)), constant(0))
        with utils.when(arith.andi(leads, less(column, constant(columns)))):
            store_scale(scale, arith.divui(column, constant(UNIT_COLUMNS)))

    static_scale = None if static is None else in_range(static, rows.format)
    loaded = [load(x, line, column_of(piece), rows.columns, dtype) for piece in pieces]
    if static_scale is not None:
        store_scale_of(None, static_scale)
        scales = [(static_scale, None)] * len(loaded)
    elif rows.format.block_size == "row":
        largest = largest_of([largest_of(words, dtype) for words in loaded], dtype)
        largest = across_warps(across_lanes(largest, LANES, dtype), warp_maxima, dtype)
        scale, finite = scale_of_row(largest, rows.format, dtype)
        store_scale_of(None, scale)
        scales = [(scale, finite)] * len(loaded)
    else:
        lanes = UNIT_COLUMNS // VECTOR
        largest_of_units = [across_lanes(largest_of(words, dtype), lanes, dtype) for words in loaded]
        scales = [scale_of_row(largest, rows.format, dtype) for largest in largest_of_units]
        for piece, (scale, _) in enumerate(scales):
            store_scale_of(piece, scale)
    for piece, words, scale in zip(pieces, loaded, scales, strict=True):
        column = column_of(piece)
        # Rounding is inside the branch: otherwise ptxas rounds all pieces at once, in twice as many registers.
        with utils.when(less(column, constant(columns))):
            store_values(pair(*_rounded(words, *scale, rows.format, dtype)), column)


def _rounded(
    words: list[ir.Value], scale: ir.Value, finite: ir.Value | None, format: InputFormat, dtype: np.dtype[Any]
) -> list[ir.Value]:
    """Two words of four elements each. `finite`: whether the scale's elements are; None if the scale is static."""
    floats = floats_of(words, dtype)
    found = limited_quotients(floats, scale) if finite is None else quotients(floats, scale)
    text = _ROUND_INTEGERS if format.element_dtype == np.int8 else _ROUND
    rounded = [run(text, *found[i : i + 4]) for i in (0, 4)]
    return rounded if finite is None else [arith.select(finite, word, constant(0)) for word in rounded]
