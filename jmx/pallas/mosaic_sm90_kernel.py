"""Grouped product of rows with MXFP4 weights on Hopper, in Pallas Mosaic GPU: one kernel from 1 row to many thousands.

The result is computed transposed: tiles of weight rows are wgmma's A, dequantised into registers on the way, and a
block of at most 256 rows of one expert is its B. So ragged groups meet the axis that wgmma cuts by 8.

Every multiprocessor runs one block of threads for good, which takes every so manieth item of work: a block of rows by
`warpgroups_m` tiles of weight rows. One warp fetches (TMA) weights and rows into a ring of stages, across items; the
warpgroups that compute wait for a stage, dequantise, multiply, and give it back once the next one's product has begun.

    fetch     | W0 X0 | W1 X1 | W2 X2 | ...                    full[slot] -->
    compute   | wait 0 | dequantise 0 | wgmma 0 | wait 1 | dequantise 1 (under wgmma 0) | wgmma 1 | ...  --> empty[slot]

See docs/mosaic_sm90.md for a drawing and for what bounds it.
"""

from collections.abc import Callable
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
) -> jax.Array:
    """x @ weight[expert].T + bias[expert] and the activation, for each block of rows.

    Args:
        x: bfloat16 (X, K), K the weight's columns and a multiple of 64; blocks may read past its end.
        weight: in the layout `mosaic_sm90`, with one leading axis of experts.
        bias: (E, N) or None.
        blocks: `x_rows` are multiples of 8. All blocks must name an expert that there is; only the first `num_blocks`,
            here (B,) the same number throughout, are computed.
        rows: what the weight's rows are.
        num_rows: R, rows of the result. Rows that no block names are left as they are: they may hold anything.
        dtype: of the result.
        activation: of float32 (gate, up), or (x,) where there is no gate; None for none.
        num_cores: multiprocessors to run on.

    Returns:
        (split_k * R, rows.num_outputs): the parts' sums one below the other.
    """
    _, m_tiles, _, _ = weight.values.shape
    k_tiles = weight.scales.shape[2] - 1
    m_steps = pl.cdiv(m_tiles, tiles.warpgroups_m)
    k_steps = pl.cdiv(k_tiles, tiles.stage_tiles * tiles.split_k)
    num_compute, num_stages = tiles.num_warpgroups, tiles.num_stages
    fp32 = jnp.float32

    def for_width(count: Array, function: Callable[[int], None]) -> None:
        """Calls `function` with the width that holds `count` rows."""
        below = 0
        for width in widths(block_n):
            pl.when((count > below) & (count <= width))(partial(function, width))
            below = width

    def body(*refs: Any) -> None:
        x_g, values_g, scales_g, *rest = refs
        bias_g = None if bias is None else rest.pop(0)
        *work_g, out_g, x_s, values_s, scales_s, sums_s, full, empty, sums_full, sums_empty = rest
        work = Blocks(*work_g)
        warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
        num_items = work.num_blocks[0] * (m_steps * tiles.split_k)
        num_mine = lax.div(num_items - core + (num_cores - 1), num_cores)

        def find(turn: Array) -> tuple[Array, Array, Array]:
            """(block, step along the weight's rows, part of the columns) of this core's items."""
            item = jnp.minimum(core + turn * num_cores, jnp.maximum(num_items - 1, 0))
            part = lax.rem(item, tiles.split_k)
            item = lax.div(item, tiles.split_k)
            return lax.div(item, m_steps), lax.rem(item, m_steps), part

        @pl.when(warpgroup < num_compute)
        def _() -> None:
            plgpu.set_max_registers(tiles.registers, action="increase")
            wm, wk = lax.rem(warpgroup, tiles.warpgroups_m), lax.div(warpgroup, tiles.warpgroups_m)

            def look_up(turn: Array) -> _Item:
                block, step, part = find(turn)
                tile = step * tiles.warpgroups_m + wm
                expert = work.experts[block]
                exponent, raised = fragments.tile_scalars(scales_g, expert, jnp.minimum(tile, m_tiles - 1))
                loaded = None if bias_g is None else fragments.load_bias(bias_g, rows, expert, tile)
                return _Item(tile, part, work.out_rows[block], work.counts[block], exponent, raised, loaded)

            def compute(turn: Array, item: _Item) -> _Item:
                following = look_up(turn + 1)
                for_width(item.count, partial(product, turn, item))
                return following

            def product(turn: Array, item: _Item, width: int) -> None:
                acc = pl.run_scoped(partial(accumulate, turn, item, width), plgpu.WGMMAAccumulatorRef((TILE, width)))
                sums = fragments.split_rows(acc)
                if tiles.warpgroups_k == 1:
                    finish(item, width, sums)
                else:
                    pl.when(wk > 0)(partial(hand_over, turn, width, sums))
                    pl.when(wk == 0)(lambda: finish(item, width, take_over(width, sums)))

            def accumulate(turn: Array, item: _Item, width: int, acc: Any) -> Array:
                def slot_of(step: Array) -> Array:
                    return lax.rem(turn * k_steps + step, num_stages)

                def dequantize(slot: Array, i: int) -> Array:
                    k = wk * tiles.k_tiles + i
                    values = values_s.at[slot, wm, pl.ds(k * VALUE_SHAPE[0], VALUE_SHAPE[0])]
                    return fragments.dequantize(values, scales_s.at[slot, wm, k], item.exponent)

                def multiply(step: Array, a: Array) -> Array:
                    slot, next_slot = slot_of(step), slot_of(step + 1)
                    for i in range(tiles.k_tiles):
                        last = i + 1 == tiles.k_tiles
                        if last:
                            pl.when(step + 1 < k_steps)(lambda: plgpu.barrier_wait(full.at[next_slot]))
                        plgpu.wgmma(acc, a, x_s.at[slot, wk * tiles.k_tiles + i, pl.ds(0, width)].T)
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

                plgpu.barrier_wait(full.at[slot_of(jnp.int32(0))])
                lax.fori_loop(0, k_steps, multiply, dequantize(slot_of(jnp.int32(0)), 0))
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
                    once = jnp.where(item.part == 0, fp32(1), fp32(0))
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
                block, m_step, part = find(turn)
                expert, first, count = work.experts[block], work.x_rows[block], work.counts[block]

                @pl.loop(0, k_steps)
                def _(step: Array) -> None:
                    total = turn * k_steps + step
                    slot = lax.rem(total, num_stages)

                    @pl.when(total >= num_stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    # Past the end of the weight TMA writes zeros.
                    m, k = m_step * tiles.warpgroups_m, (part * k_steps + step) * tiles.stage_tiles
                    here = values_g.at[
                        expert,
                        pl.ds(m, tiles.warpgroups_m),
                        pl.ds(k * VALUE_SHAPE[0], tiles.stage_tiles * VALUE_SHAPE[0]),
                    ]
                    plgpu.copy_gmem_to_smem(here, values_s.at[slot], full.at[slot])
                    here = scales_g.at[expert, pl.ds(m, tiles.warpgroups_m), pl.ds(k, tiles.stage_tiles)]
                    plgpu.copy_gmem_to_smem(here, scales_s.at[slot], full.at[slot])

                    def fetch_rows(width: int) -> None:
                        for i in range(tiles.stage_tiles):
                            here = x_g.at[pl.ds(lax.div(first, 8) * 8, width), pl.ds((k + i) * TILE, TILE)]
                            plgpu.copy_gmem_to_smem(here, x_s.at[slot, i, pl.ds(0, width)], full.at[slot])

                    for_width(count, fetch_rows)

        @pl.when(warpgroup == num_compute)
        def _() -> None:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                pl.when(warp == 0)(fetch)

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
            plgpu.SMEM((num_stages, tiles.stage_tiles, block_n, TILE), x.dtype, transforms=swizzled),
            plgpu.SMEM((*stage, tiles.stage_tiles * VALUE_SHAPE[0], VALUE_SHAPE[1]), jnp.uint8),
            plgpu.SMEM((*stage, tiles.stage_tiles, SCALE_BYTES), jnp.uint8),
            plgpu.SMEM(sums, fp32),
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=2 + tiles.stage_tiles),
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
    operands = [x, *weight] + ([] if bias is None else [bias])
    return kernel(*operands, *blocks)
