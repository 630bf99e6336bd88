"""Products with tokens as operand A of `wgmma`, for one thread.

These are not transposed: each of two warpgroups takes 64 rows of x as A, and all 128 rows of the weight in a stage, two
tiles, as B. The thread of warp `w` and lane `l` has the *tokens* `16 * w + l // 4` and the one 8 below, and of both
tiles the rows `8 * i + 2 * (l % 4) + {0, 1}`. These are *first* rows if i is even and *second* rows if it is odd, as in
`sm90.accumulator`: in a gated weight gates and their ups.

This is faster if a tile's first rows share a scale, and its second rows too: then a thread multiplies its sums by eight
factors, computed from six scales. Which factor belongs to which sum is known at compile time.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8.config import ROW_BYTES
from jmx.pallas.mosaic_sm90_fp8.elements import Elements
from jmx.pallas.mosaic_sm90_fp8.staging import size_and_span, swizzled_rows
from jmx.pallas.mosaic_sm90_fp8.wgmma import SWIZZLED, descriptor, load_float, plus, slices, start_product, zeros
from jmx.pallas.sm90.accumulator import accumulator, of_registers, row_array, row_size, sums_of, wait_for_products
from jmx.pallas.sm90.epilogue import load_of_row
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.mlir import constant, i32, pair, thread_index, utils
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation, optional, result
from jmx.pallas.sm90.pipeline import Stage
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float32, Int32, Num

TILES = 2  # of the weight in a stage
TOKENS = TILE  # of a warpgroup
WIDTH = TILES * TILE  # rows of the weight in a stage
BOTH = TILES * TOKENS  # of both warpgroups
_SUMS = result((TOKENS, WIDTH), jnp.float32, plgpu.Layout.WGMMA)
_SIZE = row_size(WIDTH)  # of an array of per-thread elements: of the first rows, or of the second ones


def _token() -> ir.Value:
    """The thread's first token among its warpgroup's."""
    warp, lane = arith.divui(thread_index(), constant(32)), arith.remui(thread_index(), constant(32))
    return arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))


def _column() -> ir.Value:
    """The thread's first of each 8 rows of the weight."""
    return arith.muli(arith.remui(thread_index(), constant(4)), constant(2))


def multiply(unit: Stage, first: Int32[Array, ""], elements: Elements) -> Float32[Array, "64 128"]:
    """Starts the product of 64 tokens and a unit's rows, which is complete after `add`.

    Args:
        unit: of both tiles: `values` uint8 (2, 64, 128), `scales` (2, 1, 64) floats or None, `x` (n, 128) e4m3,
            `x_scales` (n,).
        first: the first of the tokens, a multiple of 64.
        elements: both operands' are e4m3.
    """

    @operation(arg_types=(SCALAR, *[plgpu.RefType(SWIZZLED)] * 2), return_type=_SUMS)
    def body(_: Any, first: Fragment, x: ir.Value, values: ir.Value) -> Fragment:
        tokens = descriptor(x, first.registers.item())
        sums = start_product(None, slices(tokens), descriptor(values), WIDTH, elements)
        return accumulator(zeros(WIDTH, elements), sums)

    return body(first, unit.x, unit.values)


def add(
    totals: Float32[Array, "64 128"], sums: Float32[Array, "64 128"], unit: Stage, first: Int32[Array, ""]
) -> Float32[Array, "64 128"]:
    """Waits for `sums` of a unit, and adds them, times its scales, to `totals`."""

    @operation(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.Layout.WGMMA,
            SCALAR,
            plgpu.RefType(),
            optional(unit.scales, plgpu.RefType()),
        ),
        return_type=_SUMS,
    )
    def body(
        _: Any, totals: Fragment, sums: Fragment, first: Fragment, x_scales: ir.Value, scales: ir.Value | None
    ) -> Fragment:
        token = arith.addi(first.registers.item(), _token())
        of_tokens = [load_float(x_scales, arith.addi(token, constant(8 * i))) for i in range(2)]
        factors = [of_tokens] * (WIDTH // 8)
        if scales is not None:
            of_rows = [[load_float(scales, constant(TILE * tile + i)) for i in range(2)] for tile in range(TILES)]
            both = [[[arith.mulf(token, row) for token in of_tokens] for row in rows] for rows in of_rows]
            factors = [rows[eight % 2] for rows in both for eight in range(TILE // 8)]
        products = wait_for_products(sums_of(sums), 0)
        added = [
            plus(total, product, [factors[nth // 4][nth // 2 % 2]])
            for nth, (total, product) in enumerate(zip(sums_of(totals), products, strict=True))
        ]
        return accumulator(totals, added)

    return body(totals, sums, first, unit.x_scales, unit.scales)


def split_rows(sums: Float32[Array, "64 128"]) -> tuple[Float32[Array, " m"], Float32[Array, " m"]]:
    """Per-thread elements of first and of second rows, for each 16 rows of the weight those of both tokens."""

    @operation(arg_types=(plgpu.Layout.WGMMA,), return_type=(row_array(_SIZE), row_array(_SIZE)))
    def body(_: Any, sums: Fragment) -> tuple[Fragment, ...]:
        registers = sums.registers.reshape(-1, 2, 2)  # 16 rows, the upper or lower 8 of them, token
        return tuple(of_registers(registers[:, second], _SIZE) for second in range(2))

    return body(sums)


def load_rows(
    array: Ref, rows: Rows, expert: Int32[Array, ""], tile: Int32[Array, ""]
) -> tuple[Float32[Array, " m"], Float32[Array, " m"]]:
    """array[expert, row], of a reference (E, N), for the thread's rows of two tiles, in the order of `split_rows`."""

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=(row_array(_SIZE), row_array(_SIZE)))
    def body(_: Any, array: ir.Value, expert: Fragment, tile: Fragment) -> tuple[Fragment, ...]:
        found = [[], []]
        for sixteen in range(WIDTH // 16):
            at = arith.addi(tile.registers.item(), constant(sixteen // (TILE // 16)))
            of_columns = []
            for i in range(2):
                column = arith.addi(_column(), constant(i))
                both = rows.weight(rows.output_of(at, constant(sixteen % (TILE // 16)), column))
                of_columns.append([load_of_row(array, rows.num_rows, expert.registers.item(), row) for row in both])
            for mine, *values in zip(found, *of_columns, strict=True):
                mine += [pair(*values)] * 2  # of both tokens
        return tuple(of_registers(mine, _SIZE) for mine in found)

    return body(array, expert, tile)


def stage(ref: Ref, arrays: Sequence[Num[Array, " m"]], columns: int, tile: int) -> None:
    """Writes the outputs of one of the two tiles to shared memory without bank conflicts.

    Args:
        ref: (64, columns), with transforms `swizzled_rows`.
        arrays: per-thread elements of first rows, and without a gate of second ones; ref's dtype.
        columns: outputs of a tile.
    """
    dtype = arrays[0].dtype
    size, span = size_and_span(columns, dtype)
    layouts = [plgpu.Layout.WG_STRIDED(array.shape, vec_size=2) for array in arrays]
    piece_eights = span // (8 * size)
    alternate = 8 * size > 16  # eight outputs are two swizzled chunks, and odd tokens begin with the other one

    @operation(arg_types=(plgpu.RefType(swizzled_rows(columns, dtype)), *layouts))
    def body(_: Any, ref: ir.Value, *arrays: Fragment) -> None:
        registers = np.stack([array.registers.reshape(TILES, -1, 2) for array in arrays], axis=2)
        registers = registers.reshape(TILES, columns // 8, 2)[tile]  # eight outputs, token
        token = arith.divui(arith.remui(thread_index(), constant(32)), constant(4))  # of eight
        warp = arith.divui(thread_index(), constant(32))
        odd = arith.remui(token, constant(2))
        moved = arith.muli(arith.divui(token, constant(ROW_BYTES // span)), constant(16))
        if alternate:
            moved = arith.xori(moved, arith.muli(odd, constant(2 * 8 * size)))
        moved = arith.xori(moved, arith.muli(_column(), constant(size)))
        start = arith.addi(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), arith.muli(token, constant(span)))
        start = arith.addi(start, arith.muli(warp, constant(2 * 8 * columns * size)))
        for eight in range(piece_eights):
            at = arith.addi(start, arith.xori(moved, constant(eight * 8 * size)))
            for first in range(0, columns // 8, piece_eights):
                for second in range(2):
                    value = registers[first + eight, second]
                    if alternate:
                        other = registers[first + (eight ^ 2), second]
                        value = arith.select(arith.trunci(ir.IntegerType.get_signless(1), odd), other, value)
                    offset = 8 * second * columns * size + first // piece_eights * 8 * span
                    _store(at, offset, value, size)

    body(ref, *arrays)


def _store(address: ir.Value, offset: int, two: ir.Value, size: int) -> None:
    bits = utils.bitcast(two, ir.IntegerType.get_signless(16 * size))
    utils.inline_ptx(f"st.shared.b{16 * size} [$0 + {offset}], $1;", address, bits, has_side_effects=True)
