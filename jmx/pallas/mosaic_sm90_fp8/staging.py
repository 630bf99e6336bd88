"""Writes a tile's results to shared memory without bank conflicts, from where TMA copies them to global memory."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8.config import ROW_BYTES
from jmx.pallas.sm90.mlir import constant, i32, thread_index, utils
from jmx.pallas.sm90.operation import Fragment, Ref, operation
from jmx.util.typing import Array, Num


def swizzled_rows(columns: int, dtype: Any) -> Any:
    """The transforms of a reference (rows, columns) to shared memory that `stage` writes and TMA reads."""
    size, span = size_and_span(columns, dtype)
    return (plgpu.TilingTransform((8, span // size)), plgpu.SwizzleTransform(span))  # pyright: ignore[reportAbstractUsage]


def size_and_span(columns: int, dtype: Any) -> tuple[int, int]:
    """Bytes of an element, and of the part of a row that is swizzled together."""
    size = jnp.dtype(dtype).itemsize
    return size, min(ROW_BYTES, columns * size)


def stage(ref: Ref, arrays: Sequence[Num[Array, " m"]], columns: int, first: int, count: int) -> None:
    """Writes a tile's outputs, transposed, to shared memory.

    Args:
        ref: (count, columns), with transforms `swizzled_rows`.
        arrays: per-thread elements of the first row, and without a gate of the second one; ref's dtype.
        columns: outputs of the tile.
        first, count: which columns of the accumulator.
    """
    dtype = arrays[0].dtype
    size, span = size_and_span(columns, dtype)
    layouts = [plgpu.Layout.WG_STRIDED(array.shape, vec_size=2) for array in arrays]

    @operation(arg_types=(plgpu.RefType(swizzled_rows(columns, dtype)), *layouts))
    def body(_: Any, ref: ir.Value, *arrays: Fragment) -> None:
        base = llvm.ptrtoint(i32(), utils.memref_ptr(ref))
        warp, lane = arith.divui(thread_index(), constant(32)), arith.remui(thread_index(), constant(32))
        output = arith.addi(arith.muli(warp, constant(columns // 4)), arith.divui(lane, constant(4)))
        for second, array in enumerate(arrays):
            byte = arith.muli(arith.addi(output, constant(8 * second)), constant(size))
            start = arith.addi(base, arith.muli(arith.divui(byte, constant(span)), constant(8 * span)))
            byte = arith.remui(byte, constant(span))
            for i in range(2):
                row = arith.addi(arith.muli(arith.remui(lane, constant(4)), constant(2)), constant(i))
                turn = arith.muli(arith.divui(row, constant(ROW_BYTES // span)), constant(16))
                at = arith.addi(arith.muli(row, constant(span)), arith.xori(byte, turn))
                at = arith.addi(start, at)
                for eight in range(count // 8):
                    value = llvm.extractelement(array.registers.flat[first // 8 + eight], constant(i))
                    value = utils.bitcast(value, ir.IntegerType.get_signless(8 * size))
                    text = f"st.shared.b{8 * size} [$0 + {8 * eight * columns * size}], $1;"
                    utils.inline_ptx(text, at, value, has_side_effects=True)

    body(ref, *arrays)
