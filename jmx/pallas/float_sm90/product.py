"""Rows of groups times their group's weights: one persistent kernel, with the weights as they are or transposed.

A work item is a block of rows of one group by `block_n` columns of the result. In each stage of the pipeline one
producer warp copies 64 columns of the rows and another one the weights that these are multiplied with; each consumer
warpgroup multiplies 64 of the rows. A warpgroup without rows in a block only releases its stages, so that a group's
last block takes the time of its rows, rounded up to 64.

Items go by *sections* of `config.section` column blocks: all blocks of rows of one section before the next. So the
weights that CTAs read at the same time stay in L2, and are read from memory once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.float_sm90 import fitted
from jmx.pallas.float_sm90.blocks import Groups, RowBlocks
from jmx.pallas.float_sm90.config import Config, FittedConfig, Launch
from jmx.pallas.float_sm90.rows_kernel import RowsKernel
from jmx.pallas.float_sm90.tile import SWIZZLED, Accumulator, store
from jmx.pallas.sm90.operation import Ref
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
    config = its.config
    blocks = RowBlocks.of(groups, len(rows), config.block_m)
    blocks = blocks._replace(groups=blocks.groups + first)
    shared = SharedMemory.of(config, rows.dtype, transposed=transposed)
    return _Kernel.launch("float", (rows, weights, blocks), its, config.block_n, shared, transposed=transposed)


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


class _Kernel(RowsKernel):
    """What all warps of the kernel know."""

    def copy_weights(self) -> None:
        """Copies weights; past their end TMA writes zeros."""
        pipeline, block_n = self.pipeline, self.config.block_n

        def prologue(block: Scalar, column: Scalar) -> Callable[[Scalar, Scalar], None]:
            group = self.blocks.groups[block]

            def fill(step: Scalar, slot: Scalar) -> None:
                columns, summed = pl.ds(column * block_n, block_n), pl.ds(step * TILE, TILE)
                at = (summed, columns) if self.transposed else (columns, summed)
                pipeline.copy(self.weights.at[(group, *at)], self.shared.weights.at[slot], slot)

            return fill

        self.produce(prologue)

    def consume(self, warpgroup: Scalar) -> None:
        """Computes the tiles of a consumer warpgroup."""
        blocks, config, pipeline = self.blocks, self.config, self.pipeline

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
        """The sum of a work item's products."""

        def product(slot: Scalar) -> None:
            weights = self.shared.weights.at[slot]
            rows = self.shared.rows.at[slot, pl.ds(warpgroup * TILE, TILE)]
            plgpu.wgmma(acc, rows, weights if self.transposed else weights.transpose((1, 0)))

        self.multiply(turn, product)
        return acc[...]
