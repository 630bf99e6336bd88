"""Attention over a whole prompt in one kernel for Hopper GPUs: scores never leave the chip (FlashAttention 3).

After `jax.experimental.pallas.ops.gpu.attention_mgpu`, which has neither sinks nor windows nor bfloat16.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jmx.pallas.attention.prefill_memory import ROWS, Shared
from jmx.pallas.attention.schedule import BLOCK, Item, Items
from jmx.pallas.attention.softmax import TO_BITS, RunningSoftmax, element_ids, hide_unseen
from jmx.pallas.sm90.launch import kernel_name, launch
from jmx.pallas.sm90.operation import Ref
from jmx.util.typing import Array, Float, Float32, Int32

STORED = 64  # channels of results that are written at a time, where these are a multiple of that
LONG = 2048  # tokens of a prompt from which on three consumers are used: they wait for each other at its last keys
MOST_STAGES = 4  # of the pipeline; fewer where shared memory holds fewer
MOST_CHANNELS = 128  # of values: float32 results of `ROWS` queries are in a warpgroup's registers, beside the scores
PRODUCER_REGISTERS = {2: 40, 3: 32}  # of a thread, by the number of consumers
CONSUMER_REGISTERS = {2: 232, 3: 160}
SHARED_MEMORY = 226 * 1024  # bytes for queries, results, keys and values; a CTA has 227 KiB, with barriers

_State = tuple[RunningSoftmax, jax.Array]  # the softmax before a step, and the scores of that step


def stages(key_dim: int, value_dim: int, consumers: int = 2) -> int:
    """Stages of the pipeline that shared memory holds, at most `MOST_STAGES`. The kernel needs two."""
    queries_and_results = consumers * ROWS * (key_dim + _stored(value_dim))  # 2 bytes each
    return min(MOST_STAGES, (SHARED_MEMORY // 2 - queries_and_results) // (BLOCK * (key_dim + value_dim)))


def _stored(value_dim: int) -> int:
    return STORED if value_dim % STORED == 0 else value_dim


def fits(key_dim: int, value_dim: int) -> bool:
    """Whether the kernel has heads of these sizes."""
    whole = key_dim % 16 == 0 and value_dim % 16 == 0
    return whole and value_dim <= min(key_dim, MOST_CHANNELS) and stages(key_dim, value_dim) >= 2


def flash_prefill(
    query: Float[Array, "B T heads D"],
    keys: Float[Array, "B T kv_heads D"],
    values: Float[Array, "B T kv_heads V"],
    sinks: Float32[Array, " heads"],
    window: int | None,
    scale: float | None = None,
    core_count: int | None = None,
) -> Float[Array, "B T heads V"]:
    """Causal attention of T tokens among themselves; only blocks of keys that some query sees are read.

    Args:
        query: bfloat16 or float16 (B, T, heads, D), rotated; T a multiple of `BLOCK`.
        keys, values: (B, T, kv_heads, D) and (B, T, kv_heads, V), of the same dtype; D and V as in `fits`.
        sinks: float32 (heads,), one more logit a head, without a value.
        window: how many positions a query sees, its own included; None for all.
        scale: multiplies the scores; None for D^-0.5.
        core_count: the GPU's SMs, on each of which a CTA takes blocks of queries in turn; None: each block has its CTA.

    Returns:
        (B, T, heads, V) of query's dtype.
    """
    batch, length, heads, dim = query.shape
    factor = dim**-0.5 if scale is None else scale
    group, value_dim = heads // keys.shape[2], values.shape[-1]
    consumers = _consumers(length, dim, window)
    items = Items(batch, length, heads, window, 0, token_bytes=2 * (dim + value_dim) / group, queries=consumers * ROWS)
    items = replace(items, ctas=items.count if core_count is None else min(core_count, items.count))
    call = _Call(items, group, dim, value_dim, factor)
    return _launch(call, query, sinks, _Prompt(keys=keys, values=values))


def _consumers(length: int, key_dim: int, window: int | None) -> int:
    """Consumer warpgroups of a CTA. Three hide more of each other's waits, where their registers hold a step."""
    return 3 if key_dim <= 64 and window is None and length >= LONG else 2


def flash_prefill_pages(
    query: Float[Array, "M block heads D"],
    pages: Float[Array, "2 pages kv_heads block D"],
    tables: Int32[Array, "M pages_of_row"],
    starts: Int32[Array, " M"],
    sinks: Float32[Array, " heads"],
    window: int | None,
) -> Float[Array, "M block heads D"]:
    """Causal attention of blocks of `BLOCK` consecutive tokens, each over the pages of its row, its own included.

    Args:
        query: bfloat16 or float16 (M, BLOCK, heads, D), rotated.
        pages: (2, pages, kv_heads, BLOCK, D), keys and values of the same dtype; D as in `fits`.
        tables: int32 (M, N), the pages of each block's row.
        starts: int32 (M,), the position of each block's first token, a multiple of `BLOCK`.
        sinks: float32 (heads,), one more logit a head, without a value.
        window: how many positions a query sees, its own included; None for all.

    Returns:
        (M, BLOCK, heads, D) of query's dtype.
    """
    batch, length, heads, dim = query.shape
    # Rows have any lengths, so each block has a CTA: the GPU starts one wherever another has ended.
    group = heads // pages.shape[2]
    items = Items(batch, length, heads, window, ctas=heads * batch, token_bytes=4 * dim / group)
    call = _Call(items, group, dim, dim, dim**-0.5)
    return _launch(call, query, sinks, _Pages(pages=pages, tables=tables, starts=starts))


def _launch(call: "_Call", query: jax.Array, sinks: jax.Array, source: "_Prompt | _Pages") -> jax.Array:
    """The kernel over keys and values of a prompt, or over pages."""
    kernel = plgpu.kernel(
        partial(_kernel, call),
        out_type=jax.ShapeDtypeStruct((*query.shape[:3], call.value_dim), query.dtype),
        grid=(call.items.ctas,),
        grid_names=("cta",),
        num_threads=call.consumers + 1,
        thread_name="warpgroup",
        kernel_name=kernel_name(
            "flash_prefill",
            group=call.group,
            dim=call.dim,
            value_dim=call.value_dim,
            stages=call.stages,
            window=call.window,
            persistent=call.items.ctas < call.items.count,
            pages=isinstance(source, _Pages),
            consumers=call.consumers if call.consumers > 2 else None,
        ),
        scratch_types={
            "shared": Shared.types(
                call.stages, call.consumers, call.dim, call.value_dim, _stored(call.value_dim), query.dtype
            )
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the pipeline has its own
            reduction_scratch_bytes=0,  # rows are reduced within a warp
        ),
    )
    operands = _Operands(query=query, sinks=sinks, source=source, schedule=call.items.schedule())
    return launch(kernel, operands)


@dataclass(frozen=True)
class _Call:
    """What is static of a call. `group`: query heads to a key head; `dim`: of queries and keys."""

    items: Items
    group: int
    dim: int
    value_dim: int
    scale: float

    @property
    def consumers(self) -> int:
        return self.items.queries // ROWS

    @property
    def stages(self) -> int:
        return stages(self.dim, self.value_dim, self.consumers)

    @property
    def window(self) -> int | None:
        return self.items.window

    @property
    def is_queued(self) -> bool:
        """Whether tensor cores, not exponentials, bound a step: then products are queued right after each other."""
        return self.dim > 128 and self.window is None


class _Prompt(NamedTuple):
    """Keys and values of prompts, or references to them."""

    keys: Ref
    values: Ref

    def first_block(self, row: jax.Array) -> jax.Array:
        """The block of positions at which a row's queries begin."""
        return jnp.int32(0)

    def block(self, row: jax.Array, number: jax.Array, kv_head: jax.Array) -> tuple[Ref, Ref]:
        """The keys and values of a block of positions of a row."""
        at = (row, pl.ds(number * BLOCK, BLOCK), kv_head)
        return self.keys.at[at], self.values.at[at]


class _Pages(NamedTuple):
    """Pages of keys and values, rows' tables of them, and the positions of their queries; or references to them."""

    pages: Ref
    tables: Ref
    starts: Ref

    def first_block(self, row: jax.Array) -> jax.Array:
        """As `_Prompt`'s."""
        return lax.div(self.starts[row], jnp.int32(BLOCK))

    def block(self, row: jax.Array, number: jax.Array, kv_head: jax.Array) -> tuple[Ref, Ref]:
        """As `_Prompt`'s."""
        page = self.tables[row, number]
        return self.pages.at[0, page, kv_head], self.pages.at[1, page, kv_head]


class _Operands(NamedTuple):
    """The kernel's operands, or references to them in global memory. Without a schedule, each CTA has an item."""

    query: Ref
    sinks: Ref
    source: _Prompt | _Pages
    schedule: Ref


def _kernel(call: _Call, operands: _Operands, out: Ref, *, shared: Shared) -> None:
    """The kernel: the first warpgroups are consumers, of `ROWS` of an item's queries each, the last is the producer."""
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup < call.consumers)(lambda: _consume(call, operands, out, shared, warpgroup))
    pl.when(warpgroup == call.consumers)(lambda: _produce(call, operands, shared))


@jax.named_scope("producer")
def _produce(call: _Call, operands: _Operands, smem: Shared) -> None:
    """Loads queries, keys and values, block by block, as their places become empty."""
    plgpu.set_max_registers(PRODUCER_REGISTERS[call.consumers], action="decrease")

    def load(item: Item) -> None:
        kv_head = lax.div(item.head, jnp.int32(call.group))
        keys, values = operands.source.block(item.row, item.first, kv_head)
        smem.keys.load(item.before, keys)
        pl.when(item.before > 0)(lambda: plgpu.barrier_wait(smem.rows_empty))
        for part in range(call.consumers):
            at = pl.ds(item.tile * call.items.queries + part * ROWS, ROWS)
            queries = operands.query.at[item.row, at, item.head]
            plgpu.copy_gmem_to_smem(queries, smem.rows.at[part], smem.rows_full.at[part])
        smem.values.load(item.before, values)

        @pl.loop(1, item.steps)
        def _(step: jax.Array) -> None:
            keys, values = operands.source.block(item.row, item.first + step, kv_head)
            smem.keys.load(item.before + step, keys)
            smem.values.load(item.before + step, values)

    call.items.each(operands.schedule, operands.source.first_block, load)


@jax.named_scope("consumer")
def _consume(call: _Call, operands: _Operands, out: Ref, smem: Shared, warpgroup: jax.Array) -> None:
    """Attention of the queries of one consumer warpgroup."""
    plgpu.set_max_registers(CONSUMER_REGISTERS[call.consumers], action="increase")
    pl.when(warpgroup == call.consumers - 1)(lambda: smem.pass_turn(warpgroup))  # the first one has the first

    def attend(item: Item) -> None:
        sink = operands.sinks[item.head] * TO_BITS  # read while keys are multiplied
        softmax = RunningSoftmax.begin(ROWS, call.value_dim, open=True)
        attend_blocks = _attend_queued if call.is_queued else _attend_blocks
        softmax = attend_blocks(call, item, smem, warpgroup, softmax)
        results = softmax.closed().results(sink)
        here = pl.ds(item.tile * call.items.queries + warpgroup * ROWS, ROWS)
        _store(results, smem.results.at[warpgroup], out.at[item.row, here, item.head])

    call.items.each(operands.schedule, operands.source.first_block, attend)
    plgpu.wait_smem_to_gmem(0)


def _attend_blocks(
    call: _Call, item: Item, smem: Shared, warpgroup: jax.Array, softmax: RunningSoftmax
) -> RunningSoftmax:
    """`softmax` of a consumer's queries with all keys and values that they see."""
    rows, start = smem.rows.at[warpgroup], item.start + warpgroup * ROWS

    def distances(step: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """From keys to queries, in positions."""
        keys = element_ids(shape, 1) + (item.first + step) * BLOCK
        return element_ids(shape, 0) + start - keys

    def attend(
        step: jax.Array,
        softmax: RunningSoftmax,
        *,
        hide: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        count: int = BLOCK,
        is_last: bool = False,
    ) -> RunningSoftmax:
        """With the first `count` keys and values of a step; the turn is this consumer's before and after it."""
        part = pl.ds(0, count)
        keys = smem.keys.wait(item.before + step).at[part]

        def multiply(accumulator: Ref) -> jax.Array:
            plgpu.wgmma(accumulator, rows, keys.transpose((1, 0)))
            smem.pass_turn(warpgroup)
            return accumulator[...]

        with jax.named_scope("scores"):
            scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, count), jnp.float32))
        smem.keys.release(item.before + step)
        if is_last:
            plgpu.barrier_arrive(smem.rows_empty)
        if hide is not None:
            scores = hide(scores, distances(step, scores.shape))
        softmax, weights = softmax.add_scores(scores, TO_BITS * call.scale)
        softmax, weights = lax.optimization_barrier((softmax, weights.astype(rows.dtype)))
        values = smem.values.wait(item.before + step).at[part]
        smem.take_turn(warpgroup)
        softmax = softmax.add_values(weights, values)
        smem.values.release(item.before + step)
        return softmax

    with jax.named_scope("prologue"):
        plgpu.barrier_wait(smem.rows_full.at[warpgroup])
    smem.take_turn(warpgroup)
    # Queries see the blocks before the last one whole, but for those in which the window of one of them begins.
    last, whole_from = item.steps - 1, jnp.int32(0)
    if call.consumers > 2:
        last = jnp.minimum(lax.div(start + (ROWS - 1), jnp.int32(BLOCK)), last)  # which the others may see more of
    if call.window is not None:
        whole_from = jnp.clip(item.at + (BLOCK - 1 - call.window) // BLOCK + 1 - item.first, 0, last)
        softmax = lax.fori_loop(0, whole_from, partial(attend, hide=partial(_hide_outside, call.window)), softmax)
    softmax = lax.fori_loop(whole_from, last, attend, softmax)
    window = None if call.window is None or call.window >= BLOCK else call.window
    attend_last = partial(attend, last, hide=partial(hide_unseen, window=window), is_last=True)
    if call.window is None:
        # Queries that begin a block see the first half of the last block alone. Windows are bound by their ends.
        is_half = warpgroup == 0 if call.consumers == 2 else lax.rem(start, jnp.int32(BLOCK)) == 0
        softmax = lax.cond(is_half, partial(attend_last, count=ROWS), attend_last, softmax)
    else:
        softmax = attend_last(softmax)
    smem.pass_turn(warpgroup)
    if call.consumers > 2:
        pl.loop(last + 1, item.steps)(lambda step: smem.skip_step(item.before + step, warpgroup))
    return softmax


def _attend_queued(
    call: _Call, item: Item, smem: Shared, warpgroup: jax.Array, softmax: RunningSoftmax
) -> RunningSoftmax:
    """`_attend_blocks` without windows: a step's values and the next one's keys are multiplied without a gap."""
    rows, start = smem.rows.at[warpgroup], item.start + warpgroup * ROWS
    last = item.steps - 1

    def weigh(softmax: RunningSoftmax, scores: jax.Array) -> tuple[RunningSoftmax, jax.Array]:
        softmax, weights = softmax.add_scores(scores, TO_BITS * call.scale)
        return lax.optimization_barrier((softmax, weights.astype(rows.dtype)))

    def attend(step: jax.Array, state: _State, *, count: int = BLOCK) -> _State:
        """Adds a step, and multiplies the first `count` keys of the next one."""
        softmax, weights = weigh(*state)
        here = item.before + step
        values = smem.values.wait(here)
        keys = smem.keys.wait(here + 1).at[pl.ds(0, count)]
        smem.take_turn(warpgroup)
        after = softmax.add_values_and_score(
            weights,
            values,
            rows,
            keys,
            queued=partial(smem.pass_turn, warpgroup),
            read=partial(smem.values.release, here),
        )
        smem.keys.release(here + 1)
        return after

    def finish(state: _State, *, count: int = BLOCK) -> RunningSoftmax:
        """Adds the last step, of `count` keys."""
        plgpu.barrier_arrive(smem.rows_empty)
        softmax, scores = state
        keys = element_ids(scores.shape, 1) + (item.first + last) * BLOCK
        scores = hide_unseen(scores, element_ids(scores.shape, 0) + start - keys, None)
        softmax, weights = weigh(softmax, scores)
        values = smem.values.wait(item.before + last).at[pl.ds(0, count)]
        smem.take_turn(warpgroup)
        softmax = softmax.add_values(weights, values)
        smem.pass_turn(warpgroup)
        smem.values.release(item.before + last)
        return softmax

    def finish_half(state: _State) -> RunningSoftmax:
        return finish(attend(last - 1, state, count=ROWS), count=ROWS)

    state = softmax, _first_scores(item, smem, warpgroup)
    # The first consumer's queries see the first half of the last block alone.
    is_half = (warpgroup == 0) & (last > 0)
    state = lax.fori_loop(0, last - is_half.astype(jnp.int32), attend, state)
    return lax.cond(is_half, finish_half, finish, state)


def _first_scores(item: Item, smem: Shared, warpgroup: jax.Array) -> jax.Array:
    """The scores of a consumer's queries over the keys of an item's first step."""
    with jax.named_scope("prologue"):
        plgpu.barrier_wait(smem.rows_full.at[warpgroup])
    keys = smem.keys.wait(item.before)
    smem.take_turn(warpgroup)

    def multiply(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, smem.rows.at[warpgroup], keys.transpose((1, 0)))
        smem.pass_turn(warpgroup)
        return accumulator[...]

    with jax.named_scope("scores"):
        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK), jnp.float32))
    smem.keys.release(item.before)
    return scores


def _hide_outside(window: int, scores: jax.Array, distance: jax.Array) -> jax.Array:
    """`hide_unseen` of keys that are not ahead of the queries."""
    return jnp.where(distance < window, scores, -jnp.inf)


@jax.named_scope("epilogue")
def _store(results: jax.Array, staged: Ref, target: Ref) -> None:
    """Writes a consumer's results to global memory, as many channels at a time as `staged`, in shared memory, has."""
    width = staged.shape[-1]
    for first in range(0, results.shape[-1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staged[...] = results[:, first : first + width].astype(target.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, target.at[:, pl.ds(first, width)])
