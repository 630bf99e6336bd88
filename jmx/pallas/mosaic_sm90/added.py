"""A product with few columns that an epilogue adds to its tile's sums, as adapters do, by `mma.sync`.

Its operands come from global memory, a few bytes a thread: the sums are those of the main product, so what is added is
never written. In a sum over 16 columns, a thread has four that are next to each other, in both operands alike, so that
one load of eight bytes brings them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90.tile_mma import MULTIPLY
from jmx.pallas.sm90.accumulator import of_registers, own_layout, row_array, row_size
from jmx.pallas.sm90.epilogue import index_of_row
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.mlir import address_of, constant, f32, i32, i64, pair, thread_index, utils, wide
from jmx.pallas.sm90.operation import SCALAR, Fragment, operation
from jmx.util.typing import Array, Float, Float32, Int32

COLUMNS = 16  # of one mma.sync


class Added(NamedTuple):
    """What is added to the outputs of each row of a product, matrices[group] @ inner; or references to it.

    Args:
        inner: bfloat16, of each row of the result.
        matrices: bfloat16, with the rows of the product's weight, without padding. r is a multiple of `COLUMNS`.
        groups: of each block of rows.
    """

    inner: Float[Array, "R r"]
    matrices: Float[Array, "G N r"]
    groups: Int32[Array, " B"]

    @classmethod
    def of(cls, inner: Float[Array, "R r"], matrices: Float[Array, "G N r"], groups: Int32[Array, " B"]) -> "Added":
        """With columns of zeros, so that there are whole `COLUMNS`."""
        more = (0, -inner.shape[1] % COLUMNS)
        return cls(jnp.pad(inner, ((0, 0), more)), jnp.pad(matrices, ((0, 0), (0, 0), more)), groups)


def add(
    sums: Sequence[Float32[Array, " m"]],
    added: Any,
    rows: Rows,
    group: Int32[Array, ""],
    tile: Int32[Array, ""],
    first: Int32[Array, ""],
    count: Int32[Array, ""],
) -> list[Float32[Array, " m"]]:
    """The per-thread elements of both rows of a tile, with what is added to them; 0 is added to padding.

    Args:
        added: references to an `Added`.
        group: of the block.
        first, count: the block's first row in `added.inner`, and the number of its rows; others get anything.
    """
    size, rank = sums[0].shape[0], added.inner.shape[1]
    types = (plgpu.RefType(), plgpu.RefType(), *(SCALAR,) * 4, [own_layout(size)] * 2)

    @operation(arg_types=types, return_type=(row_array(size),) * 2)
    def body(_: Any, inner: ir.Value, matrices: ir.Value, *rest: Any) -> tuple[Fragment, ...]:
        *scalars, arrays = rest
        group, tile, first, count = (scalar.registers.item() for scalar in scalars)
        lane = arith.remui(thread_index(), constant(32))
        nth, mine = arith.divui(lane, constant(4)), arith.muli(arith.remui(lane, constant(4)), constant(4))
        pieces = [constant(piece) for piece in range(0, rank, COLUMNS)]
        matrix = [  # of each piece, two words of both rows
            [_loaded(matrices, *place, arith.addi(mine, piece), rank) for piece in pieces]
            for place in (index_of_row(rows.num_rows, group, row) for row in rows.weight(rows.output(tile)))
        ]
        last, always = arith.subi(count, constant(1)), constant(1, ir.IntegerType.get_signless(1))
        found: list[list[ir.Value]] = [[], []]
        for eight in range(size // row_size(8)):
            row = wide(arith.addi(first, arith.minsi(arith.addi(nth, constant(8 * eight)), last)))
            held = [array.registers.flat[eight] for array in arrays]
            c = [llvm.extractelement(two, constant(i)) for two in held for i in range(2)]
            for piece, *both in zip(pieces, *matrix, strict=True):
                a = [words[half] for half in range(2) for words in both]
                b = _loaded(inner, row, always, arith.addi(mine, piece), rank)
                c = utils.inline_ptx(MULTIPLY, *a, *b, *c, result_types=[f32()] * 4)
            for its, two in zip(found, (c[:2], c[2:]), strict=True):
                its.append(pair(*two))
        return tuple(of_registers(its, size) for its in found)

    return [*body(added.inner, added.matrices, group, tile, first, count, [*sums])]


def _loaded(array: ir.Value, row: ir.Value, inside: ir.Value, column: ir.Value, rank: int) -> list[ir.Value]:
    """The two words of four columns, from `column` on, of a row of bfloat16 (..., rank); 0 unless `inside`."""
    at = address_of(array, arith.addi(arith.muli(row, constant(rank, i64())), wide(column)), ir.BF16Type.get())
    loaded = llvm.load(ir.VectorType.get((2,), i32()), at, alignment=8)
    return [arith.select(inside, llvm.extractelement(loaded, constant(i)), constant(0)) for i in range(2)]
