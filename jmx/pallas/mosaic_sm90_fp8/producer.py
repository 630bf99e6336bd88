"""Producer warps: TMA copies of weights and of rows into pipeline stages, for one work item after the other.

Each `fill` acquires a stage, which waits until consumers have released it, and starts the copies into it.
"""

from collections.abc import Callable

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8 import fused_quantize
from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS, unit_bytes, value_rows
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.tiles import aligned_row
from jmx.util.typing import Array, Int32

Scalar = Int32[Array, ""]
_AHEAD_BYTES = 96 * 1024  # of weights that an SM may load before the first rows are quantized


def copy_weights(gemm: Gemm) -> None:
    """Copies the weights of all of the CTA's work items. Past the weight's end TMA writes zeros.

    Only few are copied before the first rows are quantized: the loads and signals of that would take 6 us, not 2, if
    they were queued behind all that the pipeline holds.
    """
    format, config, pipeline, buffers = gemm.product.format, gemm.config, gemm.pipeline, gemm.shared.stages
    units = config.warpgroups_k
    size = units * value_rows(format)
    ahead = None  # stages, if there is a limit
    if gemm.unquantized is not None and gemm.index == 0:
        ahead = max(1, _AHEAD_BYTES // (config.num_warpgroups * unit_bytes(format)))

    @jax.named_scope("weights_prologue")
    def prologue(turn: Scalar) -> Callable[[Scalar, Scalar], None]:
        block, tile, part = gemm.item(turn)
        expert, m = gemm.blocks.experts[block], pl.ds(tile, config.warpgroups_m)
        first = part * gemm.share.item_stages

        @jax.named_scope("copy_weights")
        def fill(step: Scalar, slot: Scalar) -> None:
            nth = gemm.share.stage(turn, step)
            pipeline.acquire(slot, nth)
            if ahead is not None:
                pl.when(nth == ahead)(lambda: plgpu.barrier_wait(gemm.shared.quantized_barrier))
            stage = first + step
            values = gemm.operands.values.at[expert, m, pl.ds(stage * size, size)]
            pipeline.copy(values, buffers.values.at[slot], slot)
            if buffers.scales is not None:
                scales = gemm.operands.scales.at[expert, m, pl.ds(stage * units, units)]
                pipeline.copy(scales, buffers.scales.at[slot], slot)

        return fill

    pipeline.produce(gemm.share, prologue)


def copy_rows(gemm: Gemm) -> None:
    """Copies the rows of all of the CTA's work items, once they are quantized; resident rows are not copied."""
    blocks, pipeline, buffers = gemm.blocks, gemm.pipeline, gemm.shared.stages
    units = gemm.config.warpgroups_k
    if gemm.config.resident_rows:
        return

    @jax.named_scope("rows_prologue")
    def prologue(turn: Scalar) -> Callable[[Scalar, Scalar], None]:
        block, _, part = gemm.item(turn)
        first_row = aligned_row(blocks.first_row(blocks.x_rows, block))
        count = blocks.count_of(block)
        first = part * gemm.share.item_stages
        fused_quantize.wait_if_late(gemm, turn)

        @jax.named_scope("copy_rows")
        def fill(step: Scalar, slot: Scalar) -> None:
            pipeline.acquire(slot, gemm.share.stage(turn, step))
            stage = first + step

            def copy(width: int) -> None:
                for nth in range(units):
                    unit, at = stage * units + nth, slot * units + nth
                    rows = gemm.x.values.at[pl.ds(first_row, width), pl.ds(unit * UNIT_COLUMNS, UNIT_COLUMNS)]
                    pipeline.copy(rows, buffers.x.at[at, pl.ds(0, width)], slot)
                    if buffers.x_scales is not None:
                        scales = gemm.x.scales.at[pl.ds(unit, 1), pl.ds(first_row, width)]
                        pipeline.copy(scales, buffers.x_scales.at[at, :, pl.ds(0, width)], slot)

            for_width(gemm.widths, count, copy)

        return fill

    if gemm.unquantized is not None:
        fused_quantize.wait_for_first_rows(gemm)
    pipeline.produce(gemm.share, prologue)
