"""Consumer warpgroups: each work item from its prologue by sums over its units to results on their way.

What it does to one unit is in `wgmma`, and where tokens are the operand A in `tokens_as_a`.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8 import fused_quantize, row_scales, staging, tokens_as_a, wgmma
from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm
from jmx.pallas.mosaic_sm90_fp8.layout import RAISED, value_rows
from jmx.pallas.sm90 import accumulator
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.pipeline import Stage
from jmx.pallas.sm90.tiles import TILE

Array = Any
Slots = tuple[Array, Array]  # of a unit in shared memory: of weights, of rows, which differ where these are kept
_FEW_COLUMNS = 64  # whose scales may wait in registers
_MANY_TOKENS = 96  # rows of a block: with more, tokens may be the operand A


class WorkItem(NamedTuple):
    """One work item, and what its prologue loads while the item before it is computed."""

    expert: Array
    tile: Array  # of the weight's rows, this warpgroup's own
    part: Array  # of the columns
    x_row: Array
    out_row: Array
    count: Array
    tokens_are_a: Array
    by_row: Any  # as words, and so is the bias
    bias: Any


def consume(gemm: Gemm) -> None:
    """All of the CTA's work items; before them its share of quantizing, if that is part of the launch."""
    first = _prologue(gemm, jnp.int32(0))  # before there is anything to wait for
    if gemm.unquantized is not None:
        if not gemm.config.keeps_rows:
            fused_quantize.quantize_share(gemm)
        elif gemm.product.inputs_are_results:
            waits = (gemm.share.num_items > 0) & (gemm.warpgroup < first.count)
            pl.when(waits)(partial(fused_quantize.wait_for_results, gemm))
        else:  # all blocks have the same rows
            pl.when(gemm.share.num_items > 0)(lambda: _keep_rows(gemm, first))
        if gemm.index == 0:
            plgpu.barrier_arrive(gemm.shared.quantized)
    lax.fori_loop(0, gemm.share.num_items, partial(_compute, gemm), first)
    plgpu.wait_smem_to_gmem(0)
    if gemm.unquantized is not None:
        fused_quantize.signal_results(gemm)


@jax.named_scope("prologue")
def _prologue(gemm: Gemm, turn: Array) -> WorkItem:
    """Loads, nearly all of which nothing waits for until they are wanted, and work on its way meanwhile."""
    work, g, product = gemm.blocks, gemm.operands, gemm.product
    block, tile, part = gemm.item(turn)
    expert, count = work.experts[block], work.count_of(block)
    x_row, out_row = work.first_row(work.x_rows, block), work.first_row(work.out_rows, block)
    tokens_are_a = jnp.bool_(gemm.tokens_may_be_a) & (count > _MANY_TOKENS)
    if gemm.tokens_may_be_a and g.scales is not None:
        for nth in range(tokens_as_a.TILES):
            one = jnp.minimum(tile + nth, product.m_tiles - 1)
            tokens_are_a = tokens_are_a & (g.scales[expert, one, product.units, 0] != 0)
    tile += gemm.wm
    by_row, bias = (
        None if ref is None else row_scales.load_row_words(ref, product.rows, expert, tile)
        for ref in (g.by_row, g.bias)
    )
    if product.decoded:
        by_row = row_scales.load_codes(g.scales, expert, jnp.minimum(tile, product.m_tiles - 1))
    return WorkItem(expert, tile, part, x_row, out_row, count, tokens_are_a, by_row, bias)


def _keep_rows(gemm: Gemm, item: WorkItem) -> None:
    fused_quantize.keep_rows(gemm, item.x_row, item.count, item.part)


def _compute(gemm: Gemm, turn: Array, item: WorkItem) -> WorkItem:
    """Returns the one of the next turn."""
    following = _prologue(gemm, turn + 1)
    if gemm.config.keeps_rows and gemm.product.inputs_are_results:
        _keep_rows(gemm, item)
    transposed = partial(for_width, gemm.config.widths, item.count, partial(_multiply, gemm, turn, item))
    if gemm.tokens_may_be_a:
        whole = tuple(range(tokens_as_a.BOTH, gemm.config.block_n + 1, tokens_as_a.BOTH))
        as_a = partial(for_width, whole, item.count, partial(_multiply_by_token, gemm, turn, item))
        pl.when(item.tokens_are_a)(as_a)
        pl.when(~item.tokens_are_a)(transposed)
    else:
        transposed()
    return following


def _add_units(gemm: Gemm, turn: Array, zeros: Any, add: Callable[[Any, list[Slots]], Any], at_once: int) -> Any:
    """What becomes of `zeros`: `add` takes totals, and the slots of `at_once` of this warpgroup's units that go to
    them, of weights and of rows."""
    pipeline, config = gemm.pipeline, gemm.config

    def step(count: int, nth: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        totals, slot = carry
        slots = [slot]
        for _ in range(count - 1):
            slots.append(pipeline.after(slots[-1]))
        for slot in slots:  # all of them first: no branch may come while products are on their way
            pipeline.wait(slot)
        if config.keeps_rows:
            row_slots = [nth * at_once + i for i in range(count)]
        else:
            row_slots = [slot * config.warpgroups_k + gemm.wk for slot in slots]
        return add(totals, [*zip(slots, row_slots, strict=True)]), pipeline.after(slots[-1])

    whole, rest = divmod(gemm.share.item_stages, at_once)
    carry = zeros, pipeline.first_slot(gemm.share, turn)
    with jax.named_scope("accumulate"):
        if whole:
            carry = lax.fori_loop(0, whole, partial(step, at_once), carry)
        if rest:
            carry = step(rest, jnp.int32(whole), carry)
    return carry[0]


def _zeros(n: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((TILE, n), jnp.float32), plgpu.Layout.WGMMA)


def _adder(gemm: Gemm, wm: Array, wk: Array | int, width: int) -> Callable[[Any, list[Slots]], Any]:
    """What adds units to totals, and releases their slots: all units at once, or each while the next one starts."""
    product, config, stages, pipeline = gemm.product, gemm.config, gemm.shared.stages, gemm.pipeline
    decoded, size = product.decoded, value_rows(product.format)

    def unit(slots: Slots) -> Stage:
        slot, row_slot = slots
        return Stage(
            values=stages.values.at[slot, wm, pl.ds(wk * size, size)],
            scales=None if stages.scales is None else stages.scales.at[slot, wm, wk],
            x=stages.x.at[row_slot, pl.ds(0, width)],
            x_scales=None if stages.x_scales is None else stages.x_scales.at[row_slot, 0, pl.ds(0, width)],
        )

    def add_at_once(totals: tuple[Array, ...], slots: list[Slots]) -> tuple[Array, ...]:
        totals = wgmma.add_units(totals, [unit(one) for one in slots], decoded)
        for slot, _ in slots:
            pipeline.release(slot)
        return totals

    def add_in_turn(totals: tuple[Array, ...], slots: list[Slots]) -> tuple[Array, ...]:
        (total,) = totals
        sums = wgmma.start(total if config.own_sums else None, unit(slots[0]), decoded)
        for (slot, _), following in pairwise(slots):
            sums = wgmma.start(sums, unit(following), decoded)
            accumulator.wait_for_earlier_products()
            pipeline.release(slot)
        total = wgmma.finish(None if config.own_sums else total, sums)
        pipeline.release(slots[-1][0])
        return (total,)

    return add_in_turn if config.own_sums or (decoded and not product.by_block) else add_at_once


def _multiply(gemm: Gemm, turn: Array, item: WorkItem, width: int) -> None:
    """Tiles of the weight are the operand A, and `width` rows of x are B."""
    config, partial_sums, x_row_scales = gemm.config, gemm.shared.partial_sums, gemm.operands.x_row_scales
    wm, wk = gemm.wm, gemm.wk
    add = _adder(gemm, wm, wk, width)
    num_parts = config.parts_of(width, gemm.product.decoded)
    n = width // num_parts

    def by_column(part: int) -> Array | None:
        if x_row_scales is None:
            return None
        first = jnp.int32(0) if config.keeps_rows else item.x_row
        return row_scales.load_columns(x_row_scales, n, first + part * n, item.count - part * n)

    early = by_column(0) if width <= _FEW_COLUMNS else None

    def finish(part: int, sums: tuple[Array, Array]) -> None:
        with jax.named_scope("epilogue"):
            _epilogue(gemm, item, part, n, by_column(part) if early is None else early, sums)

    for part, total in enumerate(_add_units(gemm, turn, (_zeros(n),) * num_parts, add, config.units)):
        sums = accumulator.split_rows(total)
        if config.warpgroups_k == 1:
            finish(part, sums)
        else:  # then there is one part
            again = gemm.share.stages_before + turn * gemm.share.item_stages > 0
            pl.when(wk > 0)(partial(partial_sums.hand_over, wm, wk, width, sums, again=again))
            pl.when(wk == 0)(lambda sums=sums: finish(0, partial_sums.take_over(wm, width, sums)))


def _epilogue(
    gemm: Gemm, item: WorkItem, part: int, n: int, by_column: Array | None, sums: tuple[Array, Array]
) -> None:
    """Results of one of a block's parts of n rows, from sums that are not scaled `by_column` yet."""
    product, operands, staged = gemm.product, gemm.operands, gemm.product.staged(gemm.config)
    buffer_rows = staged if n <= staged else staged // 2  # then one half is written while the other is on its way
    if by_column is not None:
        sums = sums[0] * by_column, sums[1] * by_column
    by_row, bias = (
        None if ref is None else row_scales.values_of(words, ref.dtype, n)
        for ref, words in ((operands.by_row, item.by_row), (operands.bias, item.bias))
    )
    outs = _finish(gemm, item, sums, row_scales.powers_of(item.by_row, n) if product.decoded else by_row, bias)
    for nth, start in enumerate(range(0, n, buffer_rows), part * -(-n // buffer_rows)):
        size = min(buffer_rows, n - start)
        write = partial(staging.stage, arrays=outs, columns=product.tile_columns, first=start, count=size)
        _send(gemm, write, item, part * n + start, item.tile, size, nth, buffer_rows)


def _multiply_by_token(gemm: Gemm, turn: Array, item: WorkItem, width: int) -> None:
    """`width` rows of x are the operand A, a half of each 128 this warpgroup's, and B are both tiles of the weight."""
    product, shared, operands, warpgroup = gemm.product, gemm.shared, gemm.operands, gemm.warpgroup
    mine = [part + warpgroup * TILE for part in range(0, width, tokens_as_a.BOTH)]

    def add(totals: tuple[Array, ...], slots: list[Slots]) -> tuple[Array, ...]:
        ((slot, _),) = slots
        unit = Stage(*(None if ref is None else ref.at[slot] for ref in shared.stages))
        new = []
        for first, total in zip(mine, totals, strict=True):
            plgpu.barrier_wait(shared.turns.at[warpgroup])
            sums = tokens_as_a.multiply(unit, first)
            plgpu.barrier_arrive(shared.turns.at[1 - warpgroup])
            new.append(tokens_as_a.add(total, sums, unit, first))
        gemm.pipeline.release(slot)
        return tuple(new)

    totals = _add_units(gemm, turn, (_zeros(tokens_as_a.WIDTH),) * len(mine), add, 1)
    _, tile, _ = gemm.item(turn)
    of_rows = [
        None if ref is None else tokens_as_a.load_rows(ref, product.rows, item.expert, tile)
        for ref in (operands.by_row, operands.bias)
    ]
    with jax.named_scope("epilogue"):
        for part, (first, total) in enumerate(zip(mine, totals, strict=True)):
            outs = _finish(gemm, item, tokens_as_a.split_rows(total), *of_rows)
            for nth in range(tokens_as_a.TILES):
                write = partial(tokens_as_a.stage, arrays=outs, columns=product.tile_columns, tile=nth)
                _send(gemm, write, item, first, tile + nth, TILE, part * tokens_as_a.TILES + nth, TILE)


def _finish(gemm: Gemm, item: WorkItem, sums: tuple[Array, Array], by_row: Any, bias: Any) -> list[Array]:
    """Outputs of sums; all are own elements of first and of second rows."""
    product, outs = gemm.product, [*sums]
    if product.decoded:
        outs = [out * 2.0**-RAISED for out in outs]
    if by_row is not None:
        outs = [out * row for out, row in zip(outs, by_row, strict=True)]
    if bias is not None:
        if gemm.product.split_k > 1:
            once = jnp.where(item.part == 0, jnp.float32(1), jnp.float32(0))
            bias = [row * once for row in bias]
        outs = [out + row for out, row in zip(outs, bias, strict=True)]
    if product.activation is not None:
        gated = product.rows.gate_up_order is not None
        outs = [product.activation(*outs)] if gated else [product.activation(out) for out in outs]
    return [out.astype(product.dtype) for out in outs]


def _send(
    gemm: Gemm,
    write: Callable[[Any], None],
    item: WorkItem,
    first: Array | int,
    tile: Array,
    size: int,
    nth: int,
    buffer_rows: int,
) -> None:
    """Of a block's and a tile's outputs `size` rows from `first` on, by 8, the item's `nth`: `write` puts them into
    shared memory, into one buffer of `buffer_rows` rows or two in turn, and they go meanwhile."""
    product, buffers, wm = gemm.product, gemm.shared.outs[gemm.index], gemm.wm
    num_buffers = min(2, product.staged(gemm.config) // buffer_rows)
    at = nth % num_buffers * buffer_rows
    plgpu.wait_smem_to_gmem(num_buffers - 1 if nth else 0, wait_read_only=True)
    write(buffers.at[wm, pl.ds(at, size)])
    plgpu.commit_smem()
    row = lax.div(item.out_row + item.part * gemm.num_rows, 8) * 8 + first  # by 8, for TMA to see
    # Nothing of a tile that there is not: of a result of one tile, Pallas has TMA write that one instead.
    count = jnp.where(tile < product.m_tiles, item.count - first, 0)

    def copy(start: int, rows: int) -> None:
        here = buffers.at[wm, pl.ds(at + start, rows)]
        there = gemm.out.at[pl.ds(row + start, rows), pl.ds(tile * product.tile_columns, product.tile_columns)]
        plgpu.copy_smem_to_gmem(here, there, commit_group=False)

    whole = count > size - 8
    pl.when(whole)(partial(copy, 0, size))

    @pl.when(~whole)
    def _() -> None:
        for eight in range(0, size - 8, 8):
            pl.when(count > eight)(partial(copy, eight, 8))

    plgpu.commit_smem_to_gmem_group()
