"""The experts' two products on Hopper, in one Pallas Mosaic GPU kernel: from 1 row to many thousands.

For each block of rows of one expert it computes h = activation(gate_up @ x + bias) and then down @ h + bias. Results
are computed transposed: tiles of weight rows are the tensor cores' A, dequantised into registers on the way, and a
block of at most 256 rows is their B. So ragged groups meet the axis that is cut by 8. Blocks of up to 32 rows are
multiplied by mma.sync, larger ones by wgmma.

Every multiprocessor runs one block of threads for good, which takes every so manieth item of work: a block of rows by
`warpgroups_m` tiles of weight rows. One warp fetches (TMA) weights and another one rows into a ring of stages, across
items; the warpgroups that compute wait for a stage, dequantise, multiply, and give it back.

    weights   | W0 | W1 | W2 | ...                             full[slot] -->
    rows      | X0 | X1 | X2 | ...                             full[slot] -->
    compute   | wait 0 | dequantise 0 | wgmma 0 | wait 1 | dequantise 1 (under wgmma 0) | wgmma 1 | ...  --> empty[slot]

The second product of a block needs all of the first one's rows of h. A counter a block tells when these are written:
only the warp that fetches rows waits for that, while the ring fills with weights. So memory is never idle in between.

See docs/mosaic_sm90.md for a drawing and for what bounds it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.numerics.formats import MXFP4
from jmx.pallas.mosaic_sm90 import tile_mma
from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.mosaic_sm90.dequantize import decoder_of
from jmx.pallas.mosaic_sm90.layout import Tile
from jmx.pallas.mosaic_sm90.scheduler import Place, Schedule, schedules
from jmx.pallas.mosaic_sm90.tile_mma import Weights
from jmx.pallas.sm90 import accumulator, counters, epilogue
from jmx.pallas.sm90.gemm import BaseProduct
from jmx.pallas.sm90.launch import for_width, launch
from jmx.pallas.sm90.reduction import Sums
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE

Array = Any
_FETCH_REGISTERS = 40
FEW_ROWS = 32  # a block; up to here mma.sync, beyond wgmma. Never both in one kernel: they need not round alike


@dataclass(frozen=True)
class Product(BaseProduct):
    """One of the two products; see `BaseProduct`.

    Args:
        order: int32 (E, outputs), in whose place each output is in `bias` and in scales of whole rows; None: its own.
    """

    order: Array | None = None


class _Operands(NamedTuple):
    """A product's arrays as the kernel takes them, or refs of them; None for what there is not."""

    values: Any
    scales: Any  # that come by the tile
    zero_points: Any
    by_row: Any  # scales (E, N) or (E, N, 1), which the epilogue multiplies by
    bias: Any
    order: Any  # where there is one of these two

    @classmethod
    def of(cls, product: Product) -> "_Operands":
        q, of_blocks = product.weight, Tile.of(product.format).scales > 0
        scales, by_row = (q.scales, q.global_scales) if of_blocks else (None, q.scales)
        order = None if by_row is None and product.bias is None else product.order
        return cls(q.values, scales, q.zero_points, by_row, product.bias, order)

    @property
    def by_tile(self) -> Weights:
        return Weights(self.values, self.scales, self.zero_points)


class _Phase(NamedTuple):
    """A product as the threads of one multiprocessor see it: its refs in global memory, and this core's share."""

    product: Product
    schedule: Schedule
    refs: _Operands
    x: Any
    out: Any
    x_rows: Any
    before: Schedule | None  # of the product that gives `x`
    first_item: Array  # of this core, which then takes every `num_cores`th
    num_mine: Array
    stages_before: Array  # that this core has gone through in the products before
    items_before: Array


class _Item(NamedTuple):
    """One piece of work as a computing warpgroup sees it: known before the item before it is done."""

    place: Place  # whose tile is this warpgroup's own
    expert: Array
    first: Array
    count: Array
    exponent: Array | None
    raised: Array | None
    by_row: tuple[Array, Array] | None
    bias: tuple[Array, Array] | None


def expert_products(
    x: Array,
    gate_up: Product,
    down: Product,
    blocks: Blocks,
    *,
    config: Config,
    num_rows: int,
    num_cores: int,
) -> jax.Array:
    """Both products of each block of rows.

    Args:
        x: bfloat16 (X, K), K the columns of `gate_up` and a multiple of 64; blocks may read past its end.
        gate_up, down: see `Product`. What the first one gives has as many columns as the second one's weight.
        blocks: `x_rows` are multiples of 8. All blocks must name an expert that there is; only the first `num_blocks`,
            an int or here (B,), the same number throughout, are computed.
        num_rows: R, rows of the result. Rows that no block names are left as they are: they may hold anything.
        num_cores: multiprocessors to run on, all of them at once: cores wait for what others have written of h.

    Returns:
        (config.split_k * R, down.rows.num_outputs): the parts' sums one below the other.
    """
    products = (gate_up, down)
    tile, decoder = Tile.of(gate_up.format), decoder_of(gate_up.format, gate_up.weight.scales.dtype)
    tiles = [
        (values.shape[1], values.shape[2] // tile.value_rows) for values in (gate_up.weight.values, down.weight.values)
    ]
    tile_columns = TILE if gate_up.rows.gate_up_order is None else GATED_ROWS
    both = schedules(config, tiles[0], tiles[1], tile_columns, blocks.experts.size)
    num_compute, num_stages, block_n = config.num_warpgroups, config.num_stages, config.block_n
    few = block_n <= FEW_ROWS
    outputs = [
        jax.ShapeDtypeStruct((schedule.num_parts * num_rows, product.rows.num_outputs), product.dtype)
        for product, schedule in zip(products, both, strict=True)
    ]

    def body(*refs: Any) -> None:
        rest = [*refs]
        x_g = rest.pop(0)
        of_products = [operands._make(None if one is None else rest.pop(0) for one in operands) for operands in given]
        work = blocks.taken_from(rest)
        written, h_g, out_g, x_s, *rest = rest
        weights_s = Weights(*(None if stage is None else rest.pop(0) for stage in stages))
        sums_s, full, empty, *barriers = rest
        shared_sums = Sums(sums_s, *barriers)
        warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
        num_blocks = work.number

        def phases() -> Iterator[_Phase]:
            """The first product's items go round the cores, and the second one's go on from where those ended."""
            first_item, stages, items, before = core, jnp.int32(0), jnp.int32(0), None
            for product, schedule, refs, x, out, x_rows in zip(
                products, both, of_products, (x_g, h_g), (h_g, out_g), (work.x_rows, work.out_rows), strict=True
            ):
                num_items = schedule.num_items(num_blocks)
                num_mine = lax.div(num_items - first_item + (num_cores - 1), num_cores)
                share = (first_item, num_mine, stages, items)
                yield _Phase(product, schedule, refs, x, out, x_rows, before, *share)
                first_item += num_mine * num_cores - num_items
                stages, items = stages + num_mine * schedule.k_steps, items + num_mine
                before = schedule

        def place(phase: _Phase, turn: Array) -> Place:
            """Where this core's items are."""
            return phase.schedule.place(phase.first_item + turn * num_cores, num_blocks)

        def first_slot(phase: _Phase, turn: Array) -> Array:
            return lax.rem(phase.stages_before + turn * phase.schedule.k_steps, num_stages)

        def after(slot: Array) -> Array:
            return jnp.where(slot + 1 == num_stages, 0, slot + 1)

        def compute(phase: _Phase) -> None:
            product, schedule, refs = phase.product, phase.schedule, phase.refs
            k_steps, rows, activation = schedule.k_steps, product.rows, product.activation
            wm, wk = lax.rem(warpgroup, config.warpgroups_m), lax.div(warpgroup, config.warpgroups_m)

            def look_up(turn: Array) -> _Item:
                at = place(phase, turn)
                at = at._replace(tile=at.tile + wm)
                expert = work.experts[at.block]
                inside = jnp.minimum(at.tile, schedule.m_tiles - 1)
                exponent = raised = None
                if product.format == MXFP4:
                    exponent, raised = tile_mma.tile_scalars(refs.scales, expert, inside)
                by_row, bias = (
                    None if ref is None else epilogue.load_row(ref, rows, expert, at.tile, refs.order)
                    for ref in (refs.by_row, refs.bias)
                )
                first, count = work.first_row(work.out_rows, at.block), work.count_of(at.block)
                return _Item(at, expert, first, count, exponent, raised, by_row, bias)

            def compute_item(turn: Array, item: _Item) -> _Item:
                following = look_up(turn + 1)
                for_width(config.widths, item.count, partial(multiply, turn, item))
                return following

            def multiply(turn: Array, item: _Item, width: int) -> None:
                acc = plgpu.layout_cast(jnp.zeros((TILE, width), jnp.float32), plgpu.Layout.WGMMA)
                acc = (accumulate_few if few else accumulate)(turn, item, width, acc)
                sums = accumulator.split_rows(acc)
                if config.warpgroups_k == 1:
                    finish(item, width, sums)
                else:
                    again = phase.items_before + turn > 0
                    pl.when(wk > 0)(lambda: shared_sums.hand_over(wm, wk, width, sums, again=again))
                    pl.when(wk == 0)(lambda: finish(item, width, shared_sums.take_over(wm, width, sums)))

            def share(slot: Array, width: int) -> tuple[Weights, Any]:
                """The warpgroup's tiles in a stage, and the rows that they multiply."""
                first = wk * config.k_tiles
                tiles = [
                    None if ref is None else ref.at[slot, wm, pl.ds(first * rows, config.k_tiles * rows)]
                    for ref, rows in zip(weights_s, rows_of_tile, strict=True)
                ]
                return Weights(*tiles), x_s.at[slot, pl.ds(0, width), pl.ds(first * TILE, config.k_tiles * TILE)]

            def accumulate_few(turn: Array, item: _Item, width: int, acc: Array) -> Array:
                def stage(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                    acc, slot = carry
                    plgpu.barrier_wait(full.at[slot])
                    weights, x = share(slot, width)
                    for i in range(config.k_tiles):
                        acc = tile_mma.multiply_few(acc, decoder, weights, item.exponent, x, i)
                    plgpu.barrier_arrive(empty.at[slot])
                    return acc, after(slot)

                return lax.fori_loop(0, k_steps, stage, (acc, first_slot(phase, turn)))[0]

            def accumulate(turn: Array, item: _Item, width: int, acc: Array) -> Array:
                def stage(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                    acc, slot = carry
                    plgpu.barrier_wait(full.at[slot])
                    weights, x = share(slot, width)
                    for i in range(config.k_tiles):
                        for half, a in enumerate(tile_mma.dequantize(decoder, weights, item.exponent, i)):
                            acc = tile_mma.multiply(acc, a, x, i, half)
                            accumulator.wait_for_earlier_products()
                    acc = tile_mma.wait_for_product(acc)
                    plgpu.barrier_arrive(empty.at[slot])
                    return acc, after(slot)

                return lax.fori_loop(0, k_steps, stage, (acc, first_slot(phase, turn)))[0]

            def finish(item: _Item, width: int, sums: tuple[Array, Array]) -> None:
                outs = [total * (2.0**decoder.raised if item.raised is None else item.raised) for total in sums]
                if item.by_row is not None:
                    outs = [out * epilogue.repeat(row, width) for out, row in zip(outs, item.by_row, strict=True)]
                if item.bias is not None:
                    once = jnp.where(item.place.part == 0, jnp.float32(1), jnp.float32(0))
                    outs = [out + epilogue.repeat(row, width) * once for out, row in zip(outs, item.bias, strict=True)]
                if activation is not None:
                    gated = rows.gate_up_order is not None
                    outs = [activation(*outs)] if gated else [activation(out) for out in outs]
                first = item.place.part * num_rows + item.first
                outs = [out.astype(product.dtype) for out in outs]
                epilogue.store(phase.out, outs, rows, item.place.tile, first, item.count)
                if phase.before is None:
                    counters.signal(written, schedule.counter(item.place))

            lax.fori_loop(0, phase.num_mine, compute_item, look_up(jnp.int32(0)))

        def each_stage(phase: _Phase, item: Callable[[Place], Callable[[Array, Array], None]]) -> None:
            """For each of this core's items what `item` returns of its place, for each step and its slot."""

            @pl.loop(0, phase.num_mine)
            def _(turn: Array) -> None:
                fill = item(place(phase, turn))
                before = phase.stages_before + turn * phase.schedule.k_steps

                def stage(step: Array, slot: Array) -> Array:
                    @pl.when(before + step >= num_stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[slot])

                    fill(step, slot)
                    return after(slot)

                lax.fori_loop(0, phase.schedule.k_steps, stage, first_slot(phase, turn))

        def fetch_weights(phase: _Phase) -> None:
            """Past the weight's end TMA writes zeros."""

            def item(at: Place) -> Callable[[Array, Array], None]:
                expert, m = work.experts[at.block], pl.ds(at.tile, config.warpgroups_m)

                def fill(step: Array, slot: Array) -> None:
                    k = phase.schedule.first_tile(at.part, step)
                    for here, there, rows in zip(phase.refs.by_tile, weights_s, rows_of_tile, strict=True):
                        if here is not None:
                            tiles = here.at[expert, m, pl.ds(k * rows, config.stage_tiles * rows)]
                            plgpu.copy_gmem_to_smem(tiles, there.at[slot], full.at[slot])

                return fill

            each_stage(phase, item)

        def fetch_rows(phase: _Phase) -> None:
            def item(at: Place) -> Callable[[Array, Array], None]:
                first, count = work.first_row(phase.x_rows, at.block), work.count_of(at.block)
                if phase.before is not None:
                    counters.wait(written, *phase.before.needed(at, num_blocks))

                def fill(step: Array, slot: Array) -> None:
                    columns = pl.ds(phase.schedule.first_tile(at.part, step) * TILE, config.stage_tiles * TILE)

                    def copy(width: int) -> None:
                        here = phase.x.at[pl.ds(lax.div(first, 8) * 8, width), columns]  # rows by 8, for TMA to see
                        plgpu.copy_gmem_to_smem(here, x_s.at[slot, pl.ds(0, width)], full.at[slot])

                    for_width(config.widths, count, copy)

                return fill

            each_stage(phase, item)

        @pl.when(warpgroup < num_compute)
        def _() -> None:
            plgpu.set_max_registers(config.registers, action="increase")
            for phase in phases():
                compute(phase)

        @pl.when(warpgroup == num_compute)
        def _() -> None:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == 0)
                def _() -> None:
                    for phase in phases():
                        fetch_weights(phase)

                @pl.when(warp == 1)
                def _() -> None:
                    for phase in phases():
                        fetch_rows(phase)

    given = [_Operands.of(product) for product in products]
    rows_of_tile = Weights(tile.value_rows, 1, 1)  # as their arrays have them along the columns
    stages = [
        None
        if array is None
        else plgpu.SMEM((num_stages, config.warpgroups_m, config.stage_tiles * rows, array.shape[-1]), array.dtype)
        for array, rows in zip(given[0].by_tile, rows_of_tile, strict=True)
    ]
    copies = 1 + sum(stage is not None for stage in stages)  # into a stage
    sums = Sums.scratch(config.warpgroups_m, max(2, config.warpgroups_k), block_n)
    if config.warpgroups_k == 1:  # then there are none
        sums = sums._replace(values=plgpu.SMEM((1, 1, 1, 128), jnp.float32))
    kernel = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(num_cores,),
        grid_names=("core",),
        num_threads=num_compute + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((num_stages, block_n, config.stage_tiles * TILE), x.dtype, transforms=tile_mma.SWIZZLED),
            *(stage for stage in stages if stage is not None),
            sums.values,
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=copies),
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_compute),
            sums.full,
            sums.empty,
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,  # every hand-over of shared memory has a barrier of its own
        ),
    )
    operands = [x, *(array for operands in given for array in operands if array is not None)]
    written = jax.new_ref(blocks.experts >> 30)  # zeros, which XLA makes in the kernel that makes `experts`
    return launch(kernel, *operands, *blocks.arrays, written)[1]
