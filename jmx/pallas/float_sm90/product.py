"""Rows of groups times their group's weights: one persistent kernel, with the weights as they are or transposed.

A work item is a block of rows of one group by `block_n` columns of the result. In each stage of the pipeline one
producer warp copies 64 columns of the rows and another one the weights that these are multiplied with; each consumer
warpgroup multiplies 64 of the rows. A warpgroup without rows in a block only releases its stages, so that a group's
last block takes the time of its rows, rounded up to 64.

Items go by *sections* of `config.section` column blocks: all blocks of rows of one section before the next. So the
weights that CTAs read at the same time stay in L2, and are read from memory once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.float_sm90 import fitted
from jmx.pallas.float_sm90.blocks import ROW_ALIGNMENT, Groups, RowBlocks, Schedule
from jmx.pallas.float_sm90.config import Config, FittedConfig, Launch
from jmx.pallas.float_sm90.tile import SWIZZLED, Accumulator, store
from jmx.pallas.sm90.launch import for_width, launch, persistent_kernel, specialize
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Pipeline
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float, Int32

Scalar = Int32[Array, ""]


def product(
    rows: Float[Array, "R C"],
    weights: Float[Array, "every N K"],
    groups: Groups,
    its: Launch,
    *,
    transposed: bool,
    first: Any = 0,
) -> Float[Array, "R W"]:
    """Each row (K,) times its group's (N, K) transposed, or, if `transposed`, each (N,) times (N, K) itself.

    Args:
        rows: of 16-bit floats, R a multiple of 8.
        weights: of the same dtype, N and K multiples of 64; those of the E groups from `first` on.
        groups: the rows of each group. Results of rows of no group are undefined. With a `FittedConfig` each group
            begins at a multiple of 8.
    """
    if isinstance(its.config, FittedConfig):
        return fitted.product(rows, weights, groups, its, transposed=transposed, first=first)
    config, num_cores = its.config, its.num_cores
    num_rows, columns = len(rows), weights.shape[2 if transposed else 1]
    blocks = RowBlocks.of(groups, num_rows, config.block_m)
    blocks = blocks._replace(groups=blocks.groups + first)
    schedule = Schedule(-(-columns // config.block_n), config.section)

    def body(rows: Ref, weights: Ref, blocks: RowBlocks, out: Ref, *, shared: SharedMemory) -> None:
        num_blocks = blocks.number[0]
        share = Share.of(
            Share.begin(lax.axis_index("core")), schedule.num_items(num_blocks), rows.shape[1] // TILE, num_cores
        )
        kernel = _Kernel(rows, weights, out, blocks, num_blocks, schedule, share, config, shared, transposed)
        warpgroup = lax.axis_index("warpgroup")
        specialize(warpgroup, config, partial(kernel.consume, warpgroup), kernel.copy_weights, kernel.copy_rows)

    name = "float_transposed" if transposed else "float"
    outputs = [jax.ShapeDtypeStruct((num_rows, columns), its.dtype)]
    shared = SharedMemory.of(config, rows.dtype, transposed=transposed)
    return launch(persistent_kernel(body, name, config, num_cores, outputs, shared), rows, weights, blocks)[0]


class SharedMemory(NamedTuple):
    """Shared memory of a CTA: types, or references.

    Args:
        rows, weights: of all stages.
        full_barriers, empty_barriers: of the pipeline.
    """

    rows: Ref
    weights: Ref
    full_barriers: Ref
    empty_barriers: Ref

    @classmethod
    def of(cls, config: Config, dtype: Any, *, transposed: bool) -> "SharedMemory":
        stages, block_n = config.num_stages, config.block_n
        weights = (TILE, block_n) if transposed else (block_n, TILE)
        return cls(
            plgpu.SMEM((stages, config.block_m, TILE), dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, *weights), dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            plgpu.Barrier(num_barriers=stages, num_arrivals=config.num_warpgroups),
        )

    def pipeline(self, config: Config) -> Pipeline:
        return Pipeline(self.full_barriers, self.empty_barriers, config.num_stages)


@dataclass(frozen=True)
class _Kernel:
    """What all warps of the kernel know."""

    rows: Ref
    weights: Ref
    out: Ref
    blocks: RowBlocks
    num_blocks: Scalar
    schedule: Schedule
    share: Share
    config: Config
    shared: SharedMemory
    transposed: bool

    def position(self, turn: Scalar) -> tuple[Scalar, Scalar]:
        return self.schedule.position(self.share.item(turn), self.num_blocks)

    def _produce(self, prologue: Callable[[Scalar, Scalar], Callable[[Scalar, Scalar], None]]) -> None:
        """Fills the stages of all items; `prologue` takes an item's blocks of rows and columns, see `Pipeline`."""
        pipeline, share = self.shared.pipeline(self.config), self.share

        def of_turn(turn: Scalar) -> Callable[[Scalar, Scalar], None]:
            fill = prologue(*self.position(turn))

            def acquired(step: Scalar, slot: Scalar) -> None:
                pipeline.acquire(slot, share.stage(turn, step))
                fill(step, slot)

            return acquired

        pipeline.produce(share, of_turn)

    def copy_weights(self) -> None:
        """Copies weights; past their end TMA writes zeros."""
        pipeline, block_n = self.shared.pipeline(self.config), self.config.block_n

        def prologue(block: Scalar, column: Scalar) -> Callable[[Scalar, Scalar], None]:
            group = self.blocks.groups[block]

            def fill(step: Scalar, slot: Scalar) -> None:
                columns, summed = pl.ds(column * block_n, block_n), pl.ds(step * TILE, TILE)
                at = (summed, columns) if self.transposed else (columns, summed)
                pipeline.copy(self.weights.at[(group, *at)], self.shared.weights.at[slot], slot)

            return fill

        self._produce(prologue)

    def copy_rows(self) -> None:
        """Copies the rows of a block, rounded up to one of a few numbers; what is behind them is not stored."""
        pipeline, blocks = self.shared.pipeline(self.config), self.blocks
        widths = tuple(width for width in (8, 16, 32, 64, 128, 192) if width <= self.config.block_m)

        def prologue(block: Scalar, column: Scalar) -> Callable[[Scalar, Scalar], None]:
            del column
            first, end = blocks.rows.aligned[block], blocks.rows.ends[block]
            aligned = lax.div(first, ROW_ALIGNMENT) * ROW_ALIGNMENT  # TMA needs to see that it is a multiple of 8

            def fill(step: Scalar, slot: Scalar) -> None:
                def copy(width: int) -> None:
                    source = self.rows.at[pl.ds(aligned, width), pl.ds(step * TILE, TILE)]
                    pipeline.copy(source, self.shared.rows.at[slot, pl.ds(0, width)], slot)

                for_width(widths, end - first, copy)

            return fill

        self._produce(prologue)

    def consume(self, warpgroup: Scalar) -> None:
        """Computes the tiles of a consumer warpgroup."""
        blocks, config, pipeline = self.blocks, self.config, self.shared.pipeline(self.config)

        @pl.loop(0, self.share.num_items)
        def _(turn: Scalar) -> None:
            block, column = self.position(turn)
            first = blocks.rows.aligned[block] + warpgroup * TILE
            bounds = blocks.rows.starts[block], blocks.rows.ends[block]
            used = first < bounds[1]

            @pl.when(used)
            def _() -> None:
                acc = pl.run_scoped(
                    partial(self._sum, turn, warpgroup), Accumulator((TILE, config.block_n), jnp.float32)
                )
                store(self.out, acc, first, bounds, column * config.block_n, self.out.shape[1])

            @pl.when(jnp.logical_not(used))
            def _() -> None:
                pipeline.consume(self.share, turn, (), lambda carry, slot: carry)

    def _sum(self, turn: Scalar, warpgroup: Scalar, acc: Ref) -> Array:
        """The sum of a work item's products. A stage is released when the product after it has begun."""
        pipeline, share, shared = self.shared.pipeline(self.config), self.share, self.shared

        def stage(step: Scalar, slots: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            slot, before = slots
            pipeline.wait(slot)
            weights = shared.weights.at[slot]
            plgpu.wgmma(
                acc,
                shared.rows.at[slot, pl.ds(warpgroup * TILE, TILE)],
                weights if self.transposed else weights.transpose((1, 0)),
            )
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: pipeline.release(before))
            return pipeline.next_slot(slot), slot

        slot = pipeline.first_slot(share, turn)
        _, last = lax.fori_loop(0, share.item_stages, stage, (slot, slot))
        plgpu.wgmma_wait(0)
        pipeline.release(last)
        return acc[...]
