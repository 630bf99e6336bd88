"""Epilogue of a tile, one thread at a time: scales and biases by row, and stores to global memory."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.accumulator import of_registers, own_layout, row_array, row_size
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.mlir import (
    SCALAR,
    Fragment,
    address_of,
    constant,
    f32,
    i32,
    i64,
    less,
    operation,
    pair,
    thread_index,
    utils,
    wide,
)


def load_row(
    array: Any, rows: Rows, expert: jax.Array, tile: jax.Array, order: Any = None
) -> tuple[jax.Array, jax.Array]:
    """What `array` (E, N) has for the thread's first and second row of a tile, float32 (256,); 0 in the padding.

    `order`: a ref int32 (E, outputs) of the output in whose place, in `array`, each one stands; None: in its own.
    """
    size = row_size(8)
    orders = [] if order is None else [order]
    types = [plgpu.RefType(), SCALAR, SCALAR, *[plgpu.RefType()] * len(orders)]

    @operation(arg_types=types, return_type=(row_array(size), row_array(size)))
    def body(_: Any, array: ir.Value, expert: Fragment, tile: Fragment, *orders: ir.Value) -> tuple[Fragment, ...]:
        number = expert.registers.item()

        def of_output(row: ir.Value) -> ir.Value:
            for order in orders:
                at, inside = index_of_row(rows.outputs, number, row)
                row = arith.select(inside, llvm.load(i32(), address_of(order, at, i32())), row)
            return row

        mine = rows.weight(rows.output(tile.registers.item()), of_output)
        values = (load_of_row(array, rows.num_rows, number, row) for row in mine)
        return tuple(of_registers([pair(value, value)], size) for value in values)

    return body(array, expert, tile, *orders)


def load_of_row(array: ir.Value, num_rows: int, expert: ir.Value, row: ir.Value) -> ir.Value:
    """What `array` (E, num_rows) has for a row, float32; 0 past the end."""
    element = ir.MemRefType(array.type).element_type
    at, inside = index_of_row(num_rows, expert, row)
    value = llvm.load(element, address_of(array, at, element))
    value = value if element == f32() else arith.extf(f32(), value)
    return arith.select(inside, value, utils.c(0.0, f32()))


def index_of_row(num_rows: int, expert: ir.Value, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Where an array (E, num_rows) has a row, and whether it has it: of a row past the end, where the first one is."""
    inside = less(row, constant(num_rows))
    return wide(arith.addi(arith.muli(expert, constant(num_rows)), arith.select(inside, row, constant(0)))), inside


def repeat(row: jax.Array, n: int) -> jax.Array:
    """One value a row, as `load_row` has it, for each of the thread's n / 4 own elements."""

    @operation(arg_types=(own_layout(row_size(8)),), return_type=row_array(row_size(n)))
    def body(_: Any, row: Fragment) -> Fragment:
        return of_registers([row.registers.item()] * (n // 8), row_size(n))

    return body(row)


def store(
    out: Any,
    arrays: Sequence[jax.Array],
    rows: Rows,
    tile: jax.Array,
    first: jax.Array,
    count: jax.Array,
) -> None:
    """Writes a tile's outputs, transposed, to out (R, num_outputs) in global memory.

    Args:
        arrays: own elements of the thread's first row, and of its second where there is no gate; out's dtype.
        first: the row of `out` that takes the accumulator's first column.
        count: columns that there are; others are not written.
    """
    num_outputs = rows.num_outputs
    own = [own_layout(array.shape[0]) for array in arrays]

    @operation(arg_types=(plgpu.RefType(), *own, *[SCALAR] * 3))
    def body(_: Any, out: ir.Value, *args: Any) -> None:
        args, (tile, first, count) = args[: len(own)], args[len(own) :]
        tile, first, count = (scalar.registers.item() for scalar in (tile, first, count))
        element = ir.MemRefType(out.type).element_type
        bits = utils.bitwidth(element)
        row = rows.output(tile)
        column = arith.muli(arith.remui(thread_index(), constant(4)), constant(2))
        line = arith.muli(wide(arith.addi(first, column)), constant(num_outputs, i64()))

        for second, array in enumerate(args):
            output = arith.addi(row, constant(8 * second))
            inside = less(output, constant(num_outputs))
            address = address_of(out, arith.addi(line, wide(output)), element)
            left = arith.select(inside, arith.subi(count, column), constant(0))  # columns from the thread's first on
            for eight, two in enumerate(array.registers.flat):
                for i in range(2):
                    there = arith.cmpi(arith.CmpIPredicate.slt, constant(8 * eight + i), left)
                    value = llvm.extractelement(two, constant(i))
                    value = utils.bitcast(value, ir.IntegerType.get_signless(bits))
                    offset = (8 * eight + i) * num_outputs * bits // 8
                    text = f"@$2 st.global.b{bits} [$0 + {offset}], $1;"
                    utils.inline_ptx(text, address, value, there, has_side_effects=True)

    body(out, *arrays, tile, first, count)
