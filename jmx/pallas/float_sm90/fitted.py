"""Rows of groups times their group's weights, in blocks that fit each group: weights are operand A of `wgmma`, rows B.

So a block may have any multiple of 16 rows, and those of a group have about as many each: of 520 rows three blocks of
176, where `product` has five of 128, the last one nearly empty. Where groups have hundreds of rows this is faster.

A work item is a block of rows of one group by 256 columns of the result. In each stage of the pipeline one producer
warp copies 64 columns of the rows and another one the weights that these are multiplied with; each of two consumer
warpgroups multiplies all of the rows with half of the weights. Sums have a row for each column of the result: they are
transposed on their way to shared memory, from where TMA copies them while the next item is computed.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.float_sm90.blocks import FITTED, ROW_ALIGNMENT, Groups, RowBlocks, Schedule
from jmx.pallas.float_sm90.config import BUFFERS, FittedConfig, Launch
from jmx.pallas.float_sm90.tile import SWIZZLED, Accumulator, transpose
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
    """As `product.product`, of groups that begin at multiples of 8, with results in 16 bits.

    Up to 7 rows after those of a group are written, too.
    """
    config, num_cores = its.config, its.num_cores
    assert isinstance(config, FittedConfig)
    num_rows, columns = len(rows), weights.shape[2 if transposed else 1]
    blocks = RowBlocks.fitted(groups, num_rows, config.block_n)
    blocks = blocks._replace(groups=blocks.groups + first)
    schedule = Schedule(-(-columns // config.block_m), config.section)

    def body(rows: Ref, weights: Ref, blocks: RowBlocks, out: Ref, *, shared: SharedMemory) -> None:
        num_blocks = blocks.number[0]
        share = Share.of(
            Share.begin(lax.axis_index("core")), schedule.num_items(num_blocks), rows.shape[1] // TILE, num_cores
        )
        kernel = _Kernel(rows, weights, out, blocks, num_blocks, schedule, share, config, shared, transposed)
        warpgroup = lax.axis_index("warpgroup")
        specialize(warpgroup, config, partial(kernel.consume, warpgroup), kernel.copy_weights, kernel.copy_rows)

    name = "float_fitted_transposed" if transposed else "float_fitted"
    outputs = [jax.ShapeDtypeStruct((num_rows, columns), its.dtype)]
    shared = SharedMemory.of(config, rows.dtype, its.dtype, transposed=transposed)
    return launch(persistent_kernel(body, name, config, num_cores, outputs, shared), rows, weights, blocks)[0]


class SharedMemory(NamedTuple):
    """Shared memory of a CTA: types, or references.

    Args:
        rows, weights: of all stages; weights of each warpgroup.
        results: buffers of each warpgroup: one is written while the other is copied.
        full_barriers, empty_barriers: of the pipeline.
    """

    rows: Ref
    weights: Ref
    results: Ref
    full_barriers: Ref
    empty_barriers: Ref

    @classmethod
    def of(cls, config: FittedConfig, dtype: Any, result: Any, *, transposed: bool) -> "SharedMemory":
        stages, number, mine = config.num_stages, config.num_warpgroups, config.warpgroup_columns
        return cls(
            plgpu.SMEM((stages, config.block_n, TILE), dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, number, *((TILE, mine) if transposed else (mine, TILE))), dtype, transforms=SWIZZLED),
            plgpu.SMEM((number, BUFFERS, config.piece_rows, TILE), result, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=stages, num_arrivals=1 + number),
            plgpu.Barrier(num_barriers=stages, num_arrivals=number),
        )


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
    config: FittedConfig
    shared: SharedMemory
    transposed: bool

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.shared.full_barriers, self.shared.empty_barriers, self.config.num_stages)

    def position(self, turn: Scalar) -> tuple[Scalar, Scalar]:
        return self.schedule.position(self.share.item(turn), self.num_blocks)

    def _produce(self, prologue: Callable[[Scalar, Scalar], Callable[[Scalar, Scalar], None]]) -> None:
        """Fills the stages of all items; `prologue` takes an item's blocks of rows and columns, see `Pipeline`."""
        pipeline, share = self.pipeline, self.share

        def of_turn(turn: Scalar) -> Callable[[Scalar, Scalar], None]:
            fill = prologue(*self.position(turn))

            def acquired(step: Scalar, slot: Scalar) -> None:
                pipeline.acquire(slot, share.stage(turn, step))
                fill(step, slot)

            return acquired

        pipeline.produce(share, of_turn)

    def copy_weights(self) -> None:
        """Copies weights, of each warpgroup its own; past their end TMA writes zeros."""
        config, mine = self.config, self.config.warpgroup_columns

        def prologue(block: Scalar, column: Scalar) -> Callable[[Scalar, Scalar], None]:
            group = self.blocks.groups[block]

            def fill(step: Scalar, slot: Scalar) -> None:
                summed = pl.ds(step * TILE, TILE)
                for one in range(config.num_warpgroups):
                    columns = pl.ds(column * config.block_m + one * mine, mine)
                    at = (summed, columns) if self.transposed else (columns, summed)
                    self.pipeline.copy(self.weights.at[(group, *at)], self.shared.weights.at[slot, one], slot)

            return fill

        self._produce(prologue)

    def copy_rows(self) -> None:
        """Copies the rows of a block, rounded up to one of a few numbers; what is behind them is not stored."""
        blocks = self.blocks

        def prologue(block: Scalar, column: Scalar) -> Callable[[Scalar, Scalar], None]:
            del column
            first, end = blocks.rows.aligned[block], blocks.rows.ends[block]
            aligned = lax.div(first, ROW_ALIGNMENT) * ROW_ALIGNMENT  # TMA needs to see that it is a multiple of 8

            def fill(step: Scalar, slot: Scalar) -> None:
                def copy(width: int) -> None:
                    source = self.rows.at[pl.ds(aligned, width), pl.ds(step * TILE, TILE)]
                    self.pipeline.copy(source, self.shared.rows.at[slot, pl.ds(0, width)], slot)

                for_width(self.config.widths, end - first, copy)

            return fill

        self._produce(prologue)

    def consume(self, warpgroup: Scalar) -> None:
        """Computes the half tiles of a consumer warpgroup."""
        blocks, config = self.blocks, self.config

        @pl.loop(0, self.share.num_items)
        def _(turn: Scalar) -> None:
            block, column = self.position(turn)
            first = blocks.rows.aligned[block]
            count = blocks.rows.ends[block] - first
            column = column * config.block_m + warpgroup * config.warpgroup_columns

            def multiply(width: int) -> None:
                accumulator = Accumulator((config.warpgroup_columns, width), jnp.float32)
                sums = pl.run_scoped(partial(self._sum, turn, warpgroup, width), accumulator)
                self._store(sums, warpgroup, first, count, column)

            for_width(config.widths, count, multiply)

        plgpu.wait_smem_to_gmem(0)

    def _sum(self, turn: Scalar, warpgroup: Scalar, width: int, acc: Ref) -> Array:
        """The sum of a work item's products. A stage is released when the product after it has begun."""
        pipeline, share, shared = self.pipeline, self.share, self.shared

        def stage(step: Scalar, slots: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            slot, before = slots
            pipeline.wait(slot)
            weights, rows = shared.weights.at[slot, warpgroup], shared.rows.at[slot, pl.ds(0, width)]
            plgpu.wgmma(acc, weights.transpose((1, 0)) if self.transposed else weights, rows.transpose((1, 0)))
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: pipeline.release(before))
            return pipeline.next_slot(slot), slot

        slot = pipeline.first_slot(share, turn)
        _, last = lax.fori_loop(0, share.item_stages, stage, (slot, slot))
        plgpu.wgmma_wait(0)
        pipeline.release(last)
        return acc[...]

    def _store(self, sums: Array, warpgroup: Scalar, first: Scalar, count: Scalar, column: Scalar) -> None:
        """Sends a half tile, of which `count` rows are used, piece by piece."""
        (mine, width), height, columns = sums.shape, self.config.piece_rows, self.out.shape[1]
        buffers = self.shared.results.at[warpgroup]
        aligned = lax.div(first, ROW_ALIGNMENT) * ROW_ALIGNMENT  # TMA needs to see that it is a multiple of 8
        exact = width - FITTED in self.config.widths  # then the last 15 rows at most are not used
        for nth, (right, down) in enumerate(itertools.product(range(0, mine, TILE), range(0, width, height))):
            size = min(height, width - down)
            buffer = buffers.at[nth % BUFFERS]
            plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
            transpose(buffer, sums, right, down, size)
            plgpu.commit_smem()
            send = partial(self._send, buffer, aligned + down, column + right)
            there = column + right < columns
            if exact:
                whole = count > down + size - ROW_ALIGNMENT
                pl.when(there & whole)(partial(send, 0, size))
                if down + size == width and size > ROW_ALIGNMENT:
                    pl.when(there & jnp.logical_not(whole))(partial(send, 0, size - ROW_ALIGNMENT))
            else:
                used = jnp.clip(lax.div(count - down + (ROW_ALIGNMENT - 1), ROW_ALIGNMENT), 0, size // ROW_ALIGNMENT)

                @pl.loop(0, jnp.where(there, used, 0))
                def _(eight: Scalar, send: Callable[..., None] = send) -> None:
                    send(eight * ROW_ALIGNMENT, ROW_ALIGNMENT)

            plgpu.commit_smem_to_gmem_group()

    def _send(self, buffer: Ref, row: Scalar, column: Scalar, start: Scalar | int, size: int) -> None:
        """Starts to copy rows of a buffer to global memory, where `row` and `column` are the buffer's first."""
        place = self.out.at[pl.ds(row + start, size), pl.ds(column, TILE)]
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(start, size)], place, commit_group=False)
