"""Grouped product of rows with MXFP4 weights on Hopper, in Pallas Mosaic GPU: one kernel from 1 row to many thousands.

The result is computed transposed: tiles of weight rows are the tensor cores' A, dequantised into registers on the way,
and a block of at most 256 rows of one expert is their B. So ragged groups meet the axis that is cut by 8. Blocks of up
to 32 rows are multiplied by mma.sync, larger ones by wgmma.

Every multiprocessor runs one block of threads for good, which takes every so manieth item of work: a block of rows by
`warpgroups_m` tiles of weight rows. One warp fetches (TMA) weights and rows into a ring of stages, across items; the
warpgroups that compute wait for a stage, dequantise, multiply, and give it back once the next one's product has begun.

    fetch     | W0 X0 | W1 X1 | W2 X2 | ...                    full[slot] -->
    compute   | wait 0 | dequantise 0 | wgmma 0 | wait 1 | dequantise 1 (under wgmma 0) | wgmma 1 | ...  --> empty[slot]

See docs/mosaic_sm90.md for a drawing and for what bounds it.
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

from jmx.formats import BlockScaled
from jmx.grouping import Blocks
from jmx.pallas import mosaic_sm90_fragments as fragments
from jmx.pallas.mosaic_sm90_config import Tiles, widths
from jmx.pallas.mosaic_sm90_fragments import Rows
from jmx.pallas.mosaic_sm90_layout import SCALE_BYTES, TILE, VALUE_SHAPE

Array = Any
_FETCH_REGISTERS = 40
FEW_ROWS = 32  # a block; up to here mma.sync, beyond wgmma. Never both in one kernel: they need not round alike
PREFETCH_BYTES = 192 * 1024  # a core: together they take about half of an H200's L2


@dataclass(frozen=True)
class _Schedule:
    """How the work of one product is cut into items: blocks of rows by steps along the weight's rows by parts of its
    columns, the last running fastest."""

    tiles: Tiles
    m_tiles: int
    k_tiles: int

    @classmethod
    def of(cls, weight: BlockScaled, tiles: Tiles) -> "_Schedule":
        return cls(tiles, weight.values.shape[1], weight.scales.shape[2] - 1)

    @property
    def k_steps(self) -> int:
        """Stages of an item."""
        return pl.cdiv(self.k_tiles, self.tiles.stage_tiles * self.tiles.split_k)

    @property
    def per_block(self) -> int:
        """Items of a block of rows."""
        return self._m_steps * self.tiles.split_k

    @property
    def _m_steps(self) -> int:
        return pl.cdiv(self.m_tiles, self.tiles.warpgroups_m)

    def place(self, item: Array) -> tuple[Array, Array, Array]:
        """(block of rows, first tile of the weight's rows, part of its columns) of an item."""
        part, item = lax.rem(item, self.tiles.split_k), lax.div(item, self.tiles.split_k)
        return lax.div(item, self._m_steps), lax.rem(item, self._m_steps) * self.tiles.warpgroups_m, part

    def first_tile(self, part: Array, step: Array) -> Array:
        """The first tile of the columns that a part's `step`th stage holds."""
        return (part * self.k_steps + step) * self.tiles.stage_tiles

    def stage(self, weight: BlockScaled, expert: Array, tile: Array, k: Array) -> BlockScaled:
        """What of a weight in global memory one stage takes. Past the weight's end TMA writes zeros."""
        m = pl.ds(tile, self.tiles.warpgroups_m)
        values = pl.ds(k * VALUE_SHAPE[0], self.tiles.stage_tiles * VALUE_SHAPE[0])
        return BlockScaled(
            weight.values.at[expert, m, values], weight.scales.at[expert, m, pl.ds(k, self.tiles.stage_tiles)]
        )


class Following(NamedTuple):
    """The weight of the product that comes after, on the same blocks, and its tiles."""

    weight: BlockScaled
    tiles: Tiles


class _Item(NamedTuple):
    """One piece of work as a computing warpgroup sees it: known before the item before it is done."""

    tile: Array
    part: Array  # of the columns, where these are split
    first: Array
    count: Array
    exponent: Array
    raised: Array
    bias: tuple[Array, Array] | None


def grouped_product(
    x: Array,
    weight: BlockScaled,
    bias: Array | None,
    blocks: Blocks,
    *,
    rows: Rows,
    tiles: Tiles,
    block_n: int,
    num_rows: int,
    dtype: Any,
    activation: Callable[..., Array] | None,
    num_cores: int,
    following: Following | None = None,
) -> jax.Array:
    """x @ weight[expert].T + bias[expert] and the activation, for each block of rows.

    Args:
        x: bfloat16 (X, K), K the weight's columns and a multiple of 64; blocks may read past its end.
        weight: in the layout `mosaic_sm90`, with one leading axis of experts.
        bias: (E, N) or None.
        blocks: `x_rows` are multiples of 8. All blocks must name an expert that there is; only the first `num_blocks`,
            an int or here (B,), the same number throughout, are computed.
        rows: what the weight's rows are.
        num_rows: R, rows of the result. Rows that no block names are left as they are: they may hold anything.
        dtype: of the result.
        activation: of float32 (gate, up), or (x,) where there is no gate; None for none.
        num_cores: multiprocessors to run on.
        following: what each core begins to bring into L2 when it has nothing else to fetch, while others still compute
            and the next kernel starts.

    Returns:
        (split_k * R, rows.num_outputs): the parts' sums one below the other.
    """
    schedule = _Schedule.of(weight, tiles)
    k_steps, num_compute, num_stages = schedule.k_steps, tiles.num_warpgroups, tiles.num_stages
    max_items = blocks.experts.shape[0] * schedule.per_block

    def for_width(count: Array, function: Callable[[int], None]) -> None:
        """Calls `function` with the width that holds `count` rows: once, whatever `count` is."""
        *below, last = widths(block_n)
        for lower, width in zip([-1, *below], below, strict=False):
            pl.when((count > lower) & (count <= width))(partial(function, width))
        pl.when(count > (below[-1] if below else -1))(partial(function, last))

    def body(*refs: Any) -> None:
        x_g, *rest = refs
        weight_g, rest = BlockScaled(*rest[:2]), rest[2:]
        bias_g = None if bias is None else rest.pop(0)
        following_g = None if following is None else BlockScaled(rest.pop(0), rest.pop(0))
        work = Blocks(rest.pop(0), *(field if isinstance(field, int) else rest.pop(0) for field in blocks[1:]))
        out_g, x_s, values_s, scales_s, sums_s, full, empty, sums_full, sums_empty = rest
        warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
        num_blocks = work.num_blocks if isinstance(work.num_blocks, int) else work.num_blocks[0]
        num_items = num_blocks * schedule.per_block
        num_mine = lax.div(num_items - core + (num_cores - 1), num_cores)

        def first_row(rows: Any, block: Array) -> Array:
            return block * rows if isinstance(rows, int) else rows[block]

        def count_of(block: Array) -> Array:
            return jnp.int32(work.counts) if isinstance(work.counts, int) else work.counts[block]

        def place(turn: Array) -> tuple[Array, Array, Array]:
            """Where this core's items are; so that it can be asked early, past the end it is where something is."""
            return schedule.place(jnp.minimum(core + turn * num_cores, max_items - 1))

        @pl.when(warpgroup < num_compute)
        def _() -> None:
            plgpu.set_max_registers(tiles.registers, action="increase")
            wm, wk = lax.rem(warpgroup, tiles.warpgroups_m), lax.div(warpgroup, tiles.warpgroups_m)

            def look_up(turn: Array) -> _Item:
                block, tile, part = place(turn)
                expert, tile = work.experts[block], tile + wm
                inside = jnp.minimum(tile, schedule.m_tiles - 1)
                exponent, raised = fragments.tile_scalars(weight_g.scales, expert, inside)
                loaded = None if bias_g is None else fragments.load_bias(bias_g, rows, expert, tile)
                first, count = first_row(work.out_rows, block), count_of(block)
                return _Item(tile, part, first, count, exponent, raised, loaded)

            def compute(turn: Array, item: _Item) -> _Item:
                following = look_up(turn + 1)
                for_width(item.count, partial(product, turn, item))
                return following

            def product(turn: Array, item: _Item, width: int) -> None:
                if block_n <= FEW_ROWS:
                    acc = accumulate_few(turn, item, width)
                else:
                    ref = plgpu.WGMMAAccumulatorRef((TILE, width))
                    acc = pl.run_scoped(partial(accumulate, turn, item, width), ref)
                sums = fragments.split_rows(acc)
                if tiles.warpgroups_k == 1:
                    finish(item, width, sums)
                else:
                    pl.when(wk > 0)(partial(hand_over, turn, width, sums))
                    pl.when(wk == 0)(lambda: finish(item, width, take_over(width, sums)))

            def slot_of(turn: Array, step: Array) -> Array:
                return lax.rem(turn * k_steps + step, num_stages)

            def tile_of(slot: Array, i: int) -> tuple[Any, Any, Any]:
                """Values and scales of the warpgroup's `i`th tile in a stage, and the rows they multiply."""
                k = wk * tiles.k_tiles + i
                values = values_s.at[slot, wm, pl.ds(k * VALUE_SHAPE[0], VALUE_SHAPE[0])]
                return values, scales_s.at[slot, wm, k], x_s.at[slot, :, pl.ds(k * TILE, TILE)]

            def accumulate_few(turn: Array, item: _Item, width: int) -> Array:
                def stage(step: Array, acc: Array) -> Array:
                    slot = slot_of(turn, step)
                    plgpu.barrier_wait(full.at[slot])
                    for i in range(tiles.k_tiles):
                        values, scales, x = tile_of(slot, i)
                        acc = fragments.multiply_few(acc, values, scales, item.exponent, x.at[pl.ds(0, width)])
                    plgpu.barrier_arrive(empty.at[slot])
                    return acc

                zeros = plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), plgpu.Layout.WGMMA)
                return lax.fori_loop(0, k_steps, stage, zeros)

            def accumulate(turn: Array, item: _Item, width: int, acc: Any) -> Array:
                def dequantize(slot: Array, i: int) -> Array:
                    values, scales, _ = tile_of(slot, i)
                    return fragments.dequantize(values, scales, item.exponent)

                def multiply(step: Array, a: Array) -> Array:
                    slot, next_slot = slot_of(turn, step), slot_of(turn, step + 1)
                    for i in range(tiles.k_tiles):
                        last = i + 1 == tiles.k_tiles
                        if last:
                            pl.when(step + 1 < k_steps)(lambda: plgpu.barrier_wait(full.at[next_slot]))
                        plgpu.wgmma(acc, a, tile_of(slot, i)[2].at[pl.ds(0, width)].T)
                        # From here to the wait no branch: ptxas would forget that wgmma still reads `a`, and give its
                        # registers away. With one tile a step the branch of the loop is there, so the wait comes first.
                        # (After the last step something is dequantised that nobody uses.)
                        if tiles.k_tiles == 1:
                            plgpu.wgmma_wait(0)
                        a = dequantize(next_slot, 0) if last else dequantize(slot, i + 1)
                        if tiles.k_tiles > 1:
                            plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])
                    return a

                begin = slot_of(turn, jnp.int32(0))
                plgpu.barrier_wait(full.at[begin])
                lax.fori_loop(0, k_steps, multiply, dequantize(begin, 0))
                return acc[...]

            def hand_over(turn: Array, width: int, sums: tuple[Array, Array]) -> None:
                @pl.when(turn > 0)
                def _() -> None:
                    plgpu.barrier_wait(sums_empty.at[wm])

                for row in range(2):
                    sums_s[wm, wk - 1, row, pl.ds(0, fragments.row_size(width))] = sums[row]
                plgpu.barrier_arrive(sums_full.at[wm])

            def take_over(width: int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
                plgpu.barrier_wait(sums_full.at[wm])
                size = fragments.row_size(width)
                totals = list(sums)
                for other in range(tiles.warpgroups_k - 1):
                    for row in range(2):
                        totals[row] += fragments.load_rows(sums_s.at[wm, other, row, pl.ds(0, size)], size)
                plgpu.barrier_arrive(sums_empty.at[wm])
                return totals[0], totals[1]

            def finish(item: _Item, width: int, sums: tuple[Array, Array]) -> None:
                outs = [total * item.raised for total in sums]
                if item.bias is not None:
                    once = jnp.where(item.part == 0, jnp.float32(1), jnp.float32(0))
                    outs = [out + fragments.repeat(row, width) * once for out, row in zip(outs, item.bias, strict=True)]
                if activation is not None:
                    gated = rows.gate_up_order is not None
                    outs = [activation(*outs)] if gated else [activation(out) for out in outs]
                first = item.part * num_rows + item.first
                outs = [out.astype(dtype) for out in outs]
                fragments.store(out_g, outs, rows, item.tile, first, item.count)

            lax.fori_loop(0, num_mine, compute, look_up(jnp.int32(0)))

        def fetch() -> None:
            @pl.loop(0, num_mine)
            def _(turn: Array) -> None:
                block, tile, part = place(turn)
                expert, first, count = work.experts[block], first_row(work.x_rows, block), count_of(block)

                @pl.loop(0, k_steps)
                def _(step: Array) -> None:
                    total, k = turn * k_steps + step, schedule.first_tile(part, step)
                    slot = lax.rem(total, num_stages)

                    @pl.when(total >= num_stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    values, scales = schedule.stage(weight_g, expert, tile, k)
                    plgpu.copy_gmem_to_smem(values, values_s.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(scales, scales_s.at[slot], full.at[slot])

                    def fetch_rows(width: int) -> None:
                        columns = pl.ds(k * TILE, tiles.stage_tiles * TILE)
                        here = x_g.at[pl.ds(lax.div(first, 8) * 8, width), columns]  # rows by 8, for TMA to see
                        plgpu.copy_gmem_to_smem(here, x_s.at[slot, pl.ds(0, width)], full.at[slot])

                    for_width(count, fetch_rows)

        def prefetch(following: Following, weight_g: BlockScaled) -> None:
            after = _Schedule.of(*following)
            item_bytes = after.k_steps * following.tiles.stage_bytes(0)

            @pl.loop(0, max(1, PREFETCH_BYTES // item_bytes))
            def _(turn: Array) -> None:
                item = core + turn * num_cores
                block, tile, part = after.place(item)

                @pl.when(item < num_blocks * after.per_block)
                def _() -> None:
                    expert = work.experts[block]

                    @pl.loop(0, after.k_steps)
                    def _(step: Array) -> None:
                        for ref in after.stage(weight_g, expert, tile, after.first_tile(part, step)):
                            plgpu.async_prefetch(ref)

        @pl.when(warpgroup == num_compute)
        def _() -> None:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == 0)
                def _() -> None:
                    fetch()
                    if following is not None and following_g is not None:
                        prefetch(following, following_g)

    swizzled: Any = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
    stage = (num_stages, tiles.warpgroups_m)
    others = max(1, tiles.warpgroups_k - 1)
    sums = (tiles.warpgroups_m, others, 2, fragments.row_size(block_n)) if tiles.warpgroups_k > 1 else (1, 1, 1, 128)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles.split_k * num_rows, rows.num_outputs), dtype),
        grid=(num_cores,),
        grid_names=("core",),
        num_threads=num_compute + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((num_stages, block_n, tiles.stage_tiles * TILE), x.dtype, transforms=swizzled),
            plgpu.SMEM((*stage, tiles.stage_tiles * VALUE_SHAPE[0], VALUE_SHAPE[1]), jnp.uint8),
            plgpu.SMEM((*stage, tiles.stage_tiles, SCALE_BYTES), jnp.uint8),
            plgpu.SMEM(sums, jnp.float32),
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=3),
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_compute),
            plgpu.Barrier(num_barriers=tiles.warpgroups_m, num_arrivals=others),
            plgpu.Barrier(num_barriers=tiles.warpgroups_m),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,  # every hand-over of shared memory has a barrier of its own
        ),
    )
    operands = [x, *weight] + ([] if bias is None else [bias]) + ([] if following is None else [*following.weight])
    return kernel(*operands, *(field for field in blocks if not isinstance(field, int)))
