"""One of the kernel's two grouped GEMMs: its operands, and how a thread of the persistent kernel sees it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.dequantize import Decoder
from jmx.pallas.mosaic_sm90.layout import Tile
from jmx.pallas.mosaic_sm90.scheduler import Schedule, WorkItem
from jmx.pallas.mosaic_sm90.tile_mma import SWIZZLED
from jmx.pallas.sm90.gemm import BaseProduct
from jmx.pallas.sm90.pipeline import Pipeline, Stage
from jmx.pallas.sm90.reduction import PartialSums
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import TILE

Array = Any


@dataclass(frozen=True)
class Product(BaseProduct):
    """One of the two products; see `BaseProduct`.

    Args:
        order: int32 (E, outputs), in whose place each output is in `bias` and in scales of whole rows; None: its own.
    """

    order: Array | None = None


class Operands(NamedTuple):
    """A product's arrays as the kernel takes them, or refs of them; None for what there is not."""

    values: Any
    scales: Any  # that come with the tiles
    zero_points: Any
    by_row: Any  # scales (E, N) or (E, N, 1), which the epilogue multiplies by
    bias: Any
    order: Any  # where there is one of these two

    @classmethod
    def of(cls, product: Product) -> "Operands":
        q, of_blocks = product.weight, Tile.of(product.format).scales > 0
        scales, by_row = (q.scales, q.global_scales) if of_blocks else (None, q.scales)
        order = None if by_row is None and product.bias is None else product.order
        return cls(q.values, scales, q.zero_points, by_row, product.bias, order)

    @property
    def tiles(self) -> Stage:
        """What comes with the tiles of the weight."""
        return Stage(values=self.values, scales=self.scales, zero_points=self.zero_points)


class SharedMemory(NamedTuple):
    """Shared memory of a CTA: types, or refs, in the order in which it is allocated."""

    stages: Stage
    sums: Any
    full_barriers: Any
    empty_barriers: Any
    sums_full: Any
    sums_empty: Any

    @classmethod
    def of(cls, config: Config, operands: Operands, value_rows: int, x_dtype: Any) -> "SharedMemory":
        """`operands` of either product; `value_rows`: rows that a tile has in `operands.values`."""
        num_stages, stage_tiles = config.num_stages, config.stage_tiles
        tiles = [
            None
            if array is None
            else plgpu.SMEM((num_stages, config.warpgroups_m, stage_tiles * rows, array.shape[-1]), array.dtype)
            for array, rows in zip(operands[:3], (value_rows, 1, 1), strict=True)
        ]
        copies = 1 + sum(buffer is not None for buffer in tiles)  # into a stage
        sums = PartialSums.scratch(config.warpgroups_m, max(2, config.warpgroups_k), config.block_n)
        if config.warpgroups_k == 1:  # then there are none
            sums = sums._replace(values=plgpu.SMEM((1, 1, 1, 128), jnp.float32))
        return cls(
            Stage(plgpu.SMEM((num_stages, config.block_n, stage_tiles * TILE), x_dtype, transforms=SWIZZLED), *tiles),
            sums.values,
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=copies),
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=config.num_warpgroups),
            sums.full,
            sums.empty,
        )

    @property
    def partial_sums(self) -> PartialSums:
        return PartialSums(self.sums, self.sums_full, self.sums_empty)


@dataclass(frozen=True)
class Cta:
    """What all threads of a CTA share, whichever GEMM they are at.

    Args:
        config, decoder: of the kernel.
        num_rows: of the result.
        value_rows: rows that a tile has in an array of values.
        blocks: with refs.
        num_blocks: how many of them are real.
        written: ref of the counters that signal rows of h.
        shared: refs of shared memory.
        warpgroup: this thread's.
    """

    config: Config
    decoder: Decoder
    num_rows: int
    value_rows: int
    blocks: Blocks
    num_blocks: Any
    written: Any
    shared: SharedMemory
    warpgroup: Array

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.shared.full_barriers, self.shared.empty_barriers, self.config.num_stages)


@dataclass(frozen=True)
class Gemm:
    """One of the two grouped GEMMs as a thread sees it.

    Args:
        cta: what does not depend on the GEMM.
        product, schedule: what is computed, and its work items.
        operands, x, out: refs in global memory.
        x_rows: a block's first row in `x`.
        before: the schedule of the GEMM that gives `x`; None for the first one.
        share: this CTA's work items.
    """

    cta: Cta
    product: Product
    schedule: Schedule
    operands: Operands
    x: Any
    out: Any
    x_rows: Any
    before: Schedule | None
    share: Share

    def work_item(self, turn: Array) -> WorkItem:
        """This CTA's `turn`th."""
        return self.schedule.work_item(self.share.item(turn), self.cta.num_blocks)
