"""One of the kernel's two grouped GEMMs: its operands, the shared memory, and what a thread knows of it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90.added import Added
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.dequantize import Decoder
from jmx.pallas.mosaic_sm90.fused_rounding import RowRounder
from jmx.pallas.mosaic_sm90.layout import Tile
from jmx.pallas.mosaic_sm90.rounded_tiles import TileRounder
from jmx.pallas.mosaic_sm90.scheduler import Schedule, WorkItem
from jmx.pallas.mosaic_sm90.tile_mma import SWIZZLED
from jmx.pallas.sm90.gemm import BaseProduct, Operands, Rows
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Pipeline, Stage
from jmx.pallas.sm90.reduction import PartialSums
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float32, Int32


@dataclass(frozen=True)
class Product(BaseProduct):
    """One of the two products; see `BaseProduct`.

    Args:
        order: where the weight's rows are in another product's column order: `bias` and whole-row scales have an
            output's value in the place of output order[expert, output]. None: in its own place.
        row_scales: of each row that the product reads, by which its sums are multiplied before the bias; None: 1.
        transposed: whether rows are multiplied with the weight itself, not with its transpose: rows @ weight[expert].
            Columns of the rows are in the weight's order of tiles (`Rows.stored`), and already multiplied by its scales
            of whole rows. `rows` are the weight's columns. There is no bias and no activation.
        shifts: of each block of rows, with `transposed` and a format with shifts (see `layout`): one for all tiles of
            its expert.
        added: to the sums before the activation; None: 0. The product must have one part.
    """

    order: Int32[Array, "E outputs"] | None = None
    row_scales: Float32[Array, " X"] | None = None
    transposed: bool = False
    shifts: Int32[Array, " B"] | None = None
    added: Added | None = None

    @property
    def stored(self) -> Rows:
        """How the result is stored: without an activation, gates and ups in the order of the weight's tiles."""
        if self.activation is None and self.rows.gate_up_order is not None:
            return Rows(2 * self.rows.num_outputs, None)
        return self.rows


def operands_of(product: Product) -> Operands:
    """A product's arrays."""
    operands = Operands.of(product)
    if product.transposed:
        operands = operands._replace(channel_scales=None)
    order = None if operands.channel_scales is None and operands.bias is None else product.order
    return operands._replace(order=order, row_scales=product.row_scales, shifts=product.shifts, added=product.added)


class SharedMemory(NamedTuple):
    """Shared memory of a CTA: types, or references, in the order of allocation.

    Args:
        stages, full_barriers, empty_barriers: of the pipeline.
        sums, sums_full_barriers, sums_empty_barriers: of the reduction; see `PartialSums`.
        warp_maxima: of each consumer warpgroup, which rounds rows; None if none does.
    """

    stages: Stage
    sums: Ref
    full_barriers: Ref
    empty_barriers: Ref
    sums_full_barriers: Ref
    sums_empty_barriers: Ref
    warp_maxima: Ref = None

    @classmethod
    def of(
        cls, config: Config, operands: Operands, tile: Tile, x_dtype: Any, *, transposed: bool, words: int
    ) -> "SharedMemory":
        """`operands`: of either product. `words`: of `warp_maxima`, for each warpgroup; 0 if no rows are rounded in the
        launch."""
        num_stages, stage_tiles = config.num_stages, config.stage_tiles

        def tiles(array: Any, rows: int = 1) -> Any:  # `rows`: of a tile in the array
            if array is None:
                return None
            if transposed:  # tiles of one row of the weight's tiles are next to each other, as in memory
                return plgpu.SMEM((num_stages, stage_tiles, config.warpgroups_m * rows, array.shape[-1]), array.dtype)
            return plgpu.SMEM((num_stages, config.warpgroups_m, stage_tiles * rows, array.shape[-1]), array.dtype)

        stages = Stage(
            x=plgpu.SMEM((num_stages, config.block_n, stage_tiles * TILE), x_dtype, transforms=SWIZZLED),
            values=tiles(operands.values, tile.value_rows),
            scales=tiles(operands.scales),
            zero_points=tiles(operands.zero_points),
        )
        copies = sum(buffer is not None for buffer in stages)  # into a stage
        sums = PartialSums.scratch(config.warpgroups_m, max(2, config.warpgroups_k), config.block_n)
        if config.warpgroups_k == 1:  # no reduction, and in its buffer's place there is `warp_maxima`
            sums = sums._replace(values=None if words else plgpu.SMEM((1, 1, 1, 128), jnp.float32))
        return cls(
            stages=stages,
            sums=sums.values,
            full_barriers=plgpu.Barrier(num_barriers=num_stages, num_arrivals=copies),
            empty_barriers=plgpu.Barrier(num_barriers=num_stages, num_arrivals=config.num_warpgroups),
            sums_full_barriers=sums.full_barriers,
            sums_empty_barriers=sums.empty_barriers,
            warp_maxima=plgpu.SMEM((config.num_warpgroups, words), jnp.int32) if words else None,
        )

    @property
    def partial_sums(self) -> PartialSums:
        return PartialSums(self.sums, self.sums_full_barriers, self.sums_empty_barriers)


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One of the two grouped GEMMs, as a thread of the kernel knows it.

    Args:
        product, schedule: what is computed, and its work items.
        share: the work items of this CTA.
        operands, x, out: references to global memory.
        x_rows: each block's first row in `x`.
        before: the schedule of the GEMM of this kernel that computes `x`; None for the first GEMM.
        is_read: whether another GEMM of this kernel reads the result.
        row_rounder: rounds that result for the other GEMM, when all of it is written; of both GEMMs, else None.
        tile_rounder: rounds it in the epilogue instead; of the first GEMM, else None.
        config, decoder: the kernel's.
        blocks, num_blocks: blocks of rows, with references, and the number of those in use.
        num_rows: of the result.
        written: counters that signal rows of h.
        shared: references to shared memory.
        warpgroup: this thread's.
    """

    product: Product
    schedule: Schedule
    share: Share
    operands: Operands
    x: Ref
    out: Ref
    x_rows: Ref | int
    before: Schedule | None
    is_read: bool
    row_rounder: RowRounder | None
    tile_rounder: TileRounder | None
    config: Config
    decoder: Decoder
    blocks: Blocks
    num_blocks: Int32[Array, ""] | int
    num_rows: int
    written: Ref
    shared: SharedMemory
    warpgroup: Int32[Array, ""]

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.shared.full_barriers, self.shared.empty_barriers, self.config.num_stages)

    @property
    def value_rows(self) -> int:
        """Rows of a tile in an array of values."""
        return self.decoder.tile.value_rows

    def work_item(self, turn: Int32[Array, ""]) -> WorkItem:
        """This CTA's `turn`th work item."""
        return self.schedule.work_item(self.share.item(turn), self.num_blocks)
