"""Quantizes rows to e4m3 or int8: grouped by expert, padded, and with their scales.

This is a separate kernel (`quantize`), or part of the kernel that multiplies (`fused_quantize`), which writes to global
memory (`quantize_row`) or to the SM's shared memory (`quantize_row_to_shared`). A warpgroup takes a row: it loads all
of it at once, finds the largest magnitude (across warps through shared memory), then divides and rounds the values in
registers. So a row takes little more than one round trip to memory, which matters for few rows. The bits are those of
`jmx.numerics.input_formats.quantize`, except for NaN: quotients are IEEE's (`sm90.row`), and `cvt` rounds them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS
from jmx.pallas.mosaic_sm90_fp8.quantize_row import round_row, stores_to_global, stores_to_shared
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.mosaic_sm90_fp8.wgmma import SWIZZLED
from jmx.pallas.sm90.launch import launch
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation, optional
from jmx.pallas.sm90.row import WORDS, places_of
from jmx.util.typing import Array, Int32


def quantize(rows: InputRows) -> InputRows:
    """Quantizes rows to `rows.format` in a separate launch."""

    def body(rows: InputRows, values: Ref, scales: Ref, *, warp_maxima: Ref) -> None:
        with jax.named_scope("quantize"):
            quantize_row(rows, lax.axis_index("row"), values, scales, warp_maxima)

    kernel = plgpu.kernel(
        body,
        out_type=rows.quantized_shapes,
        grid=(rows.values.shape[0],),
        grid_names=("row",),
        kernel_name=f"quantize_{rows.format.name}",
        scratch_types={"warp_maxima": plgpu.SMEM((WORDS,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return rows.with_quantized(*launch(kernel, rows))


def quantize_row(rows: InputRows, row: Int32[Array, ""], values: Ref, scales: Ref, warp_maxima: Ref) -> None:
    """Quantizes a row to global memory, by one warpgroup.

    Args:
        rows: with references.
        row: of x.
        values, scales: references to write to, of shapes `rows.quantized_shapes`.
        warp_maxima: int32 (WORDS,) of shared memory, which other warpgroups do not use.
    """
    refs = (rows.values, values, scales, warp_maxima, rows.row_of, rows.static_scale)

    @operation(arg_types=(SCALAR, *(optional(ref, plgpu.RefType()) for ref in refs)))
    def body(
        _: Any,
        row: Fragment,
        x: ir.Value,
        values: ir.Value,
        scales: ir.Value,
        warp_maxima: ir.Value,
        row_of: ir.Value | None,
        static_scale: ir.Value | None,
    ) -> None:
        number = row.registers.item()
        places = [number] if row_of is None else places_of(row_of, number)
        columns = rows.padded_columns
        stores = stores_to_global(values, scales, columns, places)
        round_row(rows, x, number, static_scale, warp_maxima, columns, *stores)

    body(row, *refs)


def quantize_row_to_shared(
    rows: InputRows,
    row: Int32[Array, ""],
    values: Ref,
    scales: Ref,
    warp_maxima: Ref,
    *,
    place: Int32[Array, ""],
    first_unit: Int32[Array, ""],
    num_units: int,
    all_units: int,
) -> None:
    """Quantizes `num_units` units of a row, from `first_unit` on, to shared memory, by one warpgroup.

    Args:
        row: of x; `rows.row_of` is not used.
        values: a reference to write to, e4m3 (slots, n, 128), with transforms `SWIZZLED`.
        scales: a reference to write to, float32 (n,), or (slots, 1, n') if they belong to 128 columns.
        place: which of the n rows is written.
        all_units: units of all parts of the columns; those past the row's end are zeros.
    """
    refs = (scales, warp_maxima, rows.values, rows.static_scale)

    @operation(
        arg_types=(
            SCALAR,
            SCALAR,
            SCALAR,
            plgpu.RefType(SWIZZLED),
            *(optional(ref, plgpu.RefType()) for ref in refs),
        )
    )
    def body(
        _: Any,
        row: Fragment,
        place: Fragment,
        first: Fragment,
        values: ir.Value,
        scales: ir.Value,
        warp_maxima: ir.Value,
        x: ir.Value,
        static_scale: ir.Value | None,
    ) -> None:
        at = place.registers.item(), first.registers.item()
        stores = stores_to_shared(values, scales, *at, num_units)
        round_row(rows, x, row.registers.item(), static_scale, warp_maxima, all_units * UNIT_COLUMNS, *stores)

    body(row, place, first_unit, values, *refs)
