"""Attention of one new token a row over its cache: a kernel for Hopper GPUs that splits the keys (flash decoding)."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jmx.pallas.attention.softmax import TILE, TO_BITS, RunningSoftmax, SplitResults, shared_memory, token_scores
from jmx.pallas.sm90.launch import kernel_name, launch
from jmx.pallas.sm90.operation import Ref
from jmx.util.typing import Array, Float, Float32, Int32

ROWS = 64  # of a tensor core's product: the query heads that share keys, and unused ones
PAGE = 128  # positions by which capacities are divided: those of a page
KEYS = 64  # of one step, or twice as many where these are all
STAGES = 2  # of the pipeline: steps whose keys and values are in flight
UNSPLIT = 256  # keys that one CTA takes in any case: splitting so few would only add results to sum
SPLITS = 32  # CTAs that share a long row's keys, at most, of two blocks each at least
CTAS = 264  # two on each SM run at a time; where a call has so many, splitting keys further only adds results to sum
MOST_CHANNELS = 128  # of a head: float32 results of `ROWS` queries are in a warpgroup's registers, beside the scores


def fits(group: int, dim: int) -> bool:
    """Whether the kernel has `group` query heads of this size to a key head."""
    return group <= ROWS and dim % 16 == 0 and dim <= MOST_CHANNELS


def flash_decode(
    query: Float[Array, "B heads D"],
    cache: Float[Array, "2 rows kv_heads C D"],
    sinks: Float32[Array, " heads"],
    positions: Int32[Array, " B"],
    window: int | None,
    tables: Int32[Array, "B pages_of_row"] | None = None,
) -> Float[Array, "B heads D"]:
    """Attention of one token a row over positions 0 to its own.

    Args:
        query: bfloat16 or float16 (B, heads, D), rotated; heads to a key head, and D, as in `fits`. Heads that are more
            than `TILE` to a key head, and not a multiple of it, are padded with zeros.
        cache: (2, B, kv_heads, C, D), keys and values of the same dtype, the token's own included; C by `PAGE`.
        sinks: float32 (heads,), one more logit a head, without a value.
        positions: int32 (B,), each token's own.
        window: how many positions it sees, its own included; None for all.
        tables: int32 (B, N), of a cache in pages of `PAGE` tokens, (2, pages, kv_heads, PAGE, D): the pages of each
            row. None: the cache has a row for each of the query.

    Returns:
        (B, heads, D) of query's dtype.
    """
    batch, heads, dim = query.shape
    _, num_rows, kv_heads, length, _ = cache.shape
    capacity = length if tables is None else PAGE * tables.shape[1]
    blocks = capacity // KEYS if window is None else -(-(window - 1) // KEYS) + 1
    splits = _splits(blocks, batch * kv_heads)
    keys = _keys(blocks, splits, batch * kv_heads, window)
    call = _Call(num_rows, heads // kv_heads, kv_heads, length, dim, keys, splits, window)
    by_head = query.reshape(batch, kv_heads, call.group, dim)
    whole = jax.ShapeDtypeStruct((batch, kv_heads, call.stored, dim), query.dtype)
    padded = by_head if call.stored == call.group else jnp.pad(by_head, _end(2, call.stored - call.group))

    kernel = plgpu.kernel(
        partial(_attend_split, call),
        out_type=[whole if splits == 1 else _split_results(call, batch)],
        grid=(splits, kv_heads, batch),
        grid_names=("split", "kv_head", "row"),
        kernel_name=kernel_name(
            "flash_decode", group=call.group, dim=dim, splits=splits, window=window, pages=tables is not None
        ),
        scratch_types={"shared": _Shared.types(call, query.dtype)},
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),  # rows are in a warp each
    )
    operands = _Operands(padded, cache.reshape(-1, dim), sinks, positions, tables)
    (results,) = launch(kernel, operands)
    if splits > 1:
        results = _combine(results, sinks.reshape(kv_heads, call.group)).astype(query.dtype)
    return results[:, :, : call.group].reshape(query.shape)


def _splits(blocks: int, units: int) -> int:
    """CTAs that share a row's `blocks` of `KEYS` keys, of so many `units`: rows times key heads."""
    if blocks * KEYS <= UNSPLIT:
        return 1
    return max(1, min(SPLITS, blocks // 2, CTAS // units))


def _keys(blocks: int, splits: int, units: int, window: int | None) -> int:
    """Keys of one step: twice `KEYS` where all of a CTA's are then in flight at once, and CTAs are few.

    Of more CTAs, several on an SM hide each other's waits, and need its shared memory.
    """
    if window is None:
        return 2 * KEYS if blocks <= 2 * splits and units * splits <= CTAS // 2 else KEYS
    return 2 * KEYS if STAGES < blocks <= 2 * STAGES and units <= CTAS // 8 else KEYS


def _end(axis: int, count: int) -> list[tuple[int, int]]:
    """`jnp.pad`'s widths for `count` elements at the end of an axis of four."""
    return [(0, count if its == axis else 0) for its in range(4)]


def _split_results(call: "_Call", batch: int) -> SplitResults:
    """float32 (splits, B, kv_heads, stored, D), and peaks and totals (splits, B, kv_heads, tiles' rows)."""
    by_head = call.splits, batch, call.kv_heads
    peaks = jax.ShapeDtypeStruct((*by_head, call.rows), jnp.float32)  # TMA copies multiples of 16 bytes
    return SplitResults(jax.ShapeDtypeStruct((*by_head, call.stored, call.dim), jnp.float32), peaks, peaks)


@dataclass(frozen=True)
class _Call:
    """What is static of a call.

    Args:
        num_rows: of the cache, or its pages.
        group: query heads to a key head.
        length: tokens of a row of the cache, or of a page.
        keys: of one step.
    """

    num_rows: int
    group: int
    kv_heads: int
    length: int
    dim: int
    keys: int
    splits: int
    window: int | None

    @property
    def rows(self) -> int:
        """Of shared memory's tiles that have a group's queries."""
        return -(-self.group // TILE) * TILE

    @property
    def stored(self) -> int:
        """Rows of a group's queries in global memory. TMA copies a tile or part of one, or several whole ones."""
        return self.group if self.group < TILE else self.rows


class _Operands(NamedTuple):
    """The kernel's operands, or references to them in global memory. `tables` may be None."""

    query: Ref
    cache: Ref
    sinks: Ref
    positions: Ref
    tables: Ref


class _Shared(NamedTuple):
    """The shared memory of a CTA, and its barriers: types, or references. Keys and values are by stage."""

    rows: Ref
    keys_and_values_or_results: Ref
    rows_full: Ref
    keys_full: Ref
    values_full: Ref

    @classmethod
    def types(cls, call: _Call, dtype: jax.typing.DTypeLike) -> "_Shared":
        return cls(
            rows=shared_memory(ROWS, call.dim, dtype=dtype),
            keys_and_values_or_results=plgpu.RefUnion(
                [
                    shared_memory(STAGES, call.keys, call.dim, dtype=dtype),
                    shared_memory(STAGES, call.keys, call.dim, dtype=dtype),
                ],
                [shared_memory(ROWS, call.dim, dtype=jnp.float32), plgpu.SMEM((2, ROWS), jnp.float32)],
            ),
            rows_full=plgpu.Barrier(),
            keys_full=plgpu.Barrier(num_barriers=STAGES),
            values_full=plgpu.Barrier(num_barriers=STAGES),
        )

    @property
    def keys(self) -> Ref:
        (keys, _), _ = self.keys_and_values_or_results
        return keys

    @property
    def values(self) -> Ref:
        (_, values), _ = self.keys_and_values_or_results
        return values

    @property
    def gathered(self) -> Ref:
        _, (gathered, _) = self.keys_and_values_or_results
        return gathered

    @property
    def peak_and_total(self) -> Ref:
        _, (_, peak_and_total) = self.keys_and_values_or_results
        return peak_and_total


class _Split(NamedTuple):
    """The keys that a CTA takes: every `splits`-th block of a row's from `first + split` on.

    Args:
        split, kv_head, row: the CTA's place in the grid.
        position: of the query.
        first: the first block of keys that the query sees.
        steps: how many blocks the CTA takes.
    """

    split: jax.Array
    kv_head: jax.Array
    row: jax.Array
    position: jax.Array
    first: jax.Array
    steps: jax.Array

    @classmethod
    def of_cta(cls, call: _Call, positions: Ref) -> "_Split":
        split, kv_head, row = (lax.axis_index(axis) for axis in ("split", "kv_head", "row"))
        position, window = positions[row], call.window
        first = jnp.int32(0) if window is None else lax.div(jnp.maximum(position - (window - 1), 0), call.keys)
        blocks = lax.div(position, call.keys) + 1 - first
        return cls(split, kv_head, row, position, first, lax.div(blocks - split + call.splits - 1, call.splits))

    def start(self, call: _Call, step: jax.Array) -> jax.Array:
        """The position at which a step's keys begin."""
        return (self.first + self.split + step * call.splits) * call.keys


def _attend_split(call: _Call, operands: _Operands, results: Any, *, shared: _Shared) -> None:
    """The kernel: the softmax of a key head's queries over a split of the keys.

    `results` are `SplitResults`; or if there is one split, the softmax with the sinks in it, like the query.
    """
    split = _Split.of_cta(call, operands.positions)
    # TMA reads zeros for rows beyond those of a group, and does not write them; a constant start would be an error.
    used, ours = pl.ds(0, call.rows), pl.ds(split.split * 0, call.rows)
    with jax.named_scope("prologue"):
        its = operands.query.at[split.row, split.kv_head, ours]
        plgpu.copy_gmem_to_smem(its, shared.rows.at[used], shared.rows_full)
        for step in range(STAGES):
            pl.when(step < split.steps)(lambda step=step: _load(call, split, operands, shared, jnp.int32(step)))
        plgpu.barrier_wait(shared.rows_full)
        sinks = _sinks_by_row(call, operands.sinks, split.kv_head) * TO_BITS if call.splits == 1 else None

    def attend(step: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        softmax = _attend_block(call, split, shared, step, softmax)
        pl.when(step + STAGES < split.steps)(lambda: _load(call, split, operands, shared, step + STAGES))
        return softmax

    softmax = lax.fori_loop(0, split.steps, attend, RunningSoftmax.begin(ROWS, call.dim))
    with jax.named_scope("epilogue"):
        if sinks is not None:
            shared.rows[...] = softmax.results(sinks).astype(shared.rows.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(shared.rows.at[used], results.at[split.row, split.kv_head, ours])
            plgpu.wait_smem_to_gmem(0)
            return
        shared.gathered[...] = softmax.gathered
        shared.peak_and_total[0] = softmax.peak
        shared.peak_and_total[1] = softmax.total
        plgpu.commit_smem()
        place = split.split, split.row, split.kv_head, ours
        plgpu.copy_smem_to_gmem(shared.gathered.at[used], results.gathered.at[place])
        plgpu.copy_smem_to_gmem(shared.peak_and_total.at[0, used], results.peaks.at[place])
        plgpu.copy_smem_to_gmem(shared.peak_and_total.at[1, used], results.totals.at[place])
        plgpu.wait_smem_to_gmem(0)


def _sinks_by_row(call: _Call, sinks: Ref, kv_head: jax.Array) -> jax.Array:
    """float32 (ROWS,), the sinks of a key head's queries, and 0 in rows that have none.

    By selects, since a buffer in shared memory would leave too little for two CTAs on an SM.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    found = jnp.zeros((ROWS,), jnp.float32)
    for number in range(call.group):
        found = jnp.where(row == number, sinks[kv_head * call.group + number], found)
    return found


@jax.named_scope("load")
def _load(call: _Call, split: _Split, operands: _Operands, smem: _Shared, step: jax.Array) -> None:
    """Starts the copies of a step's keys and values into their stage."""
    stage = lax.rem(step, jnp.int32(STAGES))
    row, first = split.row, split.start(call, step)
    if operands.tables is not None:
        row, first = operands.tables[split.row, lax.div(first, PAGE)], lax.rem(first, PAGE)
    for kind, target, full in ((0, smem.keys, smem.keys_full), (1, smem.values, smem.values_full)):
        head = (kind * call.num_rows + row) * call.kv_heads + split.kv_head
        start = head * call.length + first
        plgpu.copy_gmem_to_smem(operands.cache.at[pl.ds(start, call.keys)], target.at[stage], full.at[stage])


def _attend_block(
    call: _Call, split: _Split, smem: _Shared, step: jax.Array, softmax: RunningSoftmax
) -> RunningSoftmax:
    """`softmax` with a step's keys and values, once they are in shared memory."""
    stage = lax.rem(step, jnp.int32(STAGES))
    with jax.named_scope("wait"):
        plgpu.barrier_wait(smem.keys_full.at[stage])
    distance = split.position - split.start(call, step)
    scores = token_scores(smem.rows, smem.keys.at[stage], distance, call.window)
    softmax, weights = softmax.add_scores(scores, TO_BITS * call.dim**-0.5)
    with jax.named_scope("wait"):
        plgpu.barrier_wait(smem.values_full.at[stage])
    return softmax.add_values(weights, smem.values.at[stage])


def _combine(results: SplitResults, sinks: Float32[Array, "kv_heads group"]) -> Float32[Array, "B kv_heads group D"]:
    """The splits' results as one softmax, with the sinks in it: float32 (B, kv_heads, group, D)."""
    group = sinks.shape[1]
    return SplitResults(*(part[:, :, :, :group] for part in results)).merged().results(sinks * TO_BITS)
