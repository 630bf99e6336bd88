"""Producer warps: TMA copies of weights and of rows into pipeline stages, one work item after the other."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl

from jmx.pallas.mosaic_sm90.grouped_gemm import Gemm
from jmx.pallas.sm90 import counters
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.tiles import TILE

Array = Any


def copy_weights(gemm: Gemm) -> None:
    """Weights of all of the CTA's work items. Past the weight's end TMA writes zeros."""
    cta, pipeline, schedule, share = gemm.cta, gemm.cta.pipeline, gemm.schedule, gemm.share
    config, stages = cta.config, cta.shared.stages
    arrays = zip(gemm.operands[:3], (stages.values, stages.scales, stages.zero_points), strict=True)
    copied = [
        (array, buffers, rows)
        for (array, buffers), rows in zip(arrays, (cta.value_rows, 1, 1), strict=True)
        if array is not None
    ]

    @jax.named_scope("weights_prologue")
    def prologue(turn: Array) -> Callable[[Array, Array], None]:
        item = gemm.work_item(turn)
        expert, m = cta.blocks.experts[item.block], pl.ds(item.tile, config.warpgroups_m)
        before = share.stages_before + turn * share.item_stages

        @jax.named_scope("copy_weights")
        def fill(step: Array, slot: Array) -> None:
            pipeline.acquire(slot, before + step)
            k = schedule.first_tile(item.part, step)
            for array, buffers, rows in copied:
                tiles = array.at[expert, m, pl.ds(k * rows, config.stage_tiles * rows)]
                pipeline.copy(tiles, buffers.at[slot], slot)

        return fill

    pipeline.produce(share, prologue)


def copy_rows(gemm: Gemm) -> None:
    """Rows of all of the CTA's work items, each once the GEMM before has written what it needs."""
    cta, pipeline, schedule, share = gemm.cta, gemm.cta.pipeline, gemm.schedule, gemm.share
    config, blocks, buffers = cta.config, cta.blocks, cta.shared.stages.x

    @jax.named_scope("rows_prologue")
    def prologue(turn: Array) -> Callable[[Array, Array], None]:
        item = gemm.work_item(turn)
        first, count = blocks.first_row(gemm.x_rows, item.block), blocks.count_of(item.block)
        if gemm.before is not None:
            counters.wait(cta.written, *gemm.before.needed(item, cta.num_blocks))
        before = share.stages_before + turn * share.item_stages

        @jax.named_scope("copy_rows")
        def fill(step: Array, slot: Array) -> None:
            pipeline.acquire(slot, before + step)
            columns = pl.ds(schedule.first_tile(item.part, step) * TILE, config.stage_tiles * TILE)

            def copy(width: int) -> None:
                rows = gemm.x.at[pl.ds(lax.div(first, 8) * 8, width), columns]  # rows by 8, for TMA to see
                pipeline.copy(rows, buffers.at[slot, pl.ds(0, width)], slot)

            for_width(config.widths, count, copy)

        return fill

    pipeline.produce(share, prologue)
