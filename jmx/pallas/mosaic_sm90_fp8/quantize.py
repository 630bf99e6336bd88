"""Rounds rows to e4m3 on the way to `kernel`: grouped, padded, and with their scales.

By a Pallas Mosaic GPU kernel (`quantize`), or inside that of the products, to global memory (`round_row`) or to the
SM's shared memory (`keep_row`), as `fused_quantize` has it. A warpgroup takes a row: it loads all of it at once, finds
the largest magnitude, across warps by way of shared memory, then divides and rounds what it still has in registers. So
a row takes little more than one way to memory and back, which is what counts where rows are few. Its bits are those of
`jmx.numerics.input_formats.quantize`, NaN apart: quotients are IEEE's, and `cvt` rounds them.

A quotient is made of the scale's reciprocal, correctly rounded, by two corrections. By a theorem of Markstein (IBM
Journal of Research and Development 34, 1990, p. 111) the second one gives the correctly rounded quotient, unless a
remainder underflows. So small scales are raised by 2^64, with what they divide, which is exact; what underflows then
rounds to zero. `div.rn` takes twice as many instructions, and a branch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS
from jmx.pallas.mosaic_sm90_fp8.quantize_row import WORDS, GlobalRows, Inputs, RowQuantizer, SharedRow, Unrounded
from jmx.pallas.mosaic_sm90_fp8.wgmma import SWIZZLED
from jmx.pallas.sm90.launch import launch
from jmx.pallas.sm90.mlir import SCALAR, Fragment, address_of, constant, i32, i64, operation, wide


def quantize(rows: Unrounded) -> Inputs:
    """Rows in `rows.format`, by a launch of their own."""
    given = [rows.x, rows.row_of, rows.static_scale]

    def body(*refs: Any) -> None:
        rest = [*refs]
        sources = Sources(*(None if one is None else rest.pop(0) for one in given))
        round_row(rows, lax.axis_index("row"), sources, *rest)

    kernel = plgpu.kernel(
        body,
        out_type=rows.rounded,
        grid=(rows.x.shape[0],),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((WORDS,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return Inputs(*launch(kernel, *(one for one in given if one is not None)))


class Sources(NamedTuple):
    """Refs of what rows are rounded from: those of `Unrounded`, and None for what there is not."""

    x: Any
    row_of: Any
    static_scale: Any


def round_row(rows: Unrounded, row: jax.Array, sources: Sources, values: Any, scales: Any, of_warps: Any) -> None:
    """What a warpgroup does for a row.

    Args:
        row: of x.
        values, scales: refs to write, as in `rows.rounded`.
        of_warps: int32 (WORDS,) of shared memory, which other warpgroups do not use.
    """
    others = [source for source in sources[1:] if source is not None]
    refs = [sources.x, values, scales, of_warps, *others]

    @operation(arg_types=(SCALAR, *[plgpu.RefType()] * len(refs)))
    def body(
        _: Any, row: Fragment, x: ir.Value, values: ir.Value, scales: ir.Value, of_warps: ir.Value, *others: ir.Value
    ) -> None:
        rest, number = [*others], row.registers.item()
        places = [number] if sources.row_of is None else _row_of(rest.pop(0), number)
        static = None if sources.static_scale is None else rest.pop(0)
        RowQuantizer(rows, x, number, of_warps, GlobalRows(values, scales, rows, places)).round(static)

    body(row, *refs)


def keep_row(
    rows: Unrounded,
    row: jax.Array,
    sources: Sources,
    values: Any,
    scales: Any,
    of_warps: Any,
    *,
    place: jax.Array,
    first_unit: jax.Array,
    num_units: int,
    all_units: int,
) -> None:
    """`round_row` into shared memory: of the row's columns only `num_units` times 128, from `first_unit` times 128 on.

    Args:
        row: of x; `sources.row_of` does not count.
        values: ref to write, e4m3 (slots, n, 128), in tiles of 8 rows swizzled by 128 bytes.
        scales: ref to write, float32 (n,), or (slots, 1, n') where they belong to 128 columns.
        place: of the n rows.
        all_units: how many times 128 columns may be asked for, in all; behind the row's last one are zeros.
    """
    static = [] if sources.static_scale is None else [sources.static_scale]
    refs = [scales, of_warps, sources.x, *static]

    @operation(arg_types=(SCALAR, SCALAR, SCALAR, plgpu.RefType(SWIZZLED), *[plgpu.RefType()] * len(refs)))
    def body(_: Any, row: Fragment, place: Fragment, first: Fragment, values: ir.Value, *others: ir.Value) -> None:
        scales, of_warps, x, *static = others
        at = place.registers.item(), first.registers.item()
        here = SharedRow(values, scales, *at, num_units, all_units * UNIT_COLUMNS)
        RowQuantizer(rows, x, row.registers.item(), of_warps, here).round(static[0] if static else None)

    body(row, place, first_unit, values, *refs)


def _row_of(row_of: ir.Value, number: ir.Value) -> list[ir.Value]:
    _, places = ir.MemRefType(row_of.type).shape
    first = arith.muli(wide(number), constant(places, i64()))
    at = (arith.addi(first, constant(nth, i64())) for nth in range(places))
    return [llvm.load(i32(), address_of(row_of, one, i32())) for one in at]
