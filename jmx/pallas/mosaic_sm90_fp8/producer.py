"""What the warps do that fetch: weights and rows of one item after the other into the ring, stage by stage."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS, unit_bytes, value_rows
from jmx.pallas.mosaic_sm90_fp8.task import Task
from jmx.pallas.sm90.launch import for_width

Array = Any
_AHEAD_BYTES = 96 * 1024  # of weights, of a multiprocessor, that may come before rows are rounded


def fetch_weights(task: Task) -> None:
    """All of them; past the weight's end TMA writes zeros.

    Few before the first rows are rounded: what that loads, and tells, would take 6 us behind many, not 2.
    """
    format, rounding, shared = task.job.product.format, task.rounding, task.shared
    units = task.config.warpgroups_k
    size = units * value_rows(format)

    def item(block: Array, tile: Array) -> Callable[[Array, Array], None]:
        expert, m = task.work.experts[block], pl.ds(tile, task.config.warpgroups_m)

        def fill(stage: Array, slot: Array) -> None:
            values = task.g.values.at[expert, m, pl.ds(stage * size, size)]
            plgpu.copy_gmem_to_smem(values, shared.values.at[slot], shared.full.at[slot])
            if shared.scales is not None:
                scales = task.g.scales.at[expert, m, pl.ds(stage * units, units)]
                plgpu.copy_gmem_to_smem(scales, shared.scales.at[slot], shared.full.at[slot])

        return fill

    if rounding is None or rounding.job:
        _each_stage(task, item)
    else:
        ahead = max(1, _AHEAD_BYTES // (task.config.num_warpgroups * unit_bytes(format)))
        _each_stage(task, item, lambda nth: pl.when(nth == ahead)(lambda: plgpu.barrier_wait(shared.rounded)))


def fetch_rows(task: Task) -> None:
    """All of them, once they are there; none of those that are kept."""
    work, g, shared, units = task.work, task.g, task.shared, task.config.warpgroups_k
    if task.config.keeps_rows:
        return

    def item(block: Array, _: Array) -> Callable[[Array, Array], None]:
        first = lax.div(work.first_row(work.x_rows, block), 8) * 8  # by 8, for TMA to see
        count = work.count_of(block)

        def fill(stage: Array, slot: Array) -> None:
            def copy(width: int) -> None:
                for nth in range(units):
                    unit, at = stage * units + nth, slot * units + nth
                    here = g.x.at[pl.ds(first, width), pl.ds(unit * UNIT_COLUMNS, UNIT_COLUMNS)]
                    plgpu.copy_gmem_to_smem(here, shared.x.at[at, pl.ds(0, width)], shared.full.at[slot])
                    if shared.x_scales is not None:
                        here = g.x_block_scales.at[pl.ds(unit, 1), pl.ds(first, width)]
                        plgpu.copy_gmem_to_smem(here, shared.x_scales.at[at, :, pl.ds(0, width)], shared.full.at[slot])

            for_width(task.config.widths, count, copy)

        return fill

    if task.rounding is not None:
        task.rounding.wait_for_rows()
    _each_stage(task, item)


def _each_stage(
    task: Task,
    item: Callable[[Array, Array], Callable[[Array, Array], None]],
    before: Callable[[Array], None] | None = None,
) -> None:
    """For each item what `item` returns of its block and its first tile, for each stage and its slot; `before` of how
    many there were."""
    stages, stages_before = task.stages, task.here.stages_before

    @pl.loop(0, task.num_mine)
    def _(turn: Array) -> None:
        block, tile, part = task.item(turn)
        fill, first = item(block, tile), part * stages

        def stage(step: Array, slot: Array) -> jax.Array:
            nth = stages_before + turn * stages + step

            @pl.when(nth >= task.config.num_stages)
            def _() -> None:
                plgpu.barrier_wait(task.shared.empty.at[slot])

            if before is not None:
                before(nth)
            fill(first + step, slot)
            return task.after(slot)

        lax.fori_loop(0, stages, stage, task.first_slot(turn))
