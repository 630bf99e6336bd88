"""h rounded to an input format in the epilogue that computes it, where the blocks of the format are parts of a tile.

MXFP8, MXFP4 and NVFP4 have a scale for 32 or 16 columns of a row. A tile of the weight has all of these among its
outputs, so a warpgroup has them in registers. The second GEMM then reads rows that are signaled block by block, as h in
16 bits: no SM waits for all others, as it does where the scale of a row depends on all its columns (`fused_rounding`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.numerics.input_formats import InputFormat
from jmx.pallas.mosaic_sm90.round_rows import elements_of_block, scale_of_block
from jmx.pallas.sm90 import row
from jmx.pallas.sm90.accumulator import load_words, of_registers, own_layout, row_array
from jmx.pallas.sm90.mlir import address_of, constant, f32, i32, pair, run, thread_index, utils
from jmx.pallas.sm90.operation import Fragment, Ref, operation, optional
from jmx.pallas.sm90.tiles import GATED_ROWS
from jmx.util.typing import Array, Num

_WARPS = 4
_SINGLE = np.dtype(np.float32)


def has_blocks_of_tiles(format: InputFormat, columns: int) -> bool:
    """Whether every tile of outputs, of `columns` in all, has whole blocks of the format."""
    size = format.block_size
    return isinstance(size, int) and size <= GATED_ROWS and columns % size == 0


def words(block_n: int) -> int:
    """Words of 32 bits of shared memory that a warpgroup needs for blocks of up to `block_n` rows."""
    return _WARPS * block_n


@dataclass(frozen=True, kw_only=True)
class TileRounder:
    """How a thread of the kernel rounds its outputs, before it stores them.

    Args:
        format: one with `has_blocks_of_tiles`.
        static: a reference to the static scale (1,), or None.
        maxima: int32 (`words`,) of shared memory, which other warpgroups do not use.
    """

    format: InputFormat
    static: Ref
    maxima: Ref

    @jax.named_scope("round")
    def round(self, arrays: Sequence[Num[Array, " m"]]) -> list[Num[Array, " m"]]:
        """Per-thread elements of h, of the thread's first row of a tile, and without a gate of its second one, too:
        what they are rounded to, in bfloat16."""
        format, size = self.format, arrays[0].shape[0]
        assert isinstance(format.block_size, int)
        warps = format.block_size // (8 * len(arrays))  # whose outputs are one block
        types = ([own_layout(size)] * len(arrays), optional(self.static, plgpu.RefType()), plgpu.RefType())

        @operation(arg_types=types, return_type=(row_array(size),) * len(arrays))
        def body(_: Any, arrays: list[Fragment], static: ir.Value | None, maxima: ir.Value) -> tuple[Fragment, ...]:
            given = None if static is None else row.in_range(static, format)
            columns = [_columns_of(array) for array in arrays]
            largest = [row.largest_of([*of], _SINGLE) for of in zip(*columns, strict=True)]
            largest = [row.across_lanes(one, row.LANES, _SINGLE, least=4) for one in largest]
            if warps > 1:
                largest = _across_warps(largest, warps, maxima)
            results: list[list[ir.Value]] = [[] for _ in arrays]
            for nth, most in enumerate(largest):
                divisor, factor = scale_of_block(most, format, given, _SINGLE)
                elements = elements_of_block([of[nth] for of in columns], divisor, format)
                for its, element in zip(results, elements, strict=True):
                    its.append(utils.bitcast(run(row.PRODUCT, element, factor), f32()))
            return tuple(of_registers([pair(*its[i : i + 2]) for i in range(0, len(its), 2)], size) for its in results)

        singles = [array.astype(jnp.float32) for array in arrays]
        return [found.astype(jnp.bfloat16) for found in body(singles, self.static, self.maxima)]


def _columns_of(array: Fragment) -> list[ir.Value]:
    """Bits of the thread's elements, by column."""
    return [
        utils.bitcast(llvm.extractelement(two, constant(i)), i32()) for two in array.registers.flat for i in range(2)
    ]


def _across_warps(largest: list[ir.Value], warps: int, maxima: ir.Value) -> list[ir.Value]:
    """The largest of each column over so many neighboring warps. All lanes with the same columns have the same."""
    thread, count = thread_index(), 4 * len(largest)  # columns: a thread has two of eight
    lane, warp = arith.remui(thread, constant(row.LANES)), arith.divui(thread, constant(row.LANES))
    first = arith.muli(arith.divui(warp, constant(warps)), constant(warps))
    column = arith.muli(arith.remui(lane, constant(4)), constant(2))

    def place(warp: ir.Value, nth: int) -> ir.Value:
        return arith.addi(arith.muli(warp, constant(count)), arith.addi(column, constant(4 * nth)))

    utils.warpgroup_barrier()  # all have read the words of the tile before
    for nth in range(0, len(largest), 2):
        two = llvm.mlir_undef(ir.VectorType.get((2,), i32()))
        for i in range(2):
            two = llvm.insertelement(two, largest[nth + i], constant(i))
        llvm.store(two, address_of(maxima, place(warp, nth), i32()), alignment=8)
    utils.warpgroup_barrier()
    found = []
    for nth in range(0, len(largest), 2):
        of_warps = [load_words(maxima, place(arith.addi(first, constant(other)), nth), 2) for other in range(warps)]
        found += [row.largest_of([*of], _SINGLE) for of in zip(*of_warps, strict=True)]
    return found
