"""What a warpgroup that computes does: its rows of each item, from sums of units to results on their way.

What it does to one unit is in `wgmma`, and where tokens are the operand A in `tokens_as_a`.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8 import row_scales, staging, tokens_as_a, wgmma
from jmx.pallas.mosaic_sm90_fp8.layout import RAISED, value_rows
from jmx.pallas.mosaic_sm90_fp8.task import Task
from jmx.pallas.sm90 import accumulator
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.tiles import TILE

Array = Any
_FEW_COLUMNS = 64  # whose scales may wait in registers
_MANY_TOKENS = 96  # rows of a block: with more, tokens may be the operand A


class _Item(NamedTuple):
    """One piece of work."""

    expert: Array
    tile: Array  # of the weight's rows, this warpgroup's own
    part: Array  # of the columns
    x_row: Array
    out_row: Array
    count: Array
    tokens_are_a: Array
    by_row: Any  # as words, and so is the bias
    bias: Any


class _Slots(NamedTuple):
    """Where in shared memory a unit of an item is."""

    of_weights: Array
    of_rows: Array  # the same, but where rows are kept


def compute(task: Task) -> None:
    """All items of the multiprocessor, before them its share of rounding, if that is part of the launch."""
    rounding, kept = task.rounding, task.config.keeps_rows
    first = _look_up(task, jnp.int32(0))  # before there is anything to wait for
    if rounding is not None:
        if not kept:
            rounding.round_share()
        elif task.job.results:
            pl.when((task.num_mine > 0) & (task.here.warpgroup < first.count))(rounding.wait_for_results)
        else:  # all blocks have the same rows
            pl.when(task.num_mine > 0)(lambda: _keep_rows(task, first))
        if rounding.job == 0:
            plgpu.barrier_arrive(task.shared.rounded)
    lax.fori_loop(0, task.num_mine, partial(_compute_item, task), first)
    plgpu.wait_smem_to_gmem(0)
    if rounding is not None:
        rounding.results_are_written()


def _look_up(task: Task, turn: Array) -> _Item:
    """Loads, nearly all of which nothing waits for until they are wanted, and work on its way meanwhile."""
    work, g, product = task.work, task.g, task.job.product
    block, tile, part = task.item(turn)
    expert, count = work.experts[block], work.count_of(block)
    x_row, out_row = work.first_row(work.x_rows, block), work.first_row(work.out_rows, block)
    tokens_are_a = jnp.bool_(task.tokens_may_be_a) & (count > _MANY_TOKENS)
    if task.tokens_may_be_a and g.scales is not None:
        for nth in range(tokens_as_a.TILES):
            one = jnp.minimum(tile + nth, product.m_tiles - 1)
            tokens_are_a = tokens_are_a & (g.scales[expert, one, product.units, 0] != 0)
    tile += task.wm
    by_row, bias = (
        None if ref is None else row_scales.load_row_words(ref, product.rows, expert, tile)
        for ref in (g.by_row, g.bias)
    )
    if product.decoded:
        by_row = row_scales.load_codes(g.scales, expert, jnp.minimum(tile, product.m_tiles - 1))
    return _Item(expert, tile, part, x_row, out_row, count, tokens_are_a, by_row, bias)


def _keep_rows(task: Task, item: _Item) -> None:
    assert task.rounding is not None
    units = task.stages  # nobody shares columns of rows that are kept
    task.rounding.keep(item.x_row, item.count, item.part * units, units, units * task.job.split_k)


def _compute_item(task: Task, turn: Array, item: _Item) -> _Item:
    """Returns the one of the next turn."""
    following = _look_up(task, turn + 1)
    if task.config.keeps_rows and task.job.results:
        _keep_rows(task, item)
    transposed = partial(for_width, task.config.widths, item.count, partial(_multiply, task, turn, item))
    if task.tokens_may_be_a:
        whole = tuple(range(tokens_as_a.BOTH, task.config.block_n + 1, tokens_as_a.BOTH))
        as_a = partial(for_width, whole, item.count, partial(_multiply_by_token, task, turn, item))
        pl.when(item.tokens_are_a)(as_a)
        pl.when(~item.tokens_are_a)(transposed)
    else:
        transposed()
    return following


def _add_units(task: Task, turn: Array, zeros: Any, add: Callable[[Any, list[_Slots]], Any], at_once: int) -> Any:
    """What becomes of `zeros`: `add` takes totals, and the slots of `at_once` of this warpgroup's units that go to
    them."""

    def step(count: int, nth: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        totals, slot = carry
        slots = [slot]
        for _ in range(count - 1):
            slots.append(task.after(slots[-1]))
        for slot in slots:  # all of them first: no branch may come while products are on their way
            plgpu.barrier_wait(task.shared.full.at[slot])
        if task.config.keeps_rows:
            of_rows = [nth * at_once + i for i in range(count)]
        else:
            of_rows = [slot * task.config.warpgroups_k + task.wk for slot in slots]
        return add(totals, [*map(_Slots, slots, of_rows)]), task.after(slots[-1])

    whole, rest = divmod(task.stages, at_once)
    carry = zeros, task.first_slot(turn)
    if whole:
        carry = lax.fori_loop(0, whole, partial(step, at_once), carry)
    if rest:
        carry = step(rest, jnp.int32(whole), carry)
    return carry[0]


def _zeros(n: int) -> Array:
    return plgpu.layout_cast(jnp.zeros((TILE, n), jnp.float32), plgpu.Layout.WGMMA)


def _multiply(task: Task, turn: Array, item: _Item, width: int) -> None:
    """Tiles of the weight are the operand A, and `width` rows of x are B."""
    product, config, shared, g = task.job.product, task.config, task.shared, task.g
    decoded, wm, wk, staged = product.decoded, task.wm, task.wk, product.staged(config)
    size = value_rows(product.format)

    def unit(slots: _Slots) -> wgmma.Unit:
        return wgmma.Unit(
            shared.values.at[slots.of_weights, wm, pl.ds(wk * size, size)],
            None if shared.scales is None else shared.scales.at[slots.of_weights, wm, wk],
            shared.x.at[slots.of_rows, pl.ds(0, width)],
            None if shared.x_scales is None else shared.x_scales.at[slots.of_rows, 0, pl.ds(0, width)],
        )

    def add_at_once(totals: tuple[Array, ...], slots: list[_Slots]) -> tuple[Array, ...]:
        totals = wgmma.add_units(totals, [unit(one) for one in slots], decoded)
        for one in slots:
            plgpu.barrier_arrive(shared.empty.at[one.of_weights])
        return totals

    def add_in_turn(totals: tuple[Array, ...], slots: list[_Slots]) -> tuple[Array, ...]:
        (total,) = totals
        sums = wgmma.start(total if config.own_sums else None, unit(slots[0]), decoded)
        for before, one in pairwise(slots):
            sums = wgmma.start(sums, unit(one), decoded)
            accumulator.wait_for_earlier_products()
            plgpu.barrier_arrive(shared.empty.at[before.of_weights])
        total = wgmma.finish(None if config.own_sums else total, sums)
        plgpu.barrier_arrive(shared.empty.at[slots[-1].of_weights])
        return (total,)

    add = add_in_turn if config.own_sums or (decoded and not task.job.rows.by_block) else add_at_once
    num_parts = config.parts_of(width, decoded)
    n = width // num_parts
    room = staged if n <= staged else staged // 2  # then one half is written while the other is on its way

    def by_column(part: int) -> Array | None:
        if g.x_row_scales is None:
            return None
        first = jnp.int32(0) if config.keeps_rows else item.x_row
        return row_scales.load_columns(g.x_row_scales, n, first + part * n, item.count - part * n)

    early = by_column(0) if width <= _FEW_COLUMNS else None

    def send(part: int, sums: tuple[Array, Array]) -> None:
        first, scales = part * n, by_column(part) if early is None else early
        if scales is not None:
            sums = sums[0] * scales, sums[1] * scales
        by_row, bias = (
            None if ref is None else row_scales.values_of(words, ref.dtype, n)
            for ref, words in ((g.by_row, item.by_row), (g.bias, item.bias))
        )
        outs = _finish(task, item, sums, row_scales.powers_of(item.by_row, n) if decoded else by_row, bias)
        for nth, start in enumerate(range(0, n, room), part * -(-n // room)):
            size = min(room, n - start)
            write = partial(staging.stage, arrays=outs, columns=product.tile_columns, first=start, count=size)
            _send(task, write, item, first + start, item.tile, size, nth, room)

    for part, total in enumerate(_add_units(task, turn, (_zeros(n),) * num_parts, add, config.units)):
        sums = accumulator.split_rows(total)
        if config.warpgroups_k == 1:
            send(part, sums)
        else:  # then there is one part
            again = task.here.stages_before + turn * task.stages > 0
            pl.when(wk > 0)(partial(shared.sums.hand_over, wm, wk, width, sums, again=again))
            pl.when(wk == 0)(lambda sums=sums: send(0, shared.sums.take_over(wm, width, sums)))


def _multiply_by_token(task: Task, turn: Array, item: _Item, width: int) -> None:
    """`width` rows of x are the operand A, a half of each 128 this warpgroup's, and B are both tiles of the weight."""
    product, shared, g, warpgroup = task.job.product, task.shared, task.g, task.here.warpgroup
    mine = [part + warpgroup * TILE for part in range(0, width, tokens_as_a.BOTH)]

    def add(totals: tuple[Array, ...], slots: list[_Slots]) -> tuple[Array, ...]:
        ((slot, _),) = slots
        here = (shared.values, shared.scales, shared.x, shared.x_scales)
        unit = wgmma.Unit(*(None if ref is None else ref.at[slot] for ref in here))
        new = []
        for first, total in zip(mine, totals, strict=True):
            plgpu.barrier_wait(shared.turns.at[warpgroup])
            sums = tokens_as_a.multiply(unit, first)
            plgpu.barrier_arrive(shared.turns.at[1 - warpgroup])
            new.append(tokens_as_a.add(total, sums, unit, first))
        plgpu.barrier_arrive(shared.empty.at[slot])
        return tuple(new)

    totals = _add_units(task, turn, (_zeros(tokens_as_a.WIDTH),) * len(mine), add, 1)
    _, tile, _ = task.item(turn)
    of_rows = [
        None if ref is None else tokens_as_a.load_rows(ref, product.rows, item.expert, tile)
        for ref in (g.by_row, g.bias)
    ]
    for part, (first, total) in enumerate(zip(mine, totals, strict=True)):
        outs = _finish(task, item, tokens_as_a.split_rows(total), *of_rows)
        for nth in range(tokens_as_a.TILES):
            write = partial(tokens_as_a.stage, arrays=outs, columns=product.tile_columns, tile=nth)
            _send(task, write, item, first, tile + nth, TILE, part * tokens_as_a.TILES + nth, TILE)


def _finish(task: Task, item: _Item, sums: tuple[Array, Array], by_row: Any, bias: Any) -> list[Array]:
    """Outputs of sums; all are own elements of first and of second rows."""
    product, outs = task.job.product, [*sums]
    if product.decoded:
        outs = [out * 2.0**-RAISED for out in outs]
    if by_row is not None:
        outs = [out * row for out, row in zip(outs, by_row, strict=True)]
    if bias is not None:
        if task.job.split_k > 1:
            once = jnp.where(item.part == 0, jnp.float32(1), jnp.float32(0))
            bias = [row * once for row in bias]
        outs = [out + row for out, row in zip(outs, bias, strict=True)]
    if product.activation is not None:
        gated = product.rows.gate_up_order is not None
        outs = [product.activation(*outs)] if gated else [product.activation(out) for out in outs]
    return [out.astype(product.dtype) for out in outs]


def _send(
    task: Task,
    write: Callable[[Any], None],
    item: _Item,
    first: Array | int,
    tile: Array,
    size: int,
    nth: int,
    room: int,
) -> None:
    """Of a block's and a tile's outputs `size` rows from `first` on, by 8, the item's `nth`: `write` puts them into
    shared memory, into one buffer of `room` rows or two in turn, and they go meanwhile."""
    product, wm = task.job.product, task.wm
    buffers = min(2, product.staged(task.config) // room)
    at = nth % buffers * room
    plgpu.wait_smem_to_gmem(buffers - 1 if nth else 0, wait_read_only=True)
    write(task.out_s.at[wm, pl.ds(at, size)])
    plgpu.commit_smem()
    row = lax.div(item.out_row + item.part * task.num_rows, 8) * 8 + first  # by 8, for TMA to see
    # Nothing of a tile that there is not: of a result of one tile, Pallas has TMA write that one instead.
    count = jnp.where(tile < product.m_tiles, item.count - first, 0)

    def copy(start: int, rows: int) -> None:
        here = task.out_s.at[wm, pl.ds(at + start, rows)]
        there = task.out_g.at[pl.ds(row + start, rows), pl.ds(tile * product.tile_columns, product.tile_columns)]
        plgpu.copy_smem_to_gmem(here, there, commit_group=False)

    whole = count > size - 8
    pl.when(whole)(partial(copy, 0, size))

    @pl.when(~whole)
    def _() -> None:
        for eight in range(0, size - 8, 8):
            pl.when(count > eight)(partial(copy, eight, 8))

    plgpu.commit_smem_to_gmem_group()
