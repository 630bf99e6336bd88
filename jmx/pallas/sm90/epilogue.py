"""The epilogue of a tile for one thread: scales and biases of rows, and stores to global memory."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90 import mlir
from jmx.pallas.sm90.accumulator import of_registers, own_layout, row_array, row_size
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation, optional
from jmx.util.typing import Array, Float32, Int32, Num


def load_row(
    array: Ref, rows: Rows, expert: Int32[Array, ""], tile: Int32[Array, ""], order: Ref | None = None
) -> tuple[Float32[Array, "256"], Float32[Array, "256"]]:
    """array[expert, row], of a reference (E, N), for the thread's first and second row of a tile; 0 in the padding.

    `order`: a reference int32 (E, outputs): `array` has an output's value in the place of output order[expert, output].
    """
    size = row_size(8)
    types = [plgpu.RefType(), SCALAR, SCALAR, optional(order, plgpu.RefType())]

    @operation(arg_types=types, return_type=(row_array(size), row_array(size)))
    def body(_: Any, array: ir.Value, expert: Fragment, tile: Fragment, order: ir.Value | None) -> tuple[Fragment, ...]:
        number = expert.registers.item()

        def of_output(row: ir.Value) -> ir.Value:
            if order is None:
                return row
            at, inside = index_of_row(rows.outputs, number, row)
            return arith.select(inside, llvm.load(mlir.i32(), mlir.address_of(order, at, mlir.i32())), row)

        both = rows.weight(rows.output(tile.registers.item()), of_output)
        values = (load_of_row(array, rows.num_rows, number, row) for row in both)
        return tuple(of_registers([mlir.pair(value, value)], size) for value in values)

    return body(array, expert, tile, order)


def load_of_row(array: ir.Value, num_rows: int, expert: ir.Value, row: ir.Value) -> ir.Value:
    """array[expert, row], of a reference (E, num_rows), as float32; 0 past the end."""
    element = ir.MemRefType(array.type).element_type
    at, inside = index_of_row(num_rows, expert, row)
    value = llvm.load(element, mlir.address_of(array, at, element))
    value = value if element == mlir.f32() else arith.extf(mlir.f32(), value)
    return arith.select(inside, value, mlir.utils.c(0.0, mlir.f32()))


def index_of_row(num_rows: int, expert: ir.Value, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The flat index of (expert, row) in an array (E, num_rows), and whether it has that row; if not, that of row 0."""
    inside = mlir.less(row, mlir.constant(num_rows))
    start = arith.muli(expert, mlir.constant(num_rows))
    return mlir.wide(arith.addi(start, arith.select(inside, row, mlir.constant(0)))), inside


def repeat(row: Float32[Array, "256"], n: int) -> Float32[Array, " m"]:
    """A value from `load_row`, repeated to per-thread elements of n columns."""

    @operation(arg_types=(own_layout(row_size(8)),), return_type=row_array(row_size(n)))
    def body(_: Any, row: Fragment) -> Fragment:
        return of_registers([row.registers.item()] * (n // 8), row_size(n))

    return body(row)


def load_columns(scales: Ref, n: int, first: Int32[Array, ""], count: Int32[Array, ""]) -> Float32[Array, " m"]:
    """scales[first + column], of a reference float32 (R,), as per-thread elements of n columns; undefined from column
    `count` on."""

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=row_array(row_size(n)))
    def body(_: Any, scales: ir.Value, first: Fragment, count: Fragment) -> Fragment:
        load = _column_loader(scales, first, count)
        return of_registers([mlir.pair(load(eight), load(eight + 1)) for eight in range(0, n, 8)], row_size(n))

    return body(scales, first, count)


def _column_loader(scales: ir.Value, first: Fragment, count: Fragment) -> Callable[[int], ir.Value]:
    """Loads scales[first + column] for the thread's `nth` column; from column `count` on, that of the last one."""
    start, last = first.registers.item(), arith.subi(count.registers.item(), mlir.constant(1))
    column = arith.muli(arith.remui(mlir.thread_index(), mlir.constant(4)), mlir.constant(2))

    def load(nth: int) -> ir.Value:
        at = arith.minsi(arith.addi(column, mlir.constant(nth)), last)
        return llvm.load(mlir.f32(), mlir.address_of(scales, mlir.wide(arith.addi(start, at)), mlir.f32()))

    return load


def times_columns(
    arrays: Sequence[Float32[Array, " m"]], scales: Ref, first: Int32[Array, ""], count: Int32[Array, ""]
) -> list[Float32[Array, " m"]]:
    """Per-thread elements of rows times `load_columns`, which needs no registers for all of these at once."""
    size = arrays[0].shape[0]
    types = (plgpu.RefType(), SCALAR, SCALAR, [own_layout(size)] * len(arrays))

    @operation(arg_types=types, return_type=(row_array(size),) * len(arrays))
    def body(_: Any, scales: ir.Value, first: Fragment, count: Fragment, arrays: list[Fragment]) -> Any:
        load = _column_loader(scales, first, count)
        results: list[list[ir.Value]] = [[] for _ in arrays]
        for eight in range(size // row_size(8)):
            two = mlir.pair(load(8 * eight), load(8 * eight + 1))
            for array, its in zip(arrays, results, strict=True):
                its.append(arith.mulf(array.registers.flat[eight], two))
        return tuple(of_registers(its, size) for its in results)

    return [*body(scales, first, count, [*arrays])]


def store(
    out: Ref,
    arrays: Sequence[Num[Array, " m"]],
    rows: Rows,
    tile: Int32[Array, ""],
    first: Int32[Array, ""],
    count: Int32[Array, ""],
) -> None:
    """Writes a tile's outputs, transposed, to a reference (R, num_outputs) to global memory.

    Args:
        arrays: per-thread elements of the first row, and without a gate of the second one; out's dtype.
        first: the row of `out` for the accumulator's first column.
        count: how many of the accumulator's columns are written.
    """
    num_outputs = rows.num_outputs
    layouts = [own_layout(array.shape[0]) for array in arrays]

    @operation(arg_types=(plgpu.RefType(), layouts, SCALAR, SCALAR, SCALAR))
    def body(_: Any, out: ir.Value, arrays: list[Fragment], *scalars: Fragment) -> None:
        tile, first, count = (scalar.registers.item() for scalar in scalars)
        element = ir.MemRefType(out.type).element_type
        bits = mlir.utils.bitwidth(element)
        row = rows.output(tile)
        column = arith.muli(arith.remui(mlir.thread_index(), mlir.constant(4)), mlir.constant(2))
        line = arith.muli(mlir.wide(arith.addi(first, column)), mlir.constant(num_outputs, mlir.i64()))

        for second, array in enumerate(arrays):
            output = arith.addi(row, mlir.constant(8 * second))
            inside = mlir.less(output, mlir.constant(num_outputs))
            address = mlir.address_of(out, arith.addi(line, mlir.wide(output)), element)
            # Of the columns from the thread's first on.
            left = arith.select(inside, arith.subi(count, column), mlir.constant(0))
            for eight, two in enumerate(array.registers.flat):
                for i in range(2):
                    there = arith.cmpi(arith.CmpIPredicate.slt, mlir.constant(8 * eight + i), left)
                    value = llvm.extractelement(two, mlir.constant(i))
                    value = mlir.utils.bitcast(value, ir.IntegerType.get_signless(bits))
                    offset = (8 * eight + i) * num_outputs * bits // 8
                    text = f"@$2 st.global.b{bits} [$0 + {offset}], $1;"
                    mlir.utils.inline_ptx(text, address, value, there, has_side_effects=True)

    body(out, [*arrays], tile, first, count)
