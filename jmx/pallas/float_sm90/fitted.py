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
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.float_sm90.blocks import FITTED, Groups, RowBlocks
from jmx.pallas.float_sm90.config import BUFFERS, FittedConfig, Launch
from jmx.pallas.float_sm90.rows_kernel import RowsKernel
from jmx.pallas.float_sm90.tile import SWIZZLED, Accumulator, transpose
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.tiles import ROW_ALIGNMENT, TILE, aligned_row
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
    config = its.config
    assert isinstance(config, FittedConfig)
    blocks = RowBlocks.fitted(groups, len(rows), config.block_n)
    blocks = blocks._replace(groups=blocks.groups + first)
    shared = SharedMemory.of(config, rows.dtype, its.dtype, transposed=transposed)
    return _Kernel.launch("float_fitted", (rows, weights, blocks), its, config.block_m, shared, transposed=transposed)


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


class _Kernel(RowsKernel):
    """What all warps of the kernel know."""

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

        self.produce(prologue)

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
        """The sum of a work item's products."""

        def product(slot: Scalar) -> None:
            weights = self.shared.weights.at[slot, warpgroup]
            rows = self.shared.rows.at[slot, pl.ds(0, width)]
            plgpu.wgmma(acc, weights.transpose((1, 0)) if self.transposed else weights, rows.transpose((1, 0)))

        self.multiply(turn, product)
        return acc[...]

    def _store(self, sums: Array, warpgroup: Scalar, first: Scalar, count: Scalar, column: Scalar) -> None:
        """Sends a half tile, of which `count` rows are used, piece by piece."""
        (mine, width), height, columns = sums.shape, self.config.piece_rows, self.out.shape[1]
        buffers = self.shared.results.at[warpgroup]
        aligned = aligned_row(first)
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
