"""Tiles of a transposed weight for one thread: dequantized to bfloat16 in the registers that `wgmma` takes A from.

A product with the transposed weight, as gradients need it, sums over the weight's rows. Of operand A, 64 by 16, each
warp then has 16 columns of the weight, by 16 of its rows at a time. The bytes of a tile are in shared memory in the
order of the weight as it is (`layout`): each thread reads those of its warp's slice of 16 columns, from the places of
the threads of all four warps one after the other, and dequantizes them as they are. That gives blocks of 8 rows by 8
columns in the order of the tensor cores, which `movmatrix` transposes within the warp. No weight is written to memory.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90.dequantize import Decoder
from jmx.pallas.mosaic_sm90.elements import E2M1
from jmx.pallas.mosaic_sm90.tile_mma import half_of_tile, weight_types
from jmx.pallas.sm90.accumulator import load_words
from jmx.pallas.sm90.mlir import address_of, constant, i32, run, thread_index, utils
from jmx.pallas.sm90.operation import SCALAR, Fragment, operation, optional, result
from jmx.pallas.sm90.pipeline import Stage
from jmx.pallas.sm90.tiles import THREADS, TILE
from jmx.util.typing import Array, Int32, Shaped

_SLICES = 4  # of 16 rows, or of 16 columns, in a tile; and warps in a warpgroup
_TRANSPOSE = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"


def dequantize(
    decoder: Decoder, tile: Stage, exponent: Int32[Array, ""] | None
) -> tuple[Shaped[Array, "64 32"], Shaped[Array, "64 32"]]:
    """A tile's bytes in shared memory -> the two halves of its transpose: all columns by 32 of its rows.

    Args:
        tile: the arrays of one tile.
        exponent: from `tile_mma.block_scalars`, of formats with a shift (see `layout`); else None.
    """
    half = result((TILE, TILE // 2), jnp.bfloat16, plgpu.Layout.WGMMA)

    @operation(arg_types=(weight_types(tile), optional(exponent, SCALAR)), return_type=(half, half))
    def body(_: Any, tile: Stage, exponent: Fragment | None) -> tuple[Fragment, ...]:
        warp, lane = arith.divui(thread_index(), constant(32)), arith.remui(thread_index(), constant(32))
        factor = None if exponent is None else exponent.registers.item()
        slices = [_transposed_slice(decoder, tile, warp, lane, nth, factor) for nth in range(_SLICES)]
        return half_of_tile(slices[0] + slices[1]), half_of_tile(slices[2] + slices[3])

    return body(tile._replace(x=None), exponent)


def _transposed_slice(
    decoder: Decoder, tile: Stage, warp: ir.Value, lane: ir.Value, rows: int, exponent: ir.Value | None
) -> list[ir.Value]:
    """A thread's registers of A for the `rows`th 16 rows of the weight, and its warp's 16 columns."""
    elements, count = decoder.tile.elements, decoder.slice_words
    thread = arith.addi(lane, constant(32 * rows))  # the one that has these rows in the weight as it is
    group = arith.shrui(thread, constant(2))
    pair, odd = arith.shrui(warp, constant(1)), arith.andi(warp, constant(1))
    first = arith.muli(thread, constant(4))
    if elements.bits == 8:  # slices 2 and 3 are in the thread's second four words
        first = arith.addi(first, arith.muli(pair, constant(4 * THREADS)))
        first = arith.addi(first, arith.muli(odd, constant(2)))
    elif elements == E2M1:
        first = arith.addi(first, arith.muli(pair, constant(2)))
    else:
        first = arith.addi(first, warp)
    words = load_words(tile.values, first, count)

    def of_rows(ref: ir.Value, per_row: int) -> list[ir.Value]:
        """The value of the slice's block for the thread's first and second row, in the lowest bits of a word."""
        if not per_row:
            return []
        element = ir.IntegerType.get_signless(utils.bitwidth(ir.MemRefType(ref.type).element_type))
        block = {1: constant(0), 2: pair, 4: warp}[per_row]
        first, found = arith.addi(arith.muli(group, constant(2 * per_row)), block), []
        for row in range(2):
            at = address_of(ref, arith.addi(first, constant(row * per_row)), element)
            value = llvm.load(element, at)
            found.append(value if element == i32() else arith.extui(i32(), value))
        return found

    scales, zero_points = of_rows(tile.scales, decoder.tile.scales), of_rows(tile.zero_points, decoder.tile.zero_points)
    pairs = decoder.slice_pairs(words, odd, scales, zero_points, exponent, run)
    # Of the transpose, rows are columns of the weight: first the 8 rows' groups, then those of columns in each.
    return [
        utils.inline_ptx(_TRANSPOSE, pairs[eight, row], result_types=i32(), has_side_effects=True)
        for row in range(2)
        for eight in range(2)
    ]
