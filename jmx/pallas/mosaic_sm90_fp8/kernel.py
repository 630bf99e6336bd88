"""A grouped product on Hopper's FP8 tensor cores, in one Pallas Mosaic GPU kernel: rows @ weight[expert].T, and on.

As in `mosaic_sm90.kernel`, results are computed transposed: 64 rows of the weight are the operand A, and a block of
rows of one expert, at most 256, is B, in parts where registers do not hold its sums at once. E4M3 weights are read from
shared memory; MXFP4 ones become e5m2 in registers. Large blocks whose scales belong to 128 columns are A themselves,
where that costs less: see `token_fragments`. Every multiprocessor runs one block of threads for good. One warp fetches
weights and another one rows into a ring of stages, 128 columns each (but see `one_launch` for rows that are kept); one
to five warpgroups compute:

    weights   | W0 | W1 | W2 | ...                             full[slot] -->
    rows      | X0 | X1 | X2 | ...                             full[slot] -->
    compute   | wait 0 | elements 0 | wgmma 0 | totals += sums * scales | wait 1 | ...              --> empty[slot]

Results leave by way of shared memory, and are on their way while the next item is computed.

Between the products rows of h are rounded anew, for which a token's h has to be there as a whole. Where rows are few,
that and the rounding of x before are part of one launch with both products; see `one_launch`. Weights are on their way
meanwhile.
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

from jmx.formats import MXFP4, BlockScaled, Format
from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90 import fragments
from jmx.pallas.mosaic_sm90.fragments import Rows
from jmx.pallas.mosaic_sm90.layout import GATED_ROWS, TILE
from jmx.pallas.mosaic_sm90.widths import for_width
from jmx.pallas.mosaic_sm90_fp8 import fragments as fp8
from jmx.pallas.mosaic_sm90_fp8 import token_fragments as by_token
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.layout import RAISED, UNIT_COLUMNS, unit_bytes, value_rows
from jmx.pallas.mosaic_sm90_fp8.one_launch import KEPT_BARRIERS, Rounding, counters
from jmx.pallas.mosaic_sm90_fp8.quantize import WORDS, Inputs, Sources, Unrounded

Array = Any
_FETCH_REGISTERS = 40
_COLUMNS = UNIT_COLUMNS  # of a stage
_FEW_COLUMNS = 64  # whose scales may wait in registers
_AHEAD_BYTES = 96 * 1024  # of weights, of a multiprocessor, that may come before rows are rounded
_MANY_TOKENS = 96  # rows of a block: with more, tokens may be the operand A


class Product(NamedTuple):
    """What a row is multiplied by, and what becomes of the result.

    Args:
        weight: in the layout `mosaic_sm90_fp8`, with one leading axis of experts.
        format: of the weight.
        bias: (E, N) or None.
        rows: what the weight's rows are.
        dtype: of the result.
        activation: of float32 (gate, up), or (x,) where there is no gate; None for none.
    """

    weight: BlockScaled
    format: Format
    bias: Array | None
    rows: Rows
    dtype: Any
    activation: Callable[..., Array] | None = None


class Job(NamedTuple):
    """One product of a launch.

    Args:
        rows: what is multiplied. Where they are still to be rounded, that is done in the same launch; where these are a
            shape, they are what the job before gave.
        product: see `Product`.
        results: whether rows lie where results do, in blocks by `out_rows`, not by `x_rows`.
        split_k: parts of the weight's columns that are computed apart, where there is no activation.
    """

    rows: Inputs | Unrounded
    product: Product
    results: bool = False
    split_k: int = 1


class _Operands(NamedTuple):
    """A job's arrays as the kernel takes them, or refs of them; None for what there is not."""

    unrounded: Any
    row_of: Any
    static_scale: Any
    x: Any
    x_row_scales: Any
    x_block_scales: Any
    values: Any
    scales: Any  # that come by the unit
    by_row: Any  # scales (E, N) or (E, N, 1), which the epilogue multiplies by
    bias: Any

    @classmethod
    def of(cls, job: Job) -> "_Operands":
        product, rows = job.product, job.rows
        q, of_blocks = product.weight, product.format.block_size > 0
        scales, by_row = (q.scales, None) if of_blocks else (None, q.scales)
        weight = (q.values, scales, by_row, product.bias)
        if isinstance(rows, Unrounded):
            x = None if isinstance(rows.x, jax.ShapeDtypeStruct) else rows.x
            return cls(x, rows.row_of, rows.static_scale, None, None, None, *weight)
        return cls(None, None, None, None, None, None, *weight).of_rounded(*rows)

    def of_rounded(self, values: Any, scales: Any) -> "_Operands":
        of_rows, of_blocks = (scales, None) if len(scales.shape) == 1 else (None, scales)
        return self._replace(x=values, x_row_scales=of_rows, x_block_scales=of_blocks)


class _Item(NamedTuple):
    """One piece of work as a computing warpgroup sees it."""

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


class _Shared(NamedTuple):
    """Shared memory of a launch: the ring's stages, its barriers, and others."""

    x: Any  # or all units of the rows that are kept, and so are `x_scales`
    values: Any
    scales: Any
    x_scales: Any
    of_warps: Any  # words of each warpgroup, for rounding
    row_scales: Any  # of rows that are kept
    of_kept: Any
    full: Any
    empty: Any
    turns: Any
    rounded: Any


class _Place(NamedTuple):
    """Where a thread is, and what its multiprocessor went through in the jobs before."""

    warpgroup: Array
    core: Array
    first_item: Array
    stages_before: Array


class _Roles(NamedTuple):
    """What the kinds of threads do for a job, and what comes after it."""

    compute: Callable[[], None]
    fetch_weights: Callable[[], None]
    fetch_rows: Callable[[], None]
    next_place: _Place


def _roles(
    job: Job,
    g: _Operands,
    blocks: Blocks,
    out_g: Any,
    out_s: Any,
    shared: _Shared,
    here: _Place,
    rounding: Rounding | None,
    *,
    config: Config,
    num_rows: int,
    num_cores: int,
) -> _Roles:
    """A job as one thread sees it. `blocks` with refs, `rounding` where that is part of the launch."""
    product, split_k = job.product, job.split_k
    rows, per_unit = product.rows, value_rows(product.format)
    m_tiles, all_units = product.weight.values.shape[1], _units_of(product)
    units = -(-all_units // split_k)  # of an item; behind the weight's last one are zeros
    m_steps = -(-m_tiles // config.warpgroups_m)
    num_stages, block_n = config.num_stages, config.block_n
    decoded, by_block = product.format == MXFP4, job.rows.by_block
    out_columns, staged = _results_of(product, config)
    kept = config.keeps_rows
    may_be_a = by_block and not decoded and split_k == 1 and not kept
    tokens_may_be_a = may_be_a and config.tokens_may_be_a and staged >= TILE
    x_s, values_s, scales_s, x_scales_s, *_, full, empty, turns, rounded = shared
    warpgroup, _, first_item, stages_before = here
    work = blocks._replace(x_rows=blocks.out_rows) if job.results else blocks
    num_items = work.number * (m_steps * split_k)
    num_mine = lax.div(num_items - first_item + (num_cores - 1), num_cores)

    def place(turn: Array) -> tuple[Array, Array, Array]:
        """Block, first tile of the weight's rows and part of the columns of an item; past the end of some item."""
        item = jnp.clip(first_item + turn * num_cores, 0, jnp.maximum(num_items, 1) - 1)
        step, part = lax.div(item, split_k), lax.rem(item, split_k)
        return lax.div(step, m_steps), lax.rem(step, m_steps) * config.warpgroups_m, part

    def first_slot(turn: Array) -> Array:
        return lax.rem(stages_before + turn * units, num_stages)

    def after(slot: Array) -> Array:
        return jnp.where(slot + 1 == num_stages, 0, slot + 1)

    def compute() -> None:
        def look_up(turn: Array) -> _Item:
            """Loads, nearly all of which nothing waits for until they are wanted, and work on its way meanwhile."""
            block, tile, part = place(turn)
            expert, count = work.experts[block], work.count_of(block)
            x_row, out_row = work.first_row(work.x_rows, block), work.first_row(work.out_rows, block)
            tokens_are_a = jnp.bool_(tokens_may_be_a) & (count > _MANY_TOKENS)
            if tokens_may_be_a and g.scales is not None:
                for nth in range(by_token.TILES):
                    one = jnp.minimum(tile + nth, m_tiles - 1)
                    tokens_are_a = tokens_are_a & (g.scales[expert, one, all_units, 0] != 0)
            tile += warpgroup
            by_row, bias = (
                None if ref is None else fp8.load_row_words(ref, rows, expert, tile) for ref in (g.by_row, g.bias)
            )
            if decoded:
                by_row = fp8.load_codes(g.scales, expert, jnp.minimum(tile, m_tiles - 1))
            return _Item(expert, tile, part, x_row, out_row, count, tokens_are_a, by_row, bias)

        def keep_rows(item: _Item) -> None:
            assert rounding is not None
            rounding.keep(item.x_row, item.count, item.part * units, units, units * split_k)

        def compute_item(turn: Array, item: _Item) -> _Item:
            following = look_up(turn + 1)
            if kept and job.results:
                keep_rows(item)
            transposed = partial(for_width, config.widths, item.count, partial(multiply, turn, item))
            if tokens_may_be_a:
                whole = tuple(range(by_token.BOTH, block_n + 1, by_token.BOTH))
                as_a = partial(for_width, whole, item.count, partial(multiply_by_token, turn, item))
                pl.when(item.tokens_are_a)(as_a)
                pl.when(~item.tokens_are_a)(transposed)
            else:
                transposed()
            return following

        def add_units(turn: Array, zeros: Any, add: Callable[[Any, list[_Slots]], Any], at_once: int) -> Any:
            """What becomes of `zeros`: `add` takes totals, and the slots of `at_once` units that go to them."""

            def step(count: int, nth: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
                totals, slot = carry
                slots = [slot]
                for _ in range(count - 1):
                    slots.append(after(slots[-1]))
                for slot in slots:  # all of them first: no branch may come while products are on their way
                    plgpu.barrier_wait(full.at[slot])
                of_rows = [nth * at_once + i for i in range(count)] if kept else slots
                return add(totals, [*map(_Slots, slots, of_rows)]), after(slots[-1])

            whole, rest = divmod(units, at_once)
            carry = zeros, first_slot(turn)
            if whole:
                carry = lax.fori_loop(0, whole, partial(step, at_once), carry)
            if rest:
                carry = step(rest, jnp.int32(whole), carry)
            return carry[0]

        def zeros(n: int) -> Array:
            return plgpu.layout_cast(jnp.zeros((TILE, n), jnp.float32), plgpu.Layout.WGMMA)

        def multiply(turn: Array, item: _Item, width: int) -> None:
            def unit(slots: _Slots) -> fp8.Unit:
                return fp8.Unit(
                    values_s.at[slots.of_weights, warpgroup],
                    None if scales_s is None else scales_s.at[slots.of_weights, warpgroup, 0],
                    x_s.at[slots.of_rows, pl.ds(0, width)],
                    None if x_scales_s is None else x_scales_s.at[slots.of_rows, 0, pl.ds(0, width)],
                )

            def add_at_once(totals: tuple[Array, ...], slots: list[_Slots]) -> tuple[Array, ...]:
                totals = fp8.add_units(totals, [unit(one) for one in slots], decoded)
                for one in slots:
                    plgpu.barrier_arrive(empty.at[one.of_weights])
                return totals

            def add_in_turn(totals: tuple[Array, ...], slots: list[_Slots]) -> tuple[Array, ...]:
                (total,) = totals
                sums = fp8.start(total if config.own_sums else None, unit(slots[0]), decoded)
                for before, one in pairwise(slots):
                    sums = fp8.start(sums, unit(one), decoded)
                    fragments.wait_for_earlier_products()
                    plgpu.barrier_arrive(empty.at[before.of_weights])
                total = fp8.finish(None if config.own_sums else total, sums)
                plgpu.barrier_arrive(empty.at[slots[-1].of_weights])
                return (total,)

            add = add_in_turn if config.own_sums or (decoded and not by_block) else add_at_once
            num_parts = config.parts_of(width, decoded)
            n = width // num_parts
            room = staged if n <= staged else staged // 2  # then one half is written while the other is on its way

            def by_column(part: int) -> Array | None:
                if g.x_row_scales is None:
                    return None
                first = jnp.int32(0) if kept else item.x_row
                return fp8.load_columns(g.x_row_scales, n, first + part * n, item.count - part * n)

            early = by_column(0) if width <= _FEW_COLUMNS else None
            for part, total in enumerate(add_units(turn, (zeros(n),) * num_parts, add, config.units)):
                first, scales = part * n, by_column(part) if early is None else early
                sums = fragments.split_rows(total)
                if scales is not None:
                    sums = sums[0] * scales, sums[1] * scales
                by_row, bias = (
                    None if ref is None else fp8.values_of(words, ref.dtype, n)
                    for ref, words in ((g.by_row, item.by_row), (g.bias, item.bias))
                )
                outs = finish(item, sums, fp8.powers_of(item.by_row, n) if decoded else by_row, bias)
                for nth, start in enumerate(range(0, n, room), part * -(-n // room)):
                    size = min(room, n - start)
                    write = partial(fp8.stage, arrays=outs, columns=out_columns, first=start, count=size)
                    send(write, item, first + start, item.tile, size, nth, room)

        def multiply_by_token(turn: Array, item: _Item, width: int) -> None:
            mine = [part + warpgroup * TILE for part in range(0, width, by_token.BOTH)]

            def add(totals: tuple[Array, ...], slots: list[_Slots]) -> tuple[Array, ...]:
                ((slot, _),) = slots
                here = (values_s, scales_s, x_s, x_scales_s)
                unit = fp8.Unit(*(None if ref is None else ref.at[slot] for ref in here))
                new = []
                for first, total in zip(mine, totals, strict=True):
                    plgpu.barrier_wait(turns.at[warpgroup])
                    sums = by_token.multiply(unit, first)
                    plgpu.barrier_arrive(turns.at[1 - warpgroup])
                    new.append(by_token.add(total, sums, unit, first))
                plgpu.barrier_arrive(empty.at[slot])
                return tuple(new)

            totals = add_units(turn, (zeros(by_token.WIDTH),) * len(mine), add, 1)
            tile = place(turn)[1]
            of_rows = [
                None if ref is None else by_token.load_rows(ref, rows, item.expert, tile) for ref in (g.by_row, g.bias)
            ]
            for part, (first, total) in enumerate(zip(mine, totals, strict=True)):
                outs = finish(item, by_token.split_rows(total), *of_rows)
                for nth in range(by_token.TILES):
                    write = partial(by_token.stage, arrays=outs, columns=out_columns, tile=nth)
                    send(write, item, first, tile + nth, TILE, part * by_token.TILES + nth, TILE)

        def finish(item: _Item, sums: tuple[Array, Array], by_row: Any, bias: Any) -> list[Array]:
            """Outputs of sums; all are own elements of first and of second rows."""
            outs = [*sums]
            if decoded:
                outs = [out * 2.0**-RAISED for out in outs]
            if by_row is not None:
                outs = [out * row for out, row in zip(outs, by_row, strict=True)]
            if bias is not None:
                if split_k > 1:
                    once = jnp.where(item.part == 0, jnp.float32(1), jnp.float32(0))
                    bias = [row * once for row in bias]
                outs = [out + row for out, row in zip(outs, bias, strict=True)]
            if product.activation is not None:
                gated = rows.gate_up_order is not None
                outs = [product.activation(*outs)] if gated else [product.activation(out) for out in outs]
            return [out.astype(product.dtype) for out in outs]

        def send(
            write: Callable[[Any], None],
            item: _Item,
            first: Array | int,
            tile: Array,
            size: int,
            nth: int,
            room: int,
        ) -> None:
            """Of a block's and a tile's outputs `size` rows from `first` on, by 8, the item's `nth`: `write` puts
            them into shared memory, into one buffer of `room` rows or two in turn, and they go meanwhile."""
            buffers = min(2, staged // room)
            at = nth % buffers * room
            plgpu.wait_smem_to_gmem(buffers - 1 if nth else 0, wait_read_only=True)
            write(out_s.at[warpgroup, pl.ds(at, size)])
            plgpu.commit_smem()
            row = lax.div(item.out_row + item.part * num_rows, 8) * 8 + first  # by 8, for TMA to see
            # Nothing of a tile that there is not: of a result of one tile, Pallas has TMA write that one instead.
            count = jnp.where(tile < m_tiles, item.count - first, 0)

            def copy(start: int, rows_: int) -> None:
                here = out_s.at[warpgroup, pl.ds(at + start, rows_)]
                there = out_g.at[pl.ds(row + start, rows_), pl.ds(tile * out_columns, out_columns)]
                plgpu.copy_smem_to_gmem(here, there, commit_group=False)

            whole = count > size - 8
            pl.when(whole)(partial(copy, 0, size))

            @pl.when(~whole)
            def _() -> None:
                for eight in range(0, size - 8, 8):
                    pl.when(count > eight)(partial(copy, eight, 8))

            plgpu.commit_smem_to_gmem_group()

        first = look_up(jnp.int32(0))  # before there is anything to wait for
        if rounding is not None:
            if not kept:
                rounding.round_share()
            elif job.results:
                pl.when((num_mine > 0) & (warpgroup < first.count))(rounding.wait_for_results)
            else:  # all blocks have the same rows
                pl.when(num_mine > 0)(lambda: keep_rows(first))
            if rounding.job == 0:
                plgpu.barrier_arrive(rounded)
        lax.fori_loop(0, num_mine, compute_item, first)
        plgpu.wait_smem_to_gmem(0)
        if rounding is not None:
            rounding.results_are_written()

    def each_stage(
        item: Callable[[Array, Array], Callable[[Array, Array], None]], before: Callable[[Array], None] | None = None
    ) -> None:
        """For each item what `item` returns of its block and its first tile, for each unit and its slot; `before` of
        how many stages there were."""

        @pl.loop(0, num_mine)
        def _(turn: Array) -> None:
            block, tile, part = place(turn)
            fill, first = item(block, tile), part * units

            def stage(step: Array, slot: Array) -> Array:
                nth = stages_before + turn * units + step

                @pl.when(nth >= num_stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                if before is not None:
                    before(nth)
                fill(first + step, slot)
                return after(slot)

            lax.fori_loop(0, units, stage, first_slot(turn))

    def fetch_weights(block: Array, tile: Array) -> Callable[[Array, Array], None]:
        """Past the weight's end TMA writes zeros."""
        expert, m = work.experts[block], pl.ds(tile, config.warpgroups_m)

        def fill(step: Array, slot: Array) -> None:
            values = g.values.at[expert, m, pl.ds(step * per_unit, per_unit)]
            plgpu.copy_gmem_to_smem(values, values_s.at[slot], full.at[slot])
            if scales_s is not None:
                scales = g.scales.at[expert, m, pl.ds(step, 1)]
                plgpu.copy_gmem_to_smem(scales, scales_s.at[slot], full.at[slot])

        return fill

    def fetch_all_weights() -> None:
        """Few before the first rows are rounded: what that loads, and tells, would take 6 us behind many, not 2."""
        if rounding is None or rounding.job:
            each_stage(fetch_weights)
        else:
            ahead = max(1, _AHEAD_BYTES // (config.warpgroups_m * unit_bytes(product.format)))
            each_stage(fetch_weights, lambda nth: pl.when(nth == ahead)(lambda: plgpu.barrier_wait(rounded)))

    def fetch_rows(block: Array, _: Array) -> Callable[[Array, Array], None]:
        first = lax.div(work.first_row(work.x_rows, block), 8) * 8  # by 8, for TMA to see
        count = work.count_of(block)

        def fill(step: Array, slot: Array) -> None:
            def copy(width: int) -> None:
                here = g.x.at[pl.ds(first, width), pl.ds(step * _COLUMNS, _COLUMNS)]
                plgpu.copy_gmem_to_smem(here, x_s.at[slot, pl.ds(0, width)], full.at[slot])
                if x_scales_s is not None:
                    here = g.x_block_scales.at[pl.ds(step, 1), pl.ds(first, width)]
                    plgpu.copy_gmem_to_smem(here, x_scales_s.at[slot, :, pl.ds(0, width)], full.at[slot])

            for_width(config.widths, count, copy)

        return fill

    def fetch_all_rows() -> None:
        if rounding is not None:
            rounding.wait_for_rows()
        each_stage(fetch_rows)

    behind = first_item + num_mine * num_cores - num_items  # items go on from where these end
    following = here._replace(first_item=behind, stages_before=stages_before + num_mine * units)
    return _Roles(compute, fetch_all_weights, (lambda: None) if kept else fetch_all_rows, following)


def _units_of(product: Product) -> int:
    return product.weight.values.shape[2] // value_rows(product.format)


def _results_of(product: Product, config: Config) -> tuple[int, int]:
    """Outputs of a tile, and rows of them that a warpgroup holds in shared memory on their way."""
    columns = TILE if product.rows.gate_up_order is None else GATED_ROWS
    return columns, min(config.block_n, config.staged_bytes // (columns * jnp.dtype(product.dtype).itemsize))


def grouped_products(
    jobs: Sequence[Job], blocks: Blocks, *, config: Config, num_rows: int, num_cores: int
) -> jax.Array:
    """The products of blocks of rows, one job after the other in one launch.

    Args:
        jobs: see `Job`. All weights are of one format.
        blocks: `x_rows` and `out_rows` are multiples of 8. All blocks must name an expert that there is; only the first
            `num_blocks`, an int or here (B,), the same number throughout, are computed. They may read past the end of
            the rows.
        num_rows: R, rows of the results, a multiple of 8. Rows that no block names may hold anything: a block writes
            its own and those up to the next multiple of 8.
        num_cores: multiprocessors to run on; all of them at once, where rows are unrounded: else it does not end.

    Returns:
        (split_k * R, rows.num_outputs) of the last job: the parts' sums one below the other.
    """
    num_compute, num_stages, block_n = config.warpgroups_m, config.num_stages, config.block_n
    first = jobs[0]
    by_block, decoded = first.rows.by_block, first.product.format == MXFP4
    given = [_Operands.of(job) for job in jobs]
    unrounded = [job.rows for job in jobs if isinstance(job.rows, Unrounded)]
    assert len(unrounded) in (0, len(jobs))
    outputs = [
        jax.ShapeDtypeStruct((job.split_k * num_rows, job.product.rows.num_outputs), job.product.dtype) for job in jobs
    ]
    kept = config.keeps_rows
    assert not kept or (unrounded and isinstance(blocks.counts, int))  # all blocks have all tokens
    rounded = [] if kept else [array for rows in unrounded for array in rows.rounded]

    def body(*refs: Any) -> None:
        rest = [*refs]
        of_jobs = [operands._make(None if one is None else rest.pop(0) for one in operands) for operands in given]
        work = blocks.taken_from(rest)
        counters_g = rest.pop(0) if unrounded else None
        results, rest = rest[: len(jobs)], rest[len(jobs) :]
        of_rounded, rest = rest[: len(rounded)], rest[len(rounded) :]
        outs_s, rest = rest[: len(jobs)], rest[len(jobs) :]
        shared = _Shared(*(None if one is None else rest.pop(0) for one in scratch))
        core = lax.axis_index("core")
        here = _Place(lax.axis_index("warpgroup"), core, core, jnp.int32(0))
        all_roles = []
        for nth, (job, g, out_g, out_s) in enumerate(zip(jobs, of_jobs, results, outs_s, strict=True)):
            rounding = None
            if counters_g is not None:
                assert isinstance(job.rows, Unrounded)
                made = of_rounded[2 * nth : 2 * nth + 2]
                if kept:
                    made = [shared.x, shared.row_scales if shared.x_scales is None else shared.x_scales]
                x = results[nth - 1] if g.unrounded is None else g.unrounded
                sources = Sources(x, g.row_of, g.static_scale)
                rounding = Rounding(
                    job.rows,
                    sources,
                    *made,
                    of_warps=shared.of_warps.at[here.warpgroup],
                    counters=counters_g,
                    barriers=shared.of_kept,
                    job=nth,
                    last=nth + 1 == len(jobs),
                    core=here.core,
                    warpgroup=here.warpgroup,
                    num_cores=num_cores,
                    num_compute=num_compute,
                )
                g = g.of_rounded(*made)
            roles = _roles(
                job,
                g,
                work,
                out_g,
                out_s,
                shared,
                here,
                rounding,
                config=config,
                num_rows=num_rows,
                num_cores=num_cores,
            )
            all_roles.append(roles)
            here = roles.next_place

        @pl.when(here.warpgroup < num_compute)
        def _() -> None:
            plgpu.set_max_registers(config.registers, action="increase")
            pl.when(here.warpgroup == 1)(lambda: plgpu.barrier_arrive(shared.turns.at[0]))
            for roles in all_roles:
                roles.compute()

        @pl.when(here.warpgroup == num_compute)
        def _() -> None:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == 0)
                def _() -> None:
                    for roles in all_roles:
                        roles.fetch_weights()

                @pl.when(warp == 1)
                def _() -> None:
                    for roles in all_roles:
                        roles.fetch_rows()

    values, scales = first.product.weight.values, given[0].scales
    value_stages = (num_stages, num_compute, value_rows(first.product.format), values.shape[-1])
    row_stages = config.row_stages(max(_units_of(job.product) for job in jobs))
    of_weights = [
        plgpu.SMEM(value_stages, values.dtype, transforms=() if decoded else fp8.SWIZZLED),
        None if scales is None else plgpu.SMEM((num_stages, num_compute, 1, scales.shape[-1]), scales.dtype),
    ]
    of_rows = [
        plgpu.SMEM((row_stages, block_n, _COLUMNS), jnp.float8_e4m3fn, transforms=fp8.SWIZZLED),
        plgpu.SMEM((row_stages, 1, config.scales_n), jnp.float32) if by_block else None,
    ]
    copies = sum(stage is not None for stage in ([*of_weights] if kept else [*of_weights, *of_rows]))
    scratch = [
        of_rows[0],
        *of_weights,
        of_rows[1],
        plgpu.SMEM((num_compute, WORDS), jnp.int32) if unrounded else None,
        plgpu.SMEM((config.scales_n,), jnp.float32) if kept and not by_block else None,
        plgpu.Barrier(num_barriers=KEPT_BARRIERS, num_arrivals=num_compute) if kept else None,
        plgpu.Barrier(num_barriers=num_stages, num_arrivals=copies),
        plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_compute),
        plgpu.Barrier(num_barriers=2, num_arrivals=1),
        plgpu.Barrier(num_arrivals=num_compute) if unrounded else None,
    ]
    on_their_way = []
    for job in jobs:
        columns, staged = _results_of(job.product, config)
        transforms = fp8.swizzled_rows(columns, job.product.dtype)
        on_their_way.append(plgpu.SMEM((num_compute, staged, columns), job.product.dtype, transforms=transforms))
    kernel = plgpu.kernel(
        body,
        out_type=[*outputs, *rounded],
        grid=(num_cores,),
        grid_names=("core",),
        num_threads=num_compute + 1,
        thread_name="warpgroup",
        scratch_types=[*on_their_way, *(one for one in scratch if one is not None)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,  # every hand-over of shared memory has a barrier of its own
        ),
    )
    operands = [array for one in given for array in one if array is not None]
    told = [jax.new_ref(counters(blocks.experts))] if unrounded else []
    return kernel(*operands, *blocks.arrays, *told)[len(jobs) - 1]
