"""Consumer warpgroups: for each work item the prologue, the mainloop over its stages, and the epilogue.

Stages are waited for and released in `Pipeline.consume`, which `Consumer.multiply` calls.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90 import added, tile_mma, transposed
from jmx.pallas.mosaic_sm90.grouped_gemm import Gemm
from jmx.pallas.mosaic_sm90.layout import is_shifted
from jmx.pallas.mosaic_sm90.scheduler import WorkItem
from jmx.pallas.sm90 import accumulator, counters, epilogue
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Stage, finish_reads
from jmx.pallas.sm90.reduction import RowSums
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float32, Int32

Scalar = Int32[Array, ""]
# Up to so many rows a block mma.sync is used, above wgmma. One kernel never uses both, which may round differently.
FEW_ROWS = 32


class Loaded(NamedTuple):
    """What a work item's prologue loads, while the item before it is computed.

    Args:
        item: with this warpgroup's tile.
        x_row, first_row, num_rows: of the block, in the rows read, if these have scales, and in the result.
        exponent, rescale: from `tile_mma.tile_scalars`, of formats with a shift (see `layout`); else None.
        channel_scales, bias: of the thread's first and second row, where the product has them.
        group: of what is added, where something is.
    """

    item: WorkItem
    x_row: Scalar | None
    first_row: Scalar
    num_rows: Scalar
    exponent: Scalar | None
    rescale: Float32[Array, ""] | None
    channel_scales: RowSums | None
    bias: RowSums | None
    group: Scalar | None


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup, the `wm`th along the weight's rows and the `wk`th along its columns."""

    gemm: Gemm
    wm: Scalar
    wk: Scalar

    def prologue(self, turn: Scalar) -> Loaded:
        """Loads what the CTA's `turn`th work item needs beside its stages."""
        gemm, blocks, operands = self.gemm, self.gemm.blocks, self.gemm.operands
        with jax.named_scope("prologue"):
            item = gemm.work_item(turn)
            item = item._replace(tile=item.tile + self.wm)
            expert = blocks.experts[item.block]
            inside = jnp.minimum(item.tile, gemm.schedule.m_tiles - 1)
            exponent, rescale, elements = None, None, gemm.decoder.tile.elements
            if operands.shifts is not None:
                exponent, rescale = tile_mma.block_scalars(operands.shifts[item.block], elements)
            elif is_shifted(gemm.product.format):
                exponent, rescale = tile_mma.tile_scalars(operands.scales, expert, inside, elements)
            channel_scales, bias = (
                None if ref is None else epilogue.load_row(ref, gemm.product.rows, expert, item.tile, operands.order)
                for ref in (operands.channel_scales, operands.bias)
            )
            first_row, num_rows = blocks.first_row(blocks.out_rows, item.block), blocks.count_of(item.block)
            x_row = None if operands.row_scales is None else blocks.first_row(gemm.x_rows, item.block)
            group = None if operands.added is None else operands.added.groups[item.block]
        return Loaded(item, x_row, first_row, num_rows, exponent, rescale, channel_scales, bias, group)

    def compute(self, turn: Scalar, loaded: Loaded) -> Loaded:
        """Computes a work item; returns what the prologue of the next one has loaded."""
        following = self.prologue(turn + 1)

        def multiply() -> None:
            for_width(self.gemm.config.widths, loaded.num_rows, partial(self.multiply, turn, loaded))

        if self.gemm.schedule.num_ctas is None:
            multiply()
        else:
            has_tile = self.wm < loaded.item.tiles
            pl.when(has_tile)(multiply)
            pl.when(~has_tile)(lambda: self.gemm.pipeline.skip(self.gemm.share, turn))
        return following

    def multiply(self, turn: Scalar, loaded: Loaded, width: int) -> None:
        """Mainloop and epilogue of a work item whose block has up to `width` rows."""
        gemm, config, share = self.gemm, self.gemm.config, self.gemm.share
        acc = plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), plgpu.Layout.WGMMA)
        step = self.add_stage_of_few if config.block_n <= FEW_ROWS else self.add_stage
        step = self.add_transposed_stage if gemm.product.transposed else step
        with jax.named_scope("accumulate"):
            acc = gemm.pipeline.consume(share, turn, acc, partial(step, loaded, width))
        sums = accumulator.split_rows(acc)
        if config.warpgroups_k == 1:
            self.finish(loaded, width, sums)
        else:
            again, partial_sums = share.items_before + turn > 0, gemm.shared.partial_sums
            pl.when(self.wk > 0)(lambda: partial_sums.send(self.wm, self.wk, width, sums, again=again))
            pl.when(self.wk == 0)(lambda: self.finish(loaded, width, partial_sums.reduce(self.wm, width, sums)))

    def part_of(self, slot: Scalar, width: int) -> Stage:
        """This warpgroup's tiles in a stage, and the rows that they multiply."""
        k_tiles, stages = self.gemm.config.k_tiles, self.gemm.shared.stages
        first = self.wk * k_tiles

        def tiles(ref: Ref, rows: int = 1) -> Ref:
            return None if ref is None else ref.at[slot, self.wm, pl.ds(first * rows, k_tiles * rows)]

        values, scales = tiles(stages.values, self.gemm.value_rows), tiles(stages.scales)
        zero_points = tiles(stages.zero_points)
        x = stages.x.at[slot, pl.ds(0, width), pl.ds(first * TILE, k_tiles * TILE)]
        return Stage(x=x, values=values, scales=scales, zero_points=zero_points)

    def add_stage_of_few(
        self, loaded: Loaded, width: int, acc: Float32[Array, "64 n"], slot: Scalar
    ) -> Float32[Array, "64 n"]:
        """`acc` plus a stage's tiles times few rows, by mma.sync."""
        stage = self.part_of(slot, width)
        for i in range(self.gemm.config.k_tiles):
            acc = tile_mma.multiply_few(acc, self.gemm.decoder, stage, loaded.exponent, i)
        finish_reads()
        return acc

    def add_stage(
        self, loaded: Loaded, width: int, acc: Float32[Array, "64 n"], slot: Scalar
    ) -> Float32[Array, "64 n"]:
        """`acc` plus a stage's tiles times rows, by wgmma, which runs while the next half tile is dequantized."""
        stage = self.part_of(slot, width)
        for i in range(self.gemm.config.k_tiles):
            halves = tile_mma.dequantize(self.gemm.decoder, stage, loaded.exponent, i)
            for half, a in enumerate(halves):
                acc = tile_mma.multiply(acc, a, stage.x, i, half)
                accumulator.wait_for_earlier_products()
        return tile_mma.wait_for_product(acc)

    def add_transposed_stage(
        self, loaded: Loaded, width: int, acc: Float32[Array, "64 n"], slot: Scalar
    ) -> Float32[Array, "64 n"]:
        """`acc` plus a stage's transposed tiles times rows, by wgmma, as in `add_stage`."""
        gemm, stages, k_tiles = self.gemm, self.gemm.shared.stages, self.gemm.config.k_tiles
        first = self.wk * k_tiles
        x = stages.x.at[slot, pl.ds(0, width), pl.ds(first * TILE, k_tiles * TILE)]
        for i in range(k_tiles):
            values, scales, zero_points = (
                None if ref is None else ref.at[slot, first + i, pl.ds(self.wm * rows, rows)]
                for ref, rows in ((stages.values, gemm.value_rows), (stages.scales, 1), (stages.zero_points, 1))
            )
            tile = Stage(values=values, scales=scales, zero_points=zero_points)
            for half, a in enumerate(transposed.dequantize(gemm.decoder, tile, loaded.exponent)):
                acc = tile_mma.multiply(acc, a, x, i, half)
                accumulator.wait_for_earlier_products()
        return tile_mma.wait_for_product(acc)

    @jax.named_scope("epilogue")
    def finish(self, loaded: Loaded, width: int, sums: RowSums) -> None:
        """The epilogue: rescales the sums, applies scales, adds bias and `added`, applies the activation, stores the
        results and signals them."""
        gemm, item, product = self.gemm, loaded.item, self.gemm.product
        rescale = 2.0**gemm.decoder.rescale_exponent if loaded.rescale is None else loaded.rescale
        outs = [total * rescale for total in sums]
        if loaded.channel_scales is not None:
            outs = [out * epilogue.repeat(row, width) for out, row in zip(outs, loaded.channel_scales, strict=True)]
        if loaded.x_row is not None:
            outs = epilogue.times_columns(outs, gemm.operands.row_scales, loaded.x_row, loaded.num_rows)
        if loaded.bias is not None:
            once = jnp.where(item.part == 0, jnp.float32(1), jnp.float32(0))
            outs = [out + epilogue.repeat(row, width) * once for out, row in zip(outs, loaded.bias, strict=True)]
        if loaded.group is not None:
            place = item.tile, loaded.first_row, loaded.num_rows
            outs = added.add(outs, gemm.operands.added, product.rows, loaded.group, *place)
        if product.activation is not None:
            gated = product.rows.gate_up_order is not None
            outs = [product.activation(*outs)] if gated else [product.activation(out) for out in outs]
        first = item.part * gemm.num_rows + loaded.first_row
        outs = [out.astype(product.dtype) for out in outs]
        if gemm.tile_rounder is not None:
            outs = gemm.tile_rounder.round(outs)
        epilogue.store(gemm.out, outs, product.stored, item.tile, first, loaded.num_rows)
        if gemm.is_read and gemm.row_rounder is None:
            counters.signal(gemm.written, gemm.schedule.counter(item))


def consume(gemm: Gemm) -> None:
    """Computes all of the CTA's work items, after rounding its share of the rows if that is part of the launch."""
    warpgroup, warpgroups_m = gemm.warpgroup, gemm.config.warpgroups_m
    consumer = Consumer(gemm, lax.rem(warpgroup, warpgroups_m), lax.div(warpgroup, warpgroups_m))
    first = consumer.prologue(jnp.int32(0))
    if gemm.row_rounder is not None and not gemm.is_read:
        maxima = gemm.shared.warp_maxima.at[warpgroup]
        gemm.row_rounder.round_share(warpgroup, gemm.config.num_warpgroups, gemm.share.num_ctas, maxima)
    lax.fori_loop(0, gemm.share.num_items, consumer.compute, first)
    if gemm.row_rounder is not None and gemm.is_read:
        gemm.row_rounder.signal_written()
