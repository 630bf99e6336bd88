"""Attention over a whole prompt in one kernel for Hopper GPUs: scores never leave the chip (FlashAttention 3).

After `jax.experimental.pallas.ops.gpu.attention_mgpu`, which has neither sinks nor windows nor bfloat16.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jmx.pallas.attention.softmax import TILE, TO_BITS, Ref, RunningSoftmax, element_ids, hide_unseen, shared_memory
from jmx.pallas.sm90.launch import kernel_name, launch
from jmx.util.typing import Array, Float, Float32, Int32

ROWS = 64  # queries of one consumer warpgroup; two of them share the keys that a producer warpgroup loads
BLOCK = 2 * ROWS  # queries of one CTA, and keys of one step
MOST_STAGES = 4  # of the pipeline; fewer where shared memory holds fewer
MOST_CHANNELS = 128  # of values: float32 results of `ROWS` queries are in a warpgroup's registers, beside the scores
SHARED_MEMORY = 220 * 1024  # bytes for queries, keys and values; a CTA has 227 KiB, of which barriers take a part


def stages(key_dim: int, value_dim: int) -> int:
    """Stages of the pipeline that shared memory holds, at most `MOST_STAGES`. The kernel needs two."""
    queries, keys_and_values = 2 * ROWS * key_dim, BLOCK * (key_dim + value_dim)  # 2 bytes each
    return min(MOST_STAGES, (SHARED_MEMORY // 2 - queries) // keys_and_values)


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
) -> Float[Array, "B T heads V"]:
    """Causal attention of T tokens among themselves; only blocks of keys that some query sees are read.

    Args:
        query: bfloat16 or float16 (B, T, heads, D), rotated; T a multiple of `BLOCK`.
        keys, values: (B, T, kv_heads, D) and (B, T, kv_heads, V), of the same dtype; D and V as in `fits`.
        sinks: float32 (heads,), one more logit a head, without a value.
        window: how many positions a query sees, its own included; None for all.
        scale: multiplies the scores; None for D^-0.5.

    Returns:
        (B, T, heads, V) of query's dtype.
    """
    dim, factor = query.shape[3], query.shape[3] ** -0.5 if scale is None else scale
    call = _Call(query.shape[1], query.shape[2] // keys.shape[2], dim, values.shape[-1], window, factor)
    return _launch(call, query, sinks, _Prompt(keys=keys, values=values))


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
    _, length, heads, dim = query.shape
    call = _Call(length, heads // pages.shape[2], dim, dim, window, dim**-0.5)
    return _launch(call, query, sinks, _Pages(pages=pages, tables=tables, starts=starts))


def _launch(call: "_Call", query: jax.Array, sinks: jax.Array, source: "_Prompt | _Pages") -> jax.Array:
    """The kernel over keys and values of a prompt, or over pages."""
    batch, length, heads, _ = query.shape

    def body(operands: _Operands, out: Ref, *, shared: _Shared) -> None:
        _kernel(call, operands, out, shared)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, length, heads, call.value_dim), query.dtype),
        grid=(heads, length // BLOCK, batch),
        grid_names=("heads", "tile", "batch"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=kernel_name(
            "flash_prefill",
            group=call.group,
            dim=call.dim,
            value_dim=call.value_dim,
            stages=call.stages,
            window=call.window,
            pages=isinstance(source, _Pages),
        ),
        scratch_types={"shared": _Shared.types(call, query.dtype)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return launch(kernel, _Operands(query=query, sinks=sinks, source=source))


@dataclass(frozen=True)
class _Call:
    """What is static of a call. `group`: query heads to a key head; `dim`: of queries and keys."""

    length: int
    group: int
    dim: int
    value_dim: int
    window: int | None
    scale: float

    @property
    def stages(self) -> int:
        return stages(self.dim, self.value_dim)


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
    """The kernel's operands, or references to them in global memory."""

    query: Ref
    sinks: Ref
    source: _Prompt | _Pages


class _Shared(NamedTuple):
    """The shared memory of a CTA, and its barriers: types, or references.

    Rows are by consumer warpgroup: the queries, and then the result. Keys and values are by stage. At `turn` the two
    consumers meet.
    """

    rows: Ref
    keys: Ref
    values: Ref
    rows_full: Ref
    keys_full: Ref
    values_full: Ref
    keys_empty: Ref
    values_empty: Ref
    turn: Ref

    @classmethod
    def types(cls, call: _Call, dtype: jax.typing.DTypeLike) -> "_Shared":
        return cls(
            rows=shared_memory(2, ROWS, call.dim, dtype=dtype),
            keys=shared_memory(call.stages, BLOCK, call.dim, dtype=dtype),
            values=shared_memory(call.stages, BLOCK, call.value_dim, dtype=dtype),
            rows_full=plgpu.Barrier(num_barriers=2),
            keys_full=plgpu.Barrier(num_barriers=call.stages),
            values_full=plgpu.Barrier(num_barriers=call.stages),
            keys_empty=plgpu.Barrier(num_arrivals=2, num_barriers=call.stages),
            values_empty=plgpu.Barrier(num_arrivals=2, num_barriers=call.stages),
            turn=plgpu.Barrier(num_arrivals=2),
        )

    @jax.named_scope("take_turns")
    def take_turns(self) -> None:
        """Lets one consumer multiply while the other takes exponentials."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


class _Tile(NamedTuple):
    """A block of queries of one head, and the blocks of keys that they see: `steps` of them from `first` on.

    `tile` is its number among those of the call's row, and `at` among those of positions.
    """

    head: jax.Array
    tile: jax.Array
    at: jax.Array
    row: jax.Array
    first: jax.Array
    steps: jax.Array


def _kernel(call: _Call, operands: _Operands, out: Ref, smem: _Shared) -> None:
    """The kernel: warpgroups 0 and 1 are consumers, of half the tile's queries each, and 2 is the producer."""
    head, tile, row = (lax.axis_index(axis) for axis in ("heads", "tile", "batch"))
    tile = call.length // BLOCK - 1 - tile  # the longest first, so that the short ones fill up the end
    warpgroup, window = lax.axis_index("warpgroup"), call.window
    at = tile + operands.source.first_block(row)
    first = jnp.int32(0) if window is None else lax.div(jnp.maximum(at * BLOCK - (window - 1), 0), BLOCK)
    work = _Tile(head, tile, at, row, first, at + 1 - first)
    pl.when(warpgroup < 2)(lambda: _consume(call, work, operands, out, smem, warpgroup))
    pl.when(warpgroup == 2)(lambda: _produce(call, work, operands, smem))


@jax.named_scope("producer")
def _produce(call: _Call, work: _Tile, operands: _Operands, smem: _Shared) -> None:
    """Loads the tile's keys and values, block by block, as stages become empty."""
    plgpu.set_max_registers(40, action="decrease")
    kv_head = lax.div(work.head, jnp.int32(call.group))

    @pl.loop(0, work.steps)
    def _step(step: jax.Array) -> None:
        stage = lax.rem(step, jnp.int32(call.stages))
        keys, values = operands.source.block(work.row, work.first + step, kv_head)
        for source, target, full, empty in (
            (keys, smem.keys, smem.keys_full, smem.keys_empty),
            (values, smem.values, smem.values_full, smem.values_empty),
        ):
            with jax.named_scope("acquire"):
                pl.when(step >= call.stages)(partial(plgpu.barrier_wait, empty.at[stage]))
            plgpu.copy_gmem_to_smem(source, target.at[stage], full.at[stage])


@jax.named_scope("consumer")
def _consume(call: _Call, work: _Tile, operands: _Operands, out: Ref, smem: _Shared, warpgroup: jax.Array) -> None:
    """Attention of the queries of one consumer warpgroup."""
    plgpu.set_max_registers(232, action="increase")
    rows, rows_full = smem.rows.at[warpgroup], smem.rows_full.at[warpgroup]
    start, here = work.at * BLOCK + warpgroup * ROWS, work.tile * BLOCK + warpgroup * ROWS
    with jax.named_scope("prologue"):
        plgpu.copy_gmem_to_smem(operands.query.at[work.row, pl.ds(here, ROWS), work.head], rows, rows_full)
        plgpu.barrier_wait(rows_full)
    # The sink is where the running softmax begins: the peak so far, with a total of 1 and nothing gathered.
    softmax = RunningSoftmax.begin(ROWS, call.value_dim, peak=operands.sinks[work.head] * TO_BITS, total=1)
    pl.when(warpgroup == 1)(smem.take_turns)

    def attend(step: jax.Array, softmax: RunningSoftmax, *, masked: bool) -> RunningSoftmax:
        return _attend_block(call, work, smem, rows, start, step, softmax, masked=masked)

    masked_from = 0 if call.window is not None else work.steps - 1  # all queries see the blocks before it whole
    if call.window is None:
        softmax = lax.fori_loop(0, masked_from, partial(attend, masked=False), softmax)
    gathered, _, total = lax.fori_loop(masked_from, work.steps, partial(attend, masked=True), softmax)
    pl.when(warpgroup == 0)(smem.take_turns)
    with jax.named_scope("epilogue"):
        _store(call, work, here, gathered / lax.broadcast_in_dim(total, gathered.shape, [0]), rows, out)


def _store(call: _Call, work: _Tile, first_row: jax.Array, results: jax.Array, rows: Ref, out: Ref) -> None:
    """Writes a consumer warpgroup's results to `out`, from `first_row` on, through the shared memory of its queries."""
    staged = rows if call.value_dim == call.dim else rows.at[:, pl.ds(0, call.value_dim)]
    staged[...] = results.astype(rows.dtype)
    plgpu.commit_smem()
    count = ROWS if call.value_dim == call.dim else TILE  # what is copied must be contiguous
    for first in range(0, ROWS, count):
        target = out.at[work.row, pl.ds(first_row + first, count), work.head]
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(first, count)], target)
    plgpu.wait_smem_to_gmem(0)


def _attend_block(
    call: _Call,
    work: _Tile,
    smem: _Shared,
    rows: Ref,
    start: jax.Array,
    step: jax.Array,
    softmax: RunningSoftmax,
    *,
    masked: bool,
) -> RunningSoftmax:
    """`softmax` of `rows`, the queries from position `start` on, with a step's keys and values."""
    stage = lax.rem(step, jnp.int32(call.stages))
    with jax.named_scope("wait"):
        plgpu.barrier_wait(smem.keys_full.at[stage])

    def multiply(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, rows, smem.keys.at[stage].transpose((1, 0)))
        smem.take_turns()
        return accumulator[...]

    with jax.named_scope("scores"):
        scores = pl.run_scoped(multiply, plgpu.ACC((ROWS, BLOCK), jnp.float32))
    plgpu.barrier_arrive(smem.keys_empty.at[stage])
    if masked:
        queries, keys = element_ids(scores.shape, 0), element_ids(scores.shape, 1)
        distance = (queries + start) - (keys + (work.first + step) * BLOCK)
        scores = hide_unseen(scores, distance, call.window)
    (gathered, peak, total), weights = softmax.add_scores(scores, TO_BITS * call.scale)
    weights = weights.astype(rows.dtype)
    gathered, total, peak, weights = lax.optimization_barrier((gathered, total, peak, weights))
    plgpu.barrier_arrive(smem.turn)
    with jax.named_scope("wait"):
        plgpu.barrier_wait(smem.values_full.at[stage])
        plgpu.barrier_wait(smem.turn)
    softmax = RunningSoftmax(gathered, peak, total).add_values(weights, smem.values.at[stage])
    plgpu.barrier_arrive(smem.values_empty.at[stage])
    return softmax
