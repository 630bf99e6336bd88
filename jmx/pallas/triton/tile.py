"""The prologue of the kernel: which tile a CTA computes, and which rows of the weight and of x it has."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jmx.numerics.gate_up import is_interleaved, is_up_first
from jmx.pallas.triton.decode import column_at
from jmx.pallas.triton.product import Operands, Product
from jmx.util.typing import Array, Bool, Int32

HALF_ROWS = 8  # gates, then ups, in a tile: tensor cores leave the sums of two rows this far apart in one thread


class WorkItem(NamedTuple):
    """What one CTA computes: a tile of the weight's rows by a block of rows of x, over one part of K.

    `params_index`: the expert's index in scales and zero points. `num_rows`: rows of the block.
    """

    tile: Int32[Array, ""]
    block: Int32[Array, ""]
    part: Int32[Array, ""]
    expert: Int32[Array, ""]
    params_index: Int32[Array, ""]
    num_rows: Int32[Array, ""]

    @classmethod
    def of_program(cls, operands: Operands, after_whole: bool) -> "WorkItem":
        """That of the running program of the grid (tiles, blocks, parts).

        `after_whole`: whether its blocks are those after `operands.num_whole`; there may be fewer than the grid has.
        """
        tile, block, part = (pl.program_id(axis) for axis in range(3))
        number, there = operands.blocks.experts.shape[0], True
        if after_whole:
            assert operands.num_whole is not None
            block += operands.num_whole[0]
            block, there = jnp.minimum(block, number - 1), block < number
        expert, num_rows = operands.blocks.experts[block], jnp.where(there, operands.blocks.counts[block], 0)
        params_index = expert if operands.params_of is None else operands.params_of[block]
        return cls(tile, block, part, expert, params_index, num_rows)


class TileRows(NamedTuple):
    """The rows of a tile.

    `weight`, `weight_mask` (block_n,): rows of the weight, and which of them exist.
    `column` (block_n,): the column of the result that each of these belongs to.
    `row` (block_m,): rows of the block, from 0 on.
    `x`, `x_mask` (block_m,): rows of x, and which of them are computed; the others are these again.
    `part`: the part of K.
    """

    weight: Int32[Array, " block_n"]
    weight_mask: Bool[Array, " block_n"]
    column: Int32[Array, " block_n"]
    row: Int32[Array, " block_m"]
    x: Int32[Array, " block_m"]
    x_mask: Bool[Array, " block_m"]
    part: Int32[Array, ""]

    @classmethod
    def of(cls, operands: Operands, product: Product, item: WorkItem) -> "TileRows":
        """Those of a work item."""
        num_weight_rows = operands.values.shape[1]
        num_columns = num_weight_rows // product.halves
        half_step, row_step = (1, 2) if is_interleaved(product.gate_up_order) else (num_columns, 1)
        row, nth = jnp.arange(product.config.block_m), jnp.arange(product.config.block_n)
        half = 0
        if product.halves == 2:
            half, nth = nth // HALF_ROWS % 2, nth // (2 * HALF_ROWS) * HALF_ROWS + nth % HALF_ROWS
        column = result_column(product, item.tile, nth)
        x_mask, weight_mask = row < item.num_rows, column < num_columns
        if is_up_first(product.gate_up_order):  # tiles have gate first
            half = 1 - half
        weight = half * half_step + row_step * column
        if operands.ids is not None:
            assert operands.block_ids is not None
            x_mask &= _tokens_with(operands.ids, row, operands.block_ids[item.block])
        x = operands.blocks.x_rows[item.block] + jnp.fmod(row, item.num_rows)
        if operands.row_of is not None:
            x = plgpu.load(operands.row_of.at[x])
        return cls(weight, weight_mask, column, row, x, x_mask, item.part)


def result_column(product: Product, tile: Int32[Array, ""], nth: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """The columns of the result, in the order of the weight's rows, of columns `nth` of a tile; may be past the end."""
    index = tile * (product.config.block_n // product.halves) + nth
    return column_at(index) if product.permutes_columns else index


def _tokens_with(ids: Int32[Any, "T k"], token: Int32[Array, " n"], id: Int32[Array, ""]) -> Bool[Array, " n"]:
    """Which tokens (n,) have `id` among their `ids` (T, k), a reference."""
    num_tokens, top_k = ids.shape
    found = jnp.zeros(token.shape, jnp.bool_)
    for slot in range(top_k):
        found |= plgpu.load(ids.at[token, slot], mask=token < num_tokens, other=-1) == id
    return found
