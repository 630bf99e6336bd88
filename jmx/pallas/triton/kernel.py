"""The kernel of `grouped_gemm`: one CTA computes one tile, in three stages: prologue, main loop, epilogue.

A tile is some rows of an expert's weight by a block of rows of x, computed transposed: the weight is the left operand,
so that few rows of x are on the axis where tensor cores have the finest granularity. Weights are read as 16-bit words
of four elements each. The kernel never interleaves the four: columns of x, and those of the first product's result, are
in the permuted order of `decode`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jmx.pallas.activation.functions import in_kernel
from jmx.pallas.triton.mainloop import Mainloop
from jmx.pallas.triton.product import Operands, Product
from jmx.pallas.triton.tile import HALF_ROWS, TileRows, WorkItem, result_column
from jmx.util.typing import Array, Float, Float32


def kernel(
    operands: Operands,
    before: Float[Any, "P R columns"] | None,
    out: Float[Any, "P R columns"],
    *,
    product: Product,
    more_than: int,
    after_whole: bool,
) -> None:
    """Computes one tile of one block; `operands` and `out` are references.

    Args:
        before: `out` with what is there of other blocks; None: nothing is.
        more_than: blocks of so many rows, and fewer, are left to another launch, and so are those of more than a tile.
        after_whole: as for `WorkItem.of_program`.
    """
    del before
    item = WorkItem.of_program(operands, after_whole)

    @pl.when((item.num_rows > more_than) & (item.num_rows <= product.config.block_m))
    def _() -> None:
        with jax.named_scope("prologue"):
            rows = TileRows.of(operands, product, item)
            mainloop = Mainloop(operands, product, item)
        with jax.named_scope("mainloop"):
            sums = mainloop.run(rows)
        with jax.named_scope("epilogue"):
            epilogue(operands, out, product, item, rows, sums)


def epilogue(
    operands: Operands,
    out: Float[Any, "P R columns"],
    product: Product,
    item: WorkItem,
    rows: TileRows,
    sums: Float32[Array, "block_n block_m"],
) -> None:
    """Applies row scales, bias and activation to the sums of a tile, and stores the result."""
    num_columns = operands.values.shape[1] // product.halves

    def load_rows(array: Float[Any, "E N"]) -> Float32[Array, " block_n"]:
        return plgpu.load(array.at[item.expert, rows.weight], mask=rows.weight_mask, other=0).astype(jnp.float32)

    if operands.row_scales is not None:
        sums *= load_rows(operands.row_scales)[:, None]
    if operands.bias is not None:
        sums += jnp.where(item.part == 0, load_rows(operands.bias), 0)[:, None]
    y = activated(sums, product)
    tile_columns = product.config.block_n // product.halves
    nth = jnp.arange(tile_columns)
    y = jnp.where(result_column(product, item.tile, nth)[:, None] < num_columns, y, 0)
    index = item.tile * tile_columns + nth
    target = out.at[item.part, operands.blocks.out_rows[item.block] + rows.row[:, None], index[None, :]]
    y = y.T.astype(out.dtype)
    plgpu.store(target, y, mask=rows.x_mask[:, None] & (index < out.shape[2])[None, :])


def activated(sums: Float32[Array, "block_n block_m"], product: Product) -> Float32[Array, "n block_m"]:
    """The product's activation of sums, of which gates and ups alternate every HALF_ROWS rows."""
    if product.activation is None:
        return sums
    terms = [sums]
    if product.halves == 2:
        pairs = sums.reshape(-1, 2, HALF_ROWS, sums.shape[1]).transpose(0, 2, 3, 1)
        terms = [half.reshape(-1, sums.shape[1]) for half in lax.split(pairs, (1, 1), 3)]
    y = in_kernel(product.activation)(*terms)
    for term in terms:  # Triton's minimum and maximum of a NaN and a number are the number
        y = jnp.where(term == term, y, jnp.nan)
    return y
