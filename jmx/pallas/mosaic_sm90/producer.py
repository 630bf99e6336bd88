"""Producer warps: TMA copies of weights and of rows into pipeline stages, for one work item after the other.

Each `fill` acquires a stage, which waits until consumers have released it, and starts the copies into it.
"""

from collections.abc import Callable

import jax
from jax.experimental import pallas as pl

from jmx.pallas.mosaic_sm90.grouped_gemm import Gemm
from jmx.pallas.sm90 import counters
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.tiles import TILE, aligned_row
from jmx.util.typing import Array, Int32

Scalar = Int32[Array, ""]


def copy_weights(gemm: Gemm) -> None:
    """Copies the weights of all of the CTA's work items. Past the weight's end TMA writes zeros."""
    pipeline, schedule, share, config = gemm.pipeline, gemm.schedule, gemm.share, gemm.config
    operands, stages = gemm.operands, gemm.shared.stages
    copies = [  # arrays, their buffers, and rows of a tile
        (operands.values, stages.values, gemm.value_rows),
        (operands.scales, stages.scales, 1),
        (operands.zero_points, stages.zero_points, 1),
    ]

    @jax.named_scope("weights_prologue")
    def prologue(turn: Scalar) -> Callable[[Scalar, Scalar], None]:
        item = gemm.work_item(turn)
        expert = gemm.blocks.experts[item.block]
        before = share.stages_before + turn * share.item_stages

        @jax.named_scope("copy_weights")
        def fill(step: Scalar, slot: Scalar) -> None:
            pipeline.acquire(slot, before + step)
            k = schedule.first_tile(item.part, step)
            for array, buffers, rows in copies:
                if array is not None:
                    m_tiles, k_tiles = (item.tile, config.warpgroups_m), (k, config.stage_tiles)
                    along_rows, along_columns = (k_tiles, m_tiles) if gemm.product.transposed else (m_tiles, k_tiles)
                    (column, number), m = along_columns, pl.ds(*along_rows)
                    tiles = array.at[expert, m, pl.ds(column * rows, number * rows)]
                    pipeline.copy(tiles, buffers.at[slot], slot)

        return fill

    pipeline.produce(share, prologue)


def copy_rows(gemm: Gemm) -> None:
    """Copies the rows of all of the CTA's work items. Before each it waits until the GEMM before has written them, or
    before the first one until all of them are rounded."""
    pipeline, schedule, share, config = gemm.pipeline, gemm.schedule, gemm.share, gemm.config
    blocks, buffers = gemm.blocks, gemm.shared.stages.x
    if gemm.before is not None and gemm.row_rounder is not None:
        gemm.row_rounder.wait(config.num_warpgroups, share.num_ctas)

    @jax.named_scope("rows_prologue")
    def prologue(turn: Scalar) -> Callable[[Scalar, Scalar], None]:
        item = gemm.work_item(turn)
        first, count = blocks.first_row(gemm.x_rows, item.block), blocks.count_of(item.block)
        if gemm.before is not None and gemm.row_rounder is None:
            counters.wait(gemm.written, *gemm.before.needed(item, gemm.num_blocks))
        before = share.stages_before + turn * share.item_stages

        @jax.named_scope("copy_rows")
        def fill(step: Scalar, slot: Scalar) -> None:
            pipeline.acquire(slot, before + step)
            columns = pl.ds(schedule.first_tile(item.part, step) * TILE, config.stage_tiles * TILE)

            def copy(width: int) -> None:
                rows = gemm.x.at[pl.ds(aligned_row(first), width), columns]
                pipeline.copy(rows, buffers.at[slot, pl.ds(0, width)], slot)

            for_width(config.widths, count, copy)

        return fill

    pipeline.produce(share, prologue)
