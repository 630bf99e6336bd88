"""Consumer warpgroups: for each work item the prologue, the mainloop over its units, and the epilogue.

`_add_units` waits for stages; `_adder`, `_sum_of_integers` and `_multiply_by_token` release them. The product of one
unit is in `wgmma`, of integers under scales of 128 columns in `integer_sums`, with tokens as operand A in
`tokens_as_a`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8 import fused_quantize, integer_sums, row_scales, staging, tokens_as_a, wgmma
from jmx.pallas.mosaic_sm90_fp8.config import MAX_UNITS
from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS, value_rows
from jmx.pallas.sm90 import accumulator, epilogue
from jmx.pallas.sm90.launch import for_width
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Stage, finish_reads
from jmx.pallas.sm90.reduction import RowSums
from jmx.pallas.sm90.tiles import TILE, aligned_row
from jmx.util.typing import Array, Bool, Float32, Int32, Num

Scalar = Int32[Array, ""]
Words = tuple[Int32[Array, "128"], Int32[Array, "128"]]  # one of each thread, for its first and its second row
Totals = tuple[Num[Array, "64 n"], ...]  # float32, or int32 where they are the tensor cores' own sums of integers
_FEW_COLUMNS = 64  # up to which scales are held in registers during the mainloop
_MANY_TOKENS = 96  # rows of a block, above which tokens may be operand A


class Slots(NamedTuple):
    """Where a warpgroup's unit is.

    Args:
        weights, rows: its slots; these are equal unless rows are resident.
        halved: see `wgmma.Unit`.
    """

    weights: Scalar
    rows: Scalar
    halved: Scalar | None


class WorkItem(NamedTuple):
    """A work item, and what its prologue loads while the item before it is computed.

    Args:
        expert: of the block.
        tile: this warpgroup's, along the weight's rows.
        part: of the columns.
        x_row, out_row, num_rows: of the block: its first row in x and in the result, and how many it has.
        tokens_are_a: whether tokens are operand A.
        channel_scales, bias: of the thread's two rows, as words of their bits; of MXFP4 the rows' largest scale codes.
    """

    expert: Scalar
    tile: Scalar
    part: Scalar
    x_row: Scalar
    out_row: Scalar
    num_rows: Scalar
    tokens_are_a: Bool[Array, ""]
    channel_scales: Words | None
    bias: Words | None


def consume(gemm: Gemm, following: Gemm | None) -> None:
    """Computes all of the CTA's work items, after quantizing its share of the rows if that is part of the launch.

    `following`: the GEMM that reads the results, if there is one.
    """
    first = _prologue(gemm, jnp.int32(0))  # its loads are in flight during all that follows
    if gemm.unquantized is not None:
        if not gemm.config.resident_rows:
            fused_quantize.quantize_share(gemm)
        elif gemm.product.inputs_are_results:
            waits = (gemm.share.num_items > 0) & (gemm.warpgroup < first.num_rows)
            pl.when(waits)(partial(fused_quantize.wait_for_results, gemm))
        else:  # all blocks have the same rows
            pl.when(gemm.share.num_items > 0)(lambda: _quantize_resident_rows(gemm, first))
        if gemm.index == 0:
            plgpu.barrier_arrive(gemm.shared.quantized_barrier)
    early = following if following is not None and following.before is not None else None
    lax.fori_loop(0, gemm.share.num_items, partial(_compute, gemm, early), first)
    plgpu.wait_smem_to_gmem(0)
    if gemm.unquantized is not None:
        fused_quantize.signal_results(gemm)


@jax.named_scope("prologue")
def _prologue(gemm: Gemm, turn: Scalar) -> WorkItem:
    """Issues loads for the CTA's `turn`th work item, most of which are waited for only after the mainloop."""
    work, operands, product = gemm.blocks, gemm.operands, gemm.product
    block, tile, part = gemm.item(turn)
    expert, count = work.experts[block], work.count_of(block)
    x_row, out_row = work.first_row(work.x_rows, block), work.first_row(work.out_rows, block)
    tokens_are_a = jnp.bool_(gemm.tokens_may_be_a) & (count > _MANY_TOKENS)
    if gemm.tokens_may_be_a and operands.scales is not None:
        for nth in range(tokens_as_a.TILES):
            one = jnp.minimum(tile + nth, product.m_tiles - 1)
            tokens_are_a = tokens_are_a & (operands.scales[expert, one, product.units, 0] != 0)
    tile += gemm.wm
    channel_scales, bias = (
        None if ref is None else row_scales.load_row_words(ref, product.rows, expert, tile)
        for ref in (operands.channel_scales, operands.bias)
    )
    if product.elements.coded:
        channel_scales = row_scales.load_codes(operands.scales, expert, jnp.minimum(tile, product.m_tiles - 1))
    return WorkItem(expert, tile, part, x_row, out_row, count, tokens_are_a, channel_scales, bias)


def _quantize_resident_rows(gemm: Gemm, item: WorkItem) -> None:
    fused_quantize.quantize_resident_rows(gemm, item.x_row, item.num_rows, item.part)


def _compute(gemm: Gemm, early: Gemm | None, turn: Scalar, item: WorkItem) -> WorkItem:
    """Computes a work item; returns the next one, whose prologue has been issued.

    `early`: the GEMM whose early rows are quantized before the last items of this one, or None.
    """
    if early is not None:
        fused_quantize.quantize_early(gemm, early, turn)
    fused_quantize.wait_if_late(gemm, turn, warpgroup=True)
    following = _prologue(gemm, turn + 1)
    if gemm.config.resident_rows and gemm.product.inputs_are_results:
        _quantize_resident_rows(gemm, item)
    transposed = partial(for_width, gemm.widths, item.num_rows, partial(_multiply, gemm, turn, item))
    if gemm.tokens_may_be_a:
        whole = tuple(range(tokens_as_a.BOTH, gemm.config.block_n + 1, tokens_as_a.BOTH))
        as_a = partial(for_width, whole, item.num_rows, partial(_multiply_by_token, gemm, turn, item))
        pl.when(item.tokens_are_a)(as_a)
        pl.when(~item.tokens_are_a)(transposed)
    else:
        transposed()
    return following


def _add_units[T](
    gemm: Gemm,
    turn: Scalar,
    part: Scalar,
    zeros: T,
    add: Callable[[T, list[Slots]], T],
    at_once: int,
    between: tuple[int, Callable[[T], T]] | None = None,
) -> T:
    """The mainloop: waits for stages, `at_once` at a time, and calls `add` with totals and these stages' slots.

    `add` adds this warpgroup's units to the totals, which are `zeros` at first, and releases the slots. `between`:
    after how many stages, a multiple of `at_once`, there is a new loop, and what is done with totals before it.
    """
    pipeline, config, stages = gemm.pipeline, gemm.config, gemm.share.item_stages
    half_stage = gemm.half_stage(part)

    def step(count: int, nth: Scalar, carry: tuple[T, Scalar]) -> tuple[T, Scalar]:
        totals, slot = carry
        slots = [slot]
        for _ in range(count - 1):
            slots.append(pipeline.next_slot(slots[-1]))
        for slot in slots:  # all of them first: no branch may occur while products are in flight
            pipeline.wait(slot)
        numbers = [nth * at_once + i for i in range(count)]
        row_slots = numbers if config.resident_rows else [slot * config.warpgroups_k + gemm.wk for slot in slots]
        halved = [None if half_stage is None else (number == half_stage).astype(jnp.int32) for number in numbers]
        return add(totals, [*map(Slots, slots, row_slots, halved)]), pipeline.next_slot(slots[-1])

    size, restart = (stages, None) if between is None else between
    carry = zeros, pipeline.first_slot(gemm.share, turn)
    with jax.named_scope("accumulate"):
        for first in range(0, stages, size):
            if first and restart is not None:
                carry = restart(carry[0]), carry[1]
            (begin, _), (end, rest) = divmod(first, at_once), divmod(min(first + size, stages), at_once)
            if begin < end:
                carry = lax.fori_loop(begin, end, partial(step, at_once), carry)
            if rest:
                carry = step(rest, jnp.int32(end), carry)
    return carry[0]


def _zeros(n: int, dtype: Any = jnp.float32) -> Num[Array, "64 n"]:
    return plgpu.layout_cast(jnp.zeros((TILE, n), dtype), plgpu.Layout.WGMMA)


def _unit(gemm: Gemm, width: int, slots: Slots) -> wgmma.Unit:
    """This warpgroup's unit of a stage, and its first `width` rows."""
    (slot, row_slot, halved), stages, size = slots, gemm.shared.stages, value_rows(gemm.product.format)
    wm, wk = gemm.wm, gemm.wk
    return wgmma.Unit(
        values=stages.values.at[slot, wm, pl.ds(wk * size, size)],
        scales=None if stages.scales is None else stages.scales.at[slot, wm, wk],
        x=stages.x.at[row_slot, pl.ds(0, width)],
        x_scales=None if stages.x_scales is None else stages.x_scales.at[row_slot, 0, pl.ds(0, width)],
        halved=halved,
    )


def _adder(gemm: Gemm, width: int) -> Callable[[Totals, list[Slots]], Totals]:
    """A function that adds units to totals and releases their slots: all at once, or each after the next one starts."""
    product, config, pipeline = gemm.product, gemm.config, gemm.pipeline
    elements, unit = product.elements, partial(_unit, gemm, width)

    def add_at_once(totals: Totals, slots: list[Slots]) -> Totals:
        totals = wgmma.add_units(totals, [unit(one) for one in slots], elements)
        if product.scales_units:
            finish_reads()
        for one in slots:
            pipeline.release(one.weights)
        return totals

    def add_in_turn(totals: Totals, slots: list[Slots]) -> Totals:
        (total,) = totals
        sums = wgmma.start(total if config.own_sums else None, unit(slots[0]), elements)
        for one, following in pairwise(slots):
            sums = wgmma.start(sums, unit(following), elements)
            accumulator.wait_for_earlier_products()
            pipeline.release(one.weights)
        total = wgmma.finish(None if config.own_sums else total, sums)
        pipeline.release(slots[-1].weights)
        return (total,)

    return add_in_turn if config.own_sums or (elements.decoded and not product.scales_units) else add_at_once


def _sum_of_integers(gemm: Gemm, turn: Scalar, part: Scalar, width: int) -> Float32[Array, "64 width"]:
    """The mainloop where integers have scales of 128 columns."""
    product = gemm.product
    longest = integer_sums.longest_run(product.format.element_bits, UNIT_COLUMNS)

    def add(run: integer_sums.Run, slots: list[Slots]) -> integer_sums.Run:
        run = integer_sums.add(run, [_unit(gemm, width, one) for one in slots], product.elements)
        finish_reads()
        for one in slots:
            gemm.pipeline.release(one.weights)
        return run

    at_once, goes_on = min(gemm.config.units, longest), longest > MAX_UNITS
    between = (longest // at_once * at_once, integer_sums.restart) if goes_on else None
    run = integer_sums.start(width, goes_on=goes_on)
    return integer_sums.finish(_add_units(gemm, turn, part, run, add, at_once, between))


def _multiply(gemm: Gemm, turn: Scalar, item: WorkItem, width: int) -> None:
    """Mainloop and epilogue, where tiles of the weight are operand A and `width` rows of x are operand B."""
    config, partial_sums = gemm.config, gemm.shared.partial_sums
    wm, wk, elements = gemm.wm, gemm.wk, gemm.product.elements
    of_integers = elements.exact and elements.by_block
    num_parts = 1 if of_integers else config.parts_of(width, elements.decoded)
    n = width // num_parts
    dtype = wgmma.sums_dtype(elements) if config.own_sums else jnp.float32  # of totals

    def token_scales(part: int) -> Float32[Array, " m"] | None:
        if gemm.x.by_block:
            return None
        first = jnp.int32(0) if config.resident_rows else item.x_row
        return epilogue.load_columns(gemm.x.scales, n, first + part * n, item.num_rows - part * n)

    early = token_scales(0) if width <= _FEW_COLUMNS else None

    def finish(part: int, sums: RowSums) -> None:
        with jax.named_scope("epilogue"):
            _epilogue(gemm, item, part, n, token_scales(part) if early is None else early, sums)

    if of_integers:
        totals = (_sum_of_integers(gemm, turn, item.part, width),)
    else:
        totals = _add_units(gemm, turn, item.part, (_zeros(n, dtype),) * num_parts, _adder(gemm, width), config.units)
    for part, total in enumerate(totals):
        sums = accumulator.split_rows(total)
        if partial_sums is None:
            finish(part, sums)
        else:  # then there is only one part
            again = gemm.share.stages_before + turn * gemm.share.item_stages > 0
            pl.when(wk > 0)(partial(partial_sums.send, wm, wk, width, sums, again=again))
            pl.when(wk == 0)(lambda sums=sums: finish(0, partial_sums.reduce(wm, width, sums)))


def _epilogue(
    gemm: Gemm, item: WorkItem, part: int, n: int, token_scales: Float32[Array, " m"] | None, sums: RowSums
) -> None:
    """Scales the sums of one of a block's parts of n rows, and sends the results."""
    product, operands, staged = gemm.product, gemm.operands, gemm.product.staged(gemm.config)
    buffer_rows = staged if n <= staged else staged // 2  # then one half is written while the other is in flight
    if token_scales is not None:
        sums = sums[0] * token_scales, sums[1] * token_scales
    channel_scales, bias = (
        None if ref is None or words is None else row_scales.values_of(words, ref.dtype, n)
        for ref, words in ((operands.channel_scales, item.channel_scales), (operands.bias, item.bias))
    )
    if product.elements.coded:
        assert item.channel_scales is not None
        channel_scales = row_scales.powers_of(item.channel_scales, n)
    outs = _finish(gemm, item, sums, channel_scales, bias)
    for nth, start in enumerate(range(0, n, buffer_rows), part * -(-n // buffer_rows)):
        size = min(buffer_rows, n - start)
        write = partial(staging.stage, arrays=outs, columns=product.tile_columns, first=start, count=size)
        _send(gemm, write, item, part * n + start, item.tile, size, nth, buffer_rows)


def _multiply_by_token(gemm: Gemm, turn: Scalar, item: WorkItem, width: int) -> None:
    """Mainloop and epilogue, where `width` rows of x are operand A, and both tiles of the weight operand B.

    Each of the two warpgroups takes half of each 128 rows.
    """
    product, shared, operands, warpgroup = gemm.product, gemm.shared, gemm.operands, gemm.warpgroup
    mine = [part + warpgroup * TILE for part in range(0, width, tokens_as_a.BOTH)]

    def add(totals: Totals, slots: list[Slots]) -> Totals:
        ((slot, *_),) = slots
        unit = Stage(*(None if ref is None else ref.at[slot] for ref in shared.stages))
        new = []
        for first, total in zip(mine, totals, strict=True):
            plgpu.barrier_wait(shared.turn_barriers.at[warpgroup])
            sums = tokens_as_a.multiply(unit, first, product.elements)
            plgpu.barrier_arrive(shared.turn_barriers.at[1 - warpgroup])
            new.append(tokens_as_a.add(total, sums, unit, first))
        finish_reads()
        gemm.pipeline.release(slot)
        return tuple(new)

    totals = _add_units(gemm, turn, item.part, (_zeros(tokens_as_a.WIDTH),) * len(mine), add, 1)
    _, tile, _ = gemm.item(turn)
    of_rows = [
        None if ref is None else tokens_as_a.load_rows(ref, product.rows, item.expert, tile)
        for ref in (operands.channel_scales, operands.bias)
    ]
    with jax.named_scope("epilogue"):
        for part, (first, total) in enumerate(zip(mine, totals, strict=True)):
            outs = _finish(gemm, item, tokens_as_a.split_rows(total), *of_rows)
            for nth in range(tokens_as_a.TILES):
                write = partial(tokens_as_a.stage, arrays=outs, columns=product.tile_columns, tile=nth)
                _send(gemm, write, item, first, tile + nth, TILE, part * tokens_as_a.TILES + nth, TILE)


def _finish(
    gemm: Gemm, item: WorkItem, sums: RowSums, channel_scales: Sequence[Array] | None, bias: Sequence[Array] | None
) -> list[Array]:
    """The outputs for sums; all are per-thread elements of first and of second rows."""
    product, outs = gemm.product, [*sums]
    if product.elements.exponent:
        outs = [out * 2.0**-product.elements.exponent for out in outs]
    if channel_scales is not None:
        outs = [out * row for out, row in zip(outs, channel_scales, strict=True)]
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
    write: Callable[[Ref], None],
    item: WorkItem,
    first: Scalar | int,
    tile: Scalar,
    size: int,
    nth: int,
    buffer_rows: int,
) -> None:
    """Starts to copy `size` rows of outputs of a block and a tile, from row `first` on, to global memory.

    `write` writes them to one of two buffers in shared memory, of `buffer_rows` rows each, which alternate with `nth`;
    or there is only one buffer. The copy is in flight when this returns.
    """
    product, buffers, wm = gemm.product, gemm.shared.outs[gemm.index], gemm.wm
    num_buffers = min(2, product.staged(gemm.config) // buffer_rows)
    at = nth % num_buffers * buffer_rows
    plgpu.wait_smem_to_gmem(num_buffers - 1 if nth else 0, wait_read_only=True)
    write(buffers.at[wm, pl.ds(at, size)])
    plgpu.commit_smem()
    row = aligned_row(item.out_row + item.part * gemm.num_rows) + first
    # No rows past the last tile: for a result of one tile Pallas would make TMA write that tile instead.
    count = jnp.where(tile < product.m_tiles, item.num_rows - first, 0)

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
