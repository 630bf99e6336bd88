"""Producer warps: TMA copies of weights and of rows into pipeline stages, one work item after the other."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8 import fused_quantize
from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS, unit_bytes, value_rows
from jmx.pallas.sm90.launch import for_width

Array = Any
_AHEAD_BYTES = 96 * 1024  # of weights, of an SM, that may come before rows are quantized


def copy_weights(gemm: Gemm) -> None:
    """Weights of all of the CTA's work items; past the weight's end TMA writes zeros.

    Few before the first rows are quantized: what that loads, and signals, would take 6 us behind many, not 2.
    """
    format, config, pipeline, buffers = gemm.product.format, gemm.config, gemm.pipeline, gemm.shared.stages
    units = config.warpgroups_k
    size = units * value_rows(format)
    ahead = None  # stages, where there is a limit
    if gemm.unquantized is not None and gemm.index == 0:
        ahead = max(1, _AHEAD_BYTES // (config.num_warpgroups * unit_bytes(format)))

    @jax.named_scope("weights_prologue")
    def prologue(turn: Array) -> Callable[[Array, Array], None]:
        block, tile, part = gemm.item(turn)
        expert, m = gemm.blocks.experts[block], pl.ds(tile, config.warpgroups_m)
        first = part * gemm.share.item_stages

        @jax.named_scope("copy_weights")
        def fill(step: Array, slot: Array) -> None:
            nth = gemm.share.stage(turn, step)
            pipeline.acquire(slot, nth)
            if ahead is not None:
                pl.when(nth == ahead)(lambda: plgpu.barrier_wait(gemm.shared.quantized))
            stage = first + step
            values = gemm.operands.values.at[expert, m, pl.ds(stage * size, size)]
            pipeline.copy(values, buffers.values.at[slot], slot)
            if buffers.scales is not None:
                scales = gemm.operands.scales.at[expert, m, pl.ds(stage * units, units)]
                pipeline.copy(scales, buffers.scales.at[slot], slot)

        return fill

    pipeline.produce(gemm.share, prologue)


def copy_rows(gemm: Gemm) -> None:
    """Rows of all of the CTA's work items, once they are there; none of those that are kept."""
    blocks, operands, pipeline, buffers = gemm.blocks, gemm.operands, gemm.pipeline, gemm.shared.stages
    units = gemm.config.warpgroups_k
    if gemm.config.keeps_rows:
        return

    @jax.named_scope("rows_prologue")
    def prologue(turn: Array) -> Callable[[Array, Array], None]:
        block, _, part = gemm.item(turn)
        first_row = lax.div(blocks.first_row(blocks.x_rows, block), 8) * 8  # by 8, for TMA to see
        count = blocks.count_of(block)
        first = part * gemm.share.item_stages

        @jax.named_scope("copy_rows")
        def fill(step: Array, slot: Array) -> None:
            pipeline.acquire(slot, gemm.share.stage(turn, step))
            stage = first + step

            def copy(width: int) -> None:
                for nth in range(units):
                    unit, at = stage * units + nth, slot * units + nth
                    rows = operands.x.at[pl.ds(first_row, width), pl.ds(unit * UNIT_COLUMNS, UNIT_COLUMNS)]
                    pipeline.copy(rows, buffers.x.at[at, pl.ds(0, width)], slot)
                    if buffers.x_scales is not None:
                        scales = operands.x_block_scales.at[pl.ds(unit, 1), pl.ds(first_row, width)]
                        pipeline.copy(scales, buffers.x_scales.at[at, :, pl.ds(0, width)], slot)

            for_width(gemm.config.widths, count, copy)

        return fill

    if gemm.unquantized is not None:
        fused_quantize.wait_for_rows(gemm)
    pipeline.produce(gemm.share, prologue)
