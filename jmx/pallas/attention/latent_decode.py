"""Multi-head latent attention of one new token a row over its cache, absorbed: a kernel for Hopper GPUs.

All query heads attend to the same latents, whose first channels are the values, too. A CTA reads a block of latents
once for up to `ROWS` heads. Its two consumer warpgroups compute the same scores, and gather half of the values'
channels each, since float32 results of 64 heads and 512 channels are more than a warpgroup's registers. The keys of a
row are split over CTAs (flash decoding).
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

from jmx.pallas.attention.softmax import TILE, TO_BITS, RunningSoftmax, SplitResults, shared_memory, token_scores
from jmx.pallas.sm90.launch import kernel_name, launch
from jmx.pallas.sm90.operation import Ref
from jmx.util.typing import Array, Float, Int32

ROWS = 64  # of a tensor core's product: the query heads of a CTA, and unused ones
KEYS = 64  # of one step
STAGES = 2  # of the pipeline: steps whose latents are in flight
CONSUMERS = 2  # warpgroups
MOST_SPLITS = 64  # CTAs that share a row's keys: with more, combining their results takes longer than reading the keys
SHARED_MEMORY = 220 * 1024  # bytes for queries and latents; a CTA has 227 KiB, of which barriers take a part


def fits(width: int, rank: int) -> bool:
    """Whether the kernel has latents of `width` channels, of which `rank` are values."""
    memory = 2 * width * (ROWS + STAGES * KEYS)
    return width % 64 == 0 and rank % (CONSUMERS * 64) == 0 and rank <= min(width, 512) and memory <= SHARED_MEMORY


def flash_decode_latent(
    query: Float[Array, "B heads W"],
    latents: Float[Array, "B C W"],
    positions: Int32[Array, " B"],
    rank: int,
    scale: float,
    core_count: int,
) -> Float[Array, "B heads rank"]:
    """Attention of one token a row over positions 0 to its own, all heads over the same latents.

    Args:
        query: bfloat16 or float16 (B, heads, W), absorbed and rotated. Heads that do not fill the blocks of the grid
            are padded with zeros.
        latents: (B, C, W) of the same dtype, the token's own included; C a multiple of `KEYS`, W as in `fits`.
        positions: int32 (B,), each token's own.
        rank: the first channels of W, which are the values; as in `fits`.
        scale: multiplies the scores.
        core_count: SMs of the GPU. Each runs one CTA at a time, so keys are split until there is one for each.

    Returns:
        (B, heads, rank) of query's dtype.
    """
    batch, heads, width = query.shape
    capacity = latents.shape[1]
    blocks = -(-heads // ROWS)
    block = -(-heads // (TILE * blocks)) * TILE
    splits = max(1, min(core_count // (blocks * batch), capacity // KEYS, MOST_SPLITS))
    call = _Call(block, capacity, width, rank, splits, scale)
    padded = jnp.pad(query, ((0, 0), (0, blocks * block - heads), (0, 0)))

    kernel = plgpu.kernel(
        partial(_kernel, call),
        out_type=[SplitResults.shapes(splits, batch, padded.shape[1], rank)],
        grid=(splits, blocks, batch),
        grid_names=("split", "block", "row"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=kernel_name("flash_decode_latent", heads=block, width=width, rank=rank, splits=splits),
        scratch_types={"shared": _Shared.types(call, query.dtype)},
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    (results,) = launch(kernel, _Operands(query=padded, latents=latents.reshape(-1, width), positions=positions))
    gathered, _, total = results.merged()
    return (gathered / total[..., None])[:, :heads].astype(query.dtype)


@dataclass(frozen=True)
class _Call:
    """What is static of a call. `block`: query heads of a CTA."""

    block: int
    capacity: int
    width: int
    rank: int
    splits: int
    scale: float

    @property
    def channels(self) -> int:
        """Of the values, those that a consumer warpgroup gathers."""
        return self.rank // CONSUMERS


class _Operands(NamedTuple):
    """The kernel's operands, or references to them in global memory."""

    query: Ref
    latents: Ref
    positions: Ref


class _Shared(NamedTuple):
    """The shared memory of a CTA, and its barriers: types, or references.

    `latents_or_gathered` has the latents by stage, and then the results by consumer warpgroup, in the same memory. At
    `finished` the consumers meet when they have read all latents.
    """

    rows: Ref
    latents_or_gathered: Ref
    peak_and_total: Ref
    rows_full: Ref
    full: Ref
    empty: Ref
    finished: Ref

    @classmethod
    def types(cls, call: _Call, dtype: jax.typing.DTypeLike) -> "_Shared":
        return cls(
            rows=shared_memory(ROWS, call.width, dtype=dtype),
            latents_or_gathered=plgpu.RefUnion(
                shared_memory(STAGES, KEYS, call.width, dtype=dtype),
                shared_memory(CONSUMERS, ROWS, call.channels, dtype=jnp.float32),
            ),
            peak_and_total=plgpu.SMEM((2, ROWS), jnp.float32),
            rows_full=plgpu.Barrier(),
            full=plgpu.Barrier(num_barriers=STAGES),
            empty=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),
            finished=plgpu.Barrier(num_arrivals=CONSUMERS),
        )

    @property
    def latents(self) -> Ref:
        latents, _ = self.latents_or_gathered
        return latents

    @property
    def gathered(self) -> Ref:
        _, gathered = self.latents_or_gathered
        return gathered


class _Split(NamedTuple):
    """The keys that a CTA takes: every `splits`-th block of a row's, `steps` of them, from block `split` on."""

    split: jax.Array
    heads: Ref
    row: jax.Array
    position: jax.Array
    steps: jax.Array

    def start(self, call: _Call, step: jax.Array) -> jax.Array:
        """The position at which a step's keys begin."""
        return (self.split + step * call.splits) * KEYS


def _kernel(call: _Call, operands: _Operands, results: SplitResults, *, shared: _Shared) -> None:
    """The kernel: the last warpgroup is the producer, the others are consumers, of a part of the values' channels."""
    split, block, row = (lax.axis_index(axis) for axis in ("split", "block", "row"))
    warpgroup, position = lax.axis_index("warpgroup"), operands.positions[row]
    steps = lax.div(lax.div(position, KEYS) + call.splits - split, call.splits)
    work = _Split(split, pl.ds(block * call.block, call.block), row, position, steps)
    pl.when(warpgroup < CONSUMERS)(lambda: _consume(call, work, results, shared, warpgroup))
    pl.when(warpgroup == CONSUMERS)(lambda: _produce(call, work, operands, shared))


@jax.named_scope("producer")
def _produce(call: _Call, work: _Split, operands: _Operands, smem: _Shared) -> None:
    """Loads the queries, and the latents block by block, as stages become empty."""
    plgpu.set_max_registers(40, action="decrease")
    used = smem.rows.at[pl.ds(0, call.block)]
    plgpu.copy_gmem_to_smem(operands.query.at[work.row, work.heads], used, smem.rows_full)

    @pl.loop(0, work.steps)
    def _step(step: jax.Array) -> None:
        stage = lax.rem(step, jnp.int32(STAGES))
        with jax.named_scope("acquire"):
            pl.when(step >= STAGES)(partial(plgpu.barrier_wait, smem.empty.at[stage]))
        keys = pl.ds(work.row * call.capacity + work.start(call, step), KEYS)
        plgpu.copy_gmem_to_smem(operands.latents.at[keys], smem.latents.at[stage], smem.full.at[stage])


@jax.named_scope("consumer")
def _consume(call: _Call, work: _Split, results: SplitResults, smem: _Shared, warpgroup: jax.Array) -> None:
    """The softmax of the queries over a split of the keys, and a consumer warpgroup's channels of the values."""
    plgpu.set_max_registers(232, action="increase")
    with jax.named_scope("prologue"):
        plgpu.barrier_wait(smem.rows_full)
    channels = pl.ds(warpgroup * call.channels, call.channels)
    none = RunningSoftmax.begin(ROWS, call.channels)

    def attend(step: jax.Array, softmax: RunningSoftmax) -> RunningSoftmax:
        return _attend_block(call, work, smem, channels, step, softmax)

    softmax = lax.fori_loop(0, work.steps, attend, none)
    with jax.named_scope("epilogue"):
        _store(call, work, results, smem, warpgroup, channels, softmax)


def _store(
    call: _Call,
    work: _Split,
    results: SplitResults,
    smem: _Shared,
    warpgroup: jax.Array,
    channels: Ref,
    softmax: RunningSoftmax,
) -> None:
    """Writes a consumer warpgroup's results, once the other one has read all latents, too."""
    plgpu.barrier_arrive(smem.finished)
    plgpu.barrier_wait(smem.finished)
    smem.gathered.at[warpgroup][...] = softmax.gathered

    @pl.when(warpgroup == 0)
    def _stage() -> None:
        smem.peak_and_total[0] = softmax.peak
        smem.peak_and_total[1] = softmax.total

    plgpu.commit_smem()
    used, place = pl.ds(0, call.block), (work.split, work.row, work.heads)
    plgpu.copy_smem_to_gmem(smem.gathered.at[warpgroup, used], results.gathered.at[*place, channels])

    @pl.when(warpgroup == 0)
    def _copy() -> None:
        plgpu.copy_smem_to_gmem(smem.peak_and_total.at[0, used], results.peaks.at[place])
        plgpu.copy_smem_to_gmem(smem.peak_and_total.at[1, used], results.totals.at[place])

    plgpu.wait_smem_to_gmem(0)


def _attend_block(
    call: _Call, work: _Split, smem: _Shared, channels: Ref, step: jax.Array, softmax: RunningSoftmax
) -> RunningSoftmax:
    """`softmax` with a step's latents, once they are in shared memory."""
    stage = lax.rem(step, jnp.int32(STAGES))
    latents = smem.latents.at[stage]
    with jax.named_scope("wait"):
        plgpu.barrier_wait(smem.full.at[stage])
    scores = token_scores(smem.rows, latents, work.position - work.start(call, step), None)
    softmax, weights = softmax.add_scores(scores, TO_BITS * call.scale)
    softmax = softmax.add_values(weights, latents.at[:, channels])
    plgpu.barrier_arrive(smem.empty.at[stage])
    return softmax
