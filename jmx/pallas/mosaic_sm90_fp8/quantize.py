"""Rounds rows to e4m3 on the way to `kernel`: grouped, padded, and with their scales.

By a Pallas Mosaic GPU kernel (`quantize`), or inside that of the products, to global memory (`quantize_row`) or to the
SM's shared memory (`quantize_row_to_shared`), as `fused_quantize` has it. A warpgroup takes a row: it loads all of it
at once, finds the largest magnitude, across warps by way of shared memory, then divides and rounds what it still has in
registers. So a row takes little more than one way to memory and back, which is what counts where rows are few. Its bits
are those of `jmx.numerics.input_formats.quantize`, NaN apart: quotients are IEEE's, and `cvt` rounds them.

A quotient is made of the scale's reciprocal, correctly rounded, by two corrections. By a theorem of Markstein (IBM
Journal of Research and Development 34, 1990, p. 111) the second one gives the correctly rounded quotient, unless a
remainder underflows. So small scales are raised by 2^64, with what they divide, which is exact; what underflows then
rounds to zero. `div.rn` takes twice as many instructions, and a branch.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS
from jmx.pallas.mosaic_sm90_fp8.quantize_row import WORDS, GlobalRows, RowQuantizer, SharedRow
from jmx.pallas.mosaic_sm90_fp8.rows import QuantizedRows, UnquantizedRows
from jmx.pallas.mosaic_sm90_fp8.wgmma import SWIZZLED
from jmx.pallas.sm90.launch import launch
from jmx.pallas.sm90.mlir import SCALAR, Fragment, address_of, constant, i32, i64, operation, wide


def quantize(rows: UnquantizedRows) -> QuantizedRows:
    """Rows in `rows.format`, by a launch of their own."""

    def body(x: Any, row_of: Any, static_scale: Any, values: Any, scales: Any, *, warp_maxima: Any) -> None:
        refs = rows._replace(x=x, row_of=row_of, static_scale=static_scale)
        quantize_row(refs, lax.axis_index("row"), values, scales, warp_maxima)

    kernel = plgpu.kernel(
        body,
        out_type=rows.quantized,
        grid=(rows.x.shape[0],),
        grid_names=("row",),
        kernel_name=f"quantize_{rows.format.name}",
        scratch_types={"warp_maxima": plgpu.SMEM((WORDS,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return QuantizedRows(*launch(kernel, rows.x, rows.row_of, rows.static_scale))


def quantize_row(rows: UnquantizedRows, row: jax.Array, values: Any, scales: Any, warp_maxima: Any) -> None:
    """What a warpgroup does for a row.

    Args:
        rows: with refs.
        row: of x.
        values, scales: refs to write, as in `rows.quantized`.
        warp_maxima: int32 (WORDS,) of shared memory, which other warpgroups do not use.
    """
    others = [source for source in (rows.row_of, rows.static_scale) if source is not None]
    refs = [rows.x, values, scales, warp_maxima, *others]

    @operation(arg_types=(SCALAR, *[plgpu.RefType()] * len(refs)))
    def body(
        _: Any, row: Fragment, x: ir.Value, values: ir.Value, scales: ir.Value, warp_maxima: ir.Value, *others: ir.Value
    ) -> None:
        number = row.registers.item()
        places = [number] if rows.row_of is None else _row_of(others[0], number)
        static = None if rows.static_scale is None else others[-1]
        RowQuantizer(rows, x, number, warp_maxima, GlobalRows(values, scales, rows, places)).round(static)

    body(row, *refs)


def quantize_row_to_shared(
    rows: UnquantizedRows,
    row: jax.Array,
    values: Any,
    scales: Any,
    warp_maxima: Any,
    *,
    place: jax.Array,
    first_unit: jax.Array,
    num_units: int,
    all_units: int,
) -> None:
    """`quantize_row` into shared memory: of the columns only `num_units` times 128, from `first_unit` times 128 on.

    Args:
        row: of x; `rows.row_of` does not count.
        values: ref to write, e4m3 (slots, n, 128), in tiles of 8 rows swizzled by 128 bytes.
        scales: ref to write, float32 (n,), or (slots, 1, n') where they belong to 128 columns.
        place: of the n rows.
        all_units: how many times 128 columns may be asked for, in all; behind the row's last one are zeros.
    """
    static = [] if rows.static_scale is None else [rows.static_scale]
    refs = [scales, warp_maxima, rows.x, *static]

    @operation(arg_types=(SCALAR, SCALAR, SCALAR, plgpu.RefType(SWIZZLED), *[plgpu.RefType()] * len(refs)))
    def body(_: Any, row: Fragment, place: Fragment, first: Fragment, values: ir.Value, *others: ir.Value) -> None:
        scales, warp_maxima, x, *static = others
        at = place.registers.item(), first.registers.item()
        here = SharedRow(values, scales, *at, num_units, all_units * UNIT_COLUMNS)
        RowQuantizer(rows, x, row.registers.item(), warp_maxima, here).round(static[0] if static else None)

    body(row, place, first_unit, values, *refs)


def _row_of(row_of: ir.Value, number: ir.Value) -> list[ir.Value]:
    _, places = ir.MemRefType(row_of.type).shape
    first = arith.muli(wide(number), constant(places, i64()))
    at = (arith.addi(first, constant(nth, i64())) for nth in range(places))
    return [llvm.load(i32(), address_of(row_of, one, i32())) for one in at]
