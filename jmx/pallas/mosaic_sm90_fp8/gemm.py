"""A grouped GEMM, as a thread of the persistent kernel knows it, and the shared memory of a CTA."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Product
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS, value_rows
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.mosaic_sm90_fp8.staging import swizzled_rows
from jmx.pallas.mosaic_sm90_fp8.wgmma import SWIZZLED
from jmx.pallas.sm90.gemm import Operands
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Pipeline, Stage
from jmx.pallas.sm90.reduction import PartialSums
from jmx.pallas.sm90.row import WORDS
from jmx.pallas.sm90.scheduler import Share, Start
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Int32

_RESIDENT_BARRIERS = 2  # all warpgroups have multiplied the old resident rows; they have quantized the new ones


class SharedMemory(NamedTuple):
    """Shared memory of a CTA: types, or references, in the order of allocation. What a configuration lacks is None.

    Args:
        outs: of each product, results that are copied to global memory.
        stages: of the pipeline; of resident rows and their scales, all units.
        warp_maxima: of each warpgroup, for quantization.
        resident_row_scales: of resident rows, where scales belong to whole rows.
        resident_barriers: see `_RESIDENT_BARRIERS`.
        partial_sums: of the reduction.
        full_barriers, empty_barriers: of the pipeline.
        turn_barriers: of two warpgroups that multiply alternately.
        quantized_barrier: the first GEMM's rows are quantized.
    """

    outs: Sequence[Ref]
    stages: Stage
    warp_maxima: Ref
    resident_row_scales: Ref
    resident_barriers: Ref
    partial_sums: PartialSums | None
    full_barriers: Ref
    empty_barriers: Ref
    turn_barriers: Ref
    quantized_barrier: Ref

    @classmethod
    def of(cls, products: Sequence[Product], config: Config) -> "SharedMemory":
        first, (tiles, units) = products[0], (config.warpgroups_m, config.warpgroups_k)  # of a stage
        num_stages, num_consumers, resident = config.num_stages, config.num_warpgroups, config.resident_rows
        fused, by_block = first.quantizes, first.by_block
        values, scales, *_ = Operands.of(first)
        value_stages = (num_stages, tiles, units * value_rows(first.format), values.shape[-1])
        row_slots = config.row_slots(max(product.units for product in products))
        stages = Stage(
            x=plgpu.SMEM((row_slots, config.block_n, UNIT_COLUMNS), first.input_dtype, transforms=SWIZZLED),
            values=plgpu.SMEM(value_stages, values.dtype, transforms=() if first.elements.decoded else SWIZZLED),
            scales=None if scales is None else plgpu.SMEM((num_stages, tiles, units, scales.shape[-1]), scales.dtype),
            x_scales=plgpu.SMEM((row_slots, 1, config.scales_n), jnp.float32) if by_block else None,
        )
        copies = 1 + (scales is not None)  # into a stage
        if not resident:
            copies += units * (1 + by_block)
        outs = []
        for product in products:
            columns, staged = product.tile_columns, product.staged(config)
            transforms = swizzled_rows(columns, product.dtype)
            outs.append(plgpu.SMEM((tiles, staged, columns), product.dtype, transforms=transforms))
        return cls(
            outs=outs,
            stages=stages,
            warp_maxima=plgpu.SMEM((num_consumers, WORDS), jnp.int32) if fused else None,
            resident_row_scales=plgpu.SMEM((config.scales_n,), jnp.float32) if resident and not by_block else None,
            resident_barriers=(
                plgpu.Barrier(num_barriers=_RESIDENT_BARRIERS, num_arrivals=num_consumers) if resident else None
            ),
            partial_sums=PartialSums.scratch(tiles, units, config.block_n) if units > 1 else None,
            full_barriers=plgpu.Barrier(num_barriers=num_stages, num_arrivals=copies),
            empty_barriers=plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_consumers),
            turn_barriers=plgpu.Barrier(num_barriers=2, num_arrivals=1),
            quantized_barrier=plgpu.Barrier(num_arrivals=num_consumers) if fused else None,
        )


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One of a launch's grouped GEMMs, as a thread of the kernel knows it.

    Args:
        product: what is computed.
        share: the work items of this CTA.
        operands, out: references to global memory.
        x: the quantized rows, references to global memory; for resident rows, to shared memory.
        unquantized: the rows before that, if they are quantized in this launch.
        blocks: blocks of rows, with references.
        shared: references to shared memory.
        counters: see `fused_quantize.new_counters`; None if rows are not quantized in this launch.
        index, last: this GEMM's number in the launch, and whether it is the last one.
        before: the GEMM whose results are this one's rows, if most of these are quantized before its end; else None.
        cta, warpgroup: this thread's.
        config, num_rows: the launch's.
    """

    product: Product
    share: Share
    operands: Operands
    out: Ref
    x: InputRows
    unquantized: InputRows | None
    blocks: Blocks
    shared: SharedMemory
    counters: Ref
    index: int
    last: bool
    before: "Gemm | None"
    cta: Int32[Array, ""]
    warpgroup: Int32[Array, ""]
    config: Config
    num_rows: int

    @staticmethod
    def share_of(start: Start, product: Product, blocks: Blocks, config: Config, num_ctas: int) -> Share:
        """A CTA's work items. The stages of an item cover one part of the columns, with zeros after the last unit."""
        units = -(-product.units // product.split_k)
        all_items = blocks.number * (_steps(product, config) * product.split_k)
        return Share.of(start, all_items, -(-units // config.warpgroups_k), num_ctas)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.shared.full_barriers, self.shared.empty_barriers, self.config.num_stages)

    @property
    def items_of_block(self) -> int:
        """The number of items of each block."""
        return _steps(self.product, self.config) * self.product.split_k

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of a block's rows that the kernel is compiled for."""
        return self.config.widths(self.product.elements.exact)

    @property
    def wm(self) -> Int32[Array, ""]:
        """This warpgroup's index along the weight's rows."""
        mine, config = self.warpgroup, self.config
        return mine if config.warpgroups_k == 1 else lax.rem(mine, config.warpgroups_m)

    @property
    def wk(self) -> Int32[Array, ""] | int:
        """This warpgroup's index along the columns."""
        mine, config = self.warpgroup, self.config
        return 0 if config.warpgroups_k == 1 else lax.div(mine, config.warpgroups_m)

    @property
    def tokens_may_be_a(self) -> bool:
        """Whether some blocks have tokens as operand A."""
        product, config = self.product, self.config
        may = product.by_block and not product.elements.decoded and product.split_k == 1 and not config.resident_rows
        return may and config.tokens_may_be_a and product.staged(config) >= TILE

    def half_stage(self, part: Int32[Array, ""]) -> Int32[Array, ""] | None:
        """The stage of an item of a part of the columns, whose unit of 8-bit elements for this warpgroup is one of
        which half is stored; another number than those of its stages if it has none, None if no item has one."""
        if not self.product.ends_in_half or self.product.elements.decoded:
            return None
        stage, wk = divmod(self.product.units - 1, self.config.warpgroups_k)
        return jnp.where(self.wk == wk, stage - part * self.share.item_stages, -1)

    def item(self, turn: Int32[Array, ""]) -> tuple[Int32[Array, ""], Int32[Array, ""], Int32[Array, ""]]:
        """The block, the first tile along the weight's rows and the part of the columns; past the end, of some item."""
        nth = jnp.clip(self.share.item(turn), 0, jnp.maximum(self.share.all_items, 1) - 1)
        step, part = lax.div(nth, self.product.split_k), lax.rem(nth, self.product.split_k)
        steps = _steps(self.product, self.config)
        return lax.div(step, steps), lax.rem(step, steps) * self.config.warpgroups_m, part


def _steps(product: Product, config: Config) -> int:
    """The number of items along the weight's rows."""
    return -(-product.m_tiles // config.warpgroups_m)
