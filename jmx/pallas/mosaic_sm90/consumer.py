"""Consumer warpgroups: each work item from the loads of its prologue by the sum over its stages to its epilogue."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.numerics.formats import MXFP4
from jmx.pallas.mosaic_sm90 import tile_mma
from jmx.pallas.mosaic_sm90.grouped_gemm import Gemm
from jmx.pallas.mosaic_sm90.scheduler import WorkItem
from jmx.pallas.sm90 import accumulator, counters, epilogue
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.pipeline import Stage
from jmx.pallas.sm90.tiles import TILE

Array = Any
FEW_ROWS = 32  # a block; up to here mma.sync, beyond wgmma. Never both in one kernel: they need not round alike


class Loaded(NamedTuple):
    """What a work item's prologue loads, while the item before it is computed."""

    item: WorkItem  # whose tile is this warpgroup's own
    first: Array
    count: Array
    exponent: Array | None
    raised: Array | None
    by_row: tuple[Array, Array] | None
    bias: tuple[Array, Array] | None


@dataclass(frozen=True)
class Consumer:
    """A warpgroup: `wm`th along the weight's rows, `wk`th along its columns."""

    gemm: Gemm
    wm: Array
    wk: Array

    def prologue(self, turn: Array) -> Loaded:
        gemm, blocks, operands = self.gemm, self.gemm.cta.blocks, self.gemm.operands
        with jax.named_scope("prologue"):
            item = gemm.work_item(turn)
            item = item._replace(tile=item.tile + self.wm)
            expert = blocks.experts[item.block]
            inside = jnp.minimum(item.tile, gemm.schedule.m_tiles - 1)
            exponent = raised = None
            if gemm.product.format == MXFP4:
                exponent, raised = tile_mma.tile_scalars(operands.scales, expert, inside)
            by_row, bias = (
                None if ref is None else epilogue.load_row(ref, gemm.product.rows, expert, item.tile, operands.order)
                for ref in (operands.by_row, operands.bias)
            )
            first, count = blocks.first_row(blocks.out_rows, item.block), blocks.count_of(item.block)
        return Loaded(item, first, count, exponent, raised, by_row, bias)

    def compute(self, turn: Array, loaded: Loaded) -> Loaded:
        """One work item; returns what the prologue of the next one loads."""
        following = self.prologue(turn + 1)
        for_width(self.gemm.cta.config.widths, loaded.count, partial(self.multiply, turn, loaded))
        return following

    def multiply(self, turn: Array, loaded: Loaded, width: int) -> None:
        """The tile of a work item whose block has up to `width` rows."""
        cta, share = self.gemm.cta, self.gemm.share
        acc = plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), plgpu.Layout.WGMMA)
        step = self.add_stage_of_few if cta.config.block_n <= FEW_ROWS else self.add_stage
        with jax.named_scope("accumulate"):
            acc = cta.pipeline.consume(share, turn, acc, partial(step, loaded, width))
        sums = accumulator.split_rows(acc)
        if cta.config.warpgroups_k == 1:
            self.finish(loaded, width, sums)
        else:
            again, partial_sums = share.items_before + turn > 0, cta.shared.partial_sums
            pl.when(self.wk > 0)(lambda: partial_sums.hand_over(self.wm, self.wk, width, sums, again=again))
            pl.when(self.wk == 0)(lambda: self.finish(loaded, width, partial_sums.take_over(self.wm, width, sums)))

    def part_of(self, slot: Array, width: int) -> Stage:
        """This warpgroup's tiles in a stage, and the rows that they multiply."""
        cta = self.gemm.cta
        k_tiles, stages = cta.config.k_tiles, cta.shared.stages
        first = self.wk * k_tiles
        weights = (stages.values, stages.scales, stages.zero_points)
        tiles = [
            None if ref is None else ref.at[slot, self.wm, pl.ds(first * rows, k_tiles * rows)]
            for ref, rows in zip(weights, (cta.value_rows, 1, 1), strict=True)
        ]
        return Stage(stages.x.at[slot, pl.ds(0, width), pl.ds(first * TILE, k_tiles * TILE)], *tiles)

    def add_stage_of_few(self, loaded: Loaded, width: int, acc: Array, slot: Array) -> Array:
        """`acc` plus a stage's tiles times few rows, by mma.sync."""
        stage = self.part_of(slot, width)
        for i in range(self.gemm.cta.config.k_tiles):
            acc = tile_mma.multiply_few(acc, self.gemm.cta.decoder, stage, loaded.exponent, i)
        return acc

    def add_stage(self, loaded: Loaded, width: int, acc: Array, slot: Array) -> Array:
        """`acc` plus a stage's tiles times rows, by wgmma: each half tile is dequantized under the one before."""
        stage = self.part_of(slot, width)
        for i in range(self.gemm.cta.config.k_tiles):
            halves = tile_mma.dequantize(self.gemm.cta.decoder, stage, loaded.exponent, i)
            for half, a in enumerate(halves):
                acc = tile_mma.multiply(acc, a, stage.x, i, half)
                accumulator.wait_for_earlier_products()
        return tile_mma.wait_for_product(acc)

    @jax.named_scope("epilogue")
    def finish(self, loaded: Loaded, width: int, sums: tuple[Array, Array]) -> None:
        gemm, item, product = self.gemm, loaded.item, self.gemm.product
        raised = 2.0**gemm.cta.decoder.raised if loaded.raised is None else loaded.raised
        outs = [total * raised for total in sums]
        if loaded.by_row is not None:
            outs = [out * epilogue.repeat(row, width) for out, row in zip(outs, loaded.by_row, strict=True)]
        if loaded.bias is not None:
            once = jnp.where(item.part == 0, jnp.float32(1), jnp.float32(0))
            outs = [out + epilogue.repeat(row, width) * once for out, row in zip(outs, loaded.bias, strict=True)]
        if product.activation is not None:
            gated = product.rows.gate_up_order is not None
            outs = [product.activation(*outs)] if gated else [product.activation(out) for out in outs]
        first = item.part * gemm.cta.num_rows + loaded.first
        outs = [out.astype(product.dtype) for out in outs]
        epilogue.store(gemm.out, outs, product.rows, item.tile, first, loaded.count)
        if gemm.before is None:
            counters.signal(gemm.cta.written, gemm.schedule.counter(item))


def consume(gemm: Gemm) -> None:
    """All of the CTA's work items."""
    warpgroup, warpgroups_m = gemm.cta.warpgroup, gemm.cta.config.warpgroups_m
    consumer = Consumer(gemm, lax.rem(warpgroup, warpgroups_m), lax.div(warpgroup, warpgroups_m))
    lax.fori_loop(0, gemm.share.num_items, consumer.compute, consumer.prologue(jnp.int32(0)))
