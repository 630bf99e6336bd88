"""A grouped GEMM as a thread of the persistent kernel sees it, and the shared memory of a CTA."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Operands, Product
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS, value_rows
from jmx.pallas.mosaic_sm90_fp8.quantize_row import WORDS
from jmx.pallas.mosaic_sm90_fp8.rows import UnquantizedRows
from jmx.pallas.mosaic_sm90_fp8.staging import swizzled_rows
from jmx.pallas.mosaic_sm90_fp8.wgmma import SWIZZLED
from jmx.pallas.sm90.pipeline import Pipeline, Stage
from jmx.pallas.sm90.reduction import PartialSums
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import TILE

Array = Any
_KEPT_BARRIERS = 2  # that nobody multiplies the rows that are kept any more, and that others are there


class SharedMemory(NamedTuple):
    """Shared memory of a CTA: types, or refs, in the order in which it is allocated; None for what there is not."""

    outs: Sequence[Any]  # results of each product on their way to global memory
    stages: Stage  # or all units of the rows that are kept, and so are their scales
    warp_maxima: Any  # words of each warpgroup, for quantizing
    row_scales: Any  # of rows that are kept
    kept: Any  # barriers
    sums: Any
    sums_full: Any
    sums_empty: Any
    full_barriers: Any
    empty_barriers: Any
    turns: Any  # barriers of two warpgroups that multiply in turn
    quantized: Any  # barrier: that the first rows are

    @classmethod
    def of(cls, products: Sequence[Product], operands: Sequence[Operands], config: Config) -> "SharedMemory":
        first, (tiles, units) = products[0], (config.warpgroups_m, config.warpgroups_k)  # of a stage
        num_stages, num_compute, kept = config.num_stages, config.num_warpgroups, config.keeps_rows
        fused, by_block = isinstance(first.inputs, UnquantizedRows), first.by_block
        values, scales = first.weight.values, operands[0].scales
        value_stages = (num_stages, tiles, units * value_rows(first.format), values.shape[-1])
        row_slots = config.row_slots(max(product.units for product in products))
        stages = Stage(
            x=plgpu.SMEM((row_slots, config.block_n, UNIT_COLUMNS), jnp.float8_e4m3fn, transforms=SWIZZLED),
            values=plgpu.SMEM(value_stages, values.dtype, transforms=() if first.decoded else SWIZZLED),
            scales=None if scales is None else plgpu.SMEM((num_stages, tiles, units, scales.shape[-1]), scales.dtype),
            x_scales=plgpu.SMEM((row_slots, 1, config.scales_n), jnp.float32) if by_block else None,
        )
        copies = 1 + (scales is not None)  # into a stage
        if not kept:
            copies += units * (1 + by_block)
        sums = PartialSums.scratch(tiles, units, config.block_n) if units > 1 else PartialSums(None, None, None)
        outs = []
        for product in products:
            columns, staged = product.tile_columns, product.staged(config)
            transforms = swizzled_rows(columns, product.dtype)
            outs.append(plgpu.SMEM((tiles, staged, columns), product.dtype, transforms=transforms))
        return cls(
            outs=outs,
            stages=stages,
            warp_maxima=plgpu.SMEM((num_compute, WORDS), jnp.int32) if fused else None,
            row_scales=plgpu.SMEM((config.scales_n,), jnp.float32) if kept and not by_block else None,
            kept=plgpu.Barrier(num_barriers=_KEPT_BARRIERS, num_arrivals=num_compute) if kept else None,
            sums=sums.values,
            sums_full=sums.full,
            sums_empty=sums.empty,
            full_barriers=plgpu.Barrier(num_barriers=num_stages, num_arrivals=copies),
            empty_barriers=plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_compute),
            turns=plgpu.Barrier(num_barriers=2, num_arrivals=1),
            quantized=plgpu.Barrier(num_arrivals=num_compute) if fused else None,
        )

    @property
    def partial_sums(self) -> PartialSums:
        """That warpgroups along the columns hand over."""
        return PartialSums(self.sums, self.sums_full, self.sums_empty)


@dataclass(frozen=True)
class Gemm:
    """One of a launch's grouped GEMMs as a thread sees it.

    Args:
        product: what is computed.
        operands, out: refs in global memory; of rows that are kept, in shared memory.
        blocks: of rows, with refs.
        shared: refs of shared memory.
        unquantized: with refs, where rows are quantized in this launch.
        counters: see `fused_quantize.new_counters`; None where no rows are quantized.
        index, last: of the launch's GEMMs, this one's number, and whether there is none behind it.
        cta, warpgroup: this thread's.
        config, num_rows: the launch's.
        share: this CTA's work items.
    """

    product: Product
    operands: Operands
    out: Any
    blocks: Blocks
    shared: SharedMemory
    unquantized: UnquantizedRows | None
    counters: Any
    index: int
    last: bool
    cta: Array
    warpgroup: Array
    config: Config
    num_rows: int
    share: Share

    @staticmethod
    def share_of(start: tuple[Any, ...], product: Product, blocks: Blocks, config: Config, num_ctas: int) -> Share:
        """A CTA's work items; an item's stages are one part of the columns, behind whose last unit are zeros."""
        units = -(-product.units // product.split_k)
        all_items = blocks.number * (_steps(product, config) * product.split_k)
        return Share.of(start, all_items, -(-units // config.warpgroups_k), num_ctas)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.shared.full_barriers, self.shared.empty_barriers, self.config.num_stages)

    @property
    def wm(self) -> Array:
        """Which of the warpgroups along the weight's rows this one is."""
        mine, config = self.warpgroup, self.config
        return mine if config.warpgroups_k == 1 else lax.rem(mine, config.warpgroups_m)

    @property
    def wk(self) -> Array | int:
        """The same along the columns."""
        mine, config = self.warpgroup, self.config
        return 0 if config.warpgroups_k == 1 else lax.div(mine, config.warpgroups_m)

    @property
    def tokens_may_be_a(self) -> bool:
        """Whether tokens are the operand A of some blocks' products."""
        product, config = self.product, self.config
        may = product.by_block and not product.decoded and product.split_k == 1 and not config.keeps_rows
        return may and config.tokens_may_be_a and product.staged(config) >= TILE

    def item(self, turn: Array) -> tuple[Array, Array, Array]:
        """Block, first tile of the weight's rows and part of the columns; past the end of some item."""
        nth = jnp.clip(self.share.item(turn), 0, jnp.maximum(self.share.all_items, 1) - 1)
        step, part = lax.div(nth, self.product.split_k), lax.rem(nth, self.product.split_k)
        steps = _steps(self.product, self.config)
        return lax.div(step, steps), lax.rem(step, steps) * self.config.warpgroups_m, part


def _steps(product: Product, config: Config) -> int:
    """Steps of an item's tiles along the weight's rows."""
    return -(-product.m_tiles // config.warpgroups_m)
