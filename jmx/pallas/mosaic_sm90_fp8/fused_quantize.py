"""Quantization of rows within the launch of both products, and the counters by which CTAs signal their progress.

All consumer warpgroups quantize a share of a GEMM's rows to global memory, and wait for each other. Or, with
`resident_rows`, each CTA quantizes all rows of a block to its own shared memory, one row per warpgroup, where they stay
while they are multiplied: other CTAs do not need them, and no producer copies them. This is done once for x, but again
for each item for h; so with more than one row per warpgroup it would take too long.

Quantization of h starts once all of its columns are written, which counters in global memory signal. Where weights are
read as they are, most rows, the *early* ones, are quantized while the last items of the first GEMM are computed: those
of blocks without an item among the last two of any CTA. CTAs signal before their last but one item that what came
before is written, and quantize early rows before their last item, by when all others have signaled. So only the few
late rows are waited for when the first GEMM is complete, by the items that need them, which are the last ones of the
second GEMM.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm
from jmx.pallas.mosaic_sm90_fp8.quantize import quantize_row, quantize_row_to_shared
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.sm90 import counters
from jmx.util.typing import Array, Int32

Scalar = Int32[Array, ""]
_COUNTERS = 6  # for each of two GEMMs: rows quantized, results written; early rows quantized, early results written
_EARLY_QUANTIZED, _EARLY_WRITTEN = 4, 5
_LAST_TURNS = 2  # of a CTA, whose results are not early


def new_counters(blocks: Blocks) -> Int32[Array, " counters"]:
    """Zeros, at least `_COUNTERS`."""
    zeros = blocks.zeros
    return zeros if zeros.size >= _COUNTERS else jnp.pad(zeros, (0, _COUNTERS - zeros.size))


def _unquantized(gemm: Gemm) -> InputRows:
    assert gemm.unquantized is not None
    return gemm.unquantized


def _all_warpgroups(gemm: Gemm) -> int:
    """Consumer warpgroups of all CTAs."""
    return gemm.share.num_ctas * gemm.config.num_warpgroups


def quantize_share(gemm: Gemm) -> None:
    """Quantizes this warpgroup's share of the rows, and waits until all others have quantized theirs. If most rows are
    early, it does so with the others, and waits for the early ones only."""
    _quantize_rows(gemm, _first_late_row(gemm), _end_of_rows(gemm), _written(gemm.index - 1), _quantized(gemm))
    if gemm.before is None:
        wait_for_rows(gemm, warpgroup=True)
    else:
        _wait_for_early_rows(gemm, warpgroup=True)


def _quantize_rows(gemm: Gemm, begin: Scalar, end: Scalar, written: Scalar, quantized: Scalar) -> None:
    """Quantizes this warpgroup's share of the rows from `begin` to `end`, of h once the counter `written` signals that
    they are complete, and signals that by the counter `quantized`."""
    step = _all_warpgroups(gemm)
    first = begin + gemm.cta + gemm.share.num_ctas * gemm.warpgroup

    @pl.when(first < end)
    @jax.named_scope("quantize")
    def _() -> None:
        _wait_for_written(gemm, written)

        @pl.loop(0, lax.div(end - first + (step - 1), step))
        def _(nth: Array) -> None:
            maxima = gemm.shared.warp_maxima.at[gemm.warpgroup]
            quantize_row(_unquantized(gemm), first + nth * step, gemm.x.values, gemm.x.scales, maxima)

        counters.signal(gemm.counters, quantized)


def quantize_early(gemm: Gemm, following: Gemm, turn: Scalar) -> None:
    """Of the first GEMM, before a CTA's `turn`th item: signals early results, or quantizes the early rows that
    `following` reads."""
    before_last = gemm.share.num_items - turn

    @pl.when((before_last == _LAST_TURNS) & (_early_blocks(following) > 0))
    def _() -> None:
        plgpu.wait_smem_to_gmem(0)
        counters.signal(gemm.counters, jnp.int32(_EARLY_WRITTEN))

    @pl.when(before_last == 1)
    def _() -> None:
        written, quantized = jnp.int32(_EARLY_WRITTEN), jnp.int32(_EARLY_QUANTIZED)
        _quantize_rows(following, jnp.int32(0), _first_late_row(following), written, quantized)


def _early_blocks(gemm: Gemm) -> Scalar:
    """The number of blocks whose rows are early: the first ones."""
    before = gemm.before
    if before is None:
        return jnp.int32(0)
    early = before.share.all_items - _LAST_TURNS * before.share.num_ctas
    return lax.div(jnp.maximum(jnp.int32(early), 0), before.items_of_block)


def _first_late_row(gemm: Gemm) -> Scalar:
    """The first row that is not early."""
    early = _early_blocks(gemm)
    return jnp.where(early > 0, gemm.blocks.first_row(gemm.blocks.x_rows, early), 0)


def _end_of_rows(gemm: Gemm) -> Scalar:
    """Past the last row that is read."""
    blocks, num_rows = gemm.blocks, _unquantized(gemm).values.shape[0]
    if gemm.before is None:
        return jnp.int32(num_rows)
    last = jnp.maximum(blocks.number, 1) - 1
    return jnp.where(blocks.number > 0, blocks.first_row(blocks.x_rows, last) + blocks.count_of(last), 0)


def quantize_resident_rows(
    gemm: Gemm, first_row: Int32[Array, ""], count: Int32[Array, ""], part: Int32[Array, ""]
) -> None:
    """Quantizes `count` rows from `first_row` on, of a part of the columns, in place of the earlier resident rows."""
    units = gemm.share.item_stages  # warpgroups do not share columns
    first_unit = part * units
    if gemm.index:
        _synchronize_consumers(gemm, 0)

    @pl.when(gemm.warpgroup < count)
    @jax.named_scope("quantize")
    def _() -> None:
        quantize_row_to_shared(
            _unquantized(gemm),
            first_row + gemm.warpgroup,
            gemm.x.values,
            gemm.x.scales,
            gemm.shared.warp_maxima.at[gemm.warpgroup],
            place=gemm.warpgroup,
            first_unit=first_unit,
            num_units=units,
            all_units=units * gemm.product.split_k,
        )

    plgpu.commit_smem()
    _synchronize_consumers(gemm, 1)


def _synchronize_consumers(gemm: Gemm, barrier: int) -> None:
    plgpu.barrier_arrive(gemm.shared.resident_barriers.at[barrier])
    plgpu.barrier_wait(gemm.shared.resident_barriers.at[barrier])


def wait_for_rows(gemm: Gemm, *, warpgroup: bool = False) -> None:
    """A warp waits until it may copy quantized rows, or a warpgroup until it may read their scales: of h the late rows,
    beside early ones."""
    quantizing = jnp.minimum(_end_of_rows(gemm) - _first_late_row(gemm), _all_warpgroups(gemm))
    with jax.named_scope("wait_for_rows"):
        counters.wait(gemm.counters, _quantized(gemm), quantizing, warpgroup=warpgroup)


def wait_for_first_rows(gemm: Gemm) -> None:
    """A warp waits until it may copy the rows of the first items: of h the early ones."""
    if gemm.before is None:
        wait_for_rows(gemm)
    else:
        _wait_for_early_rows(gemm)


def wait_if_late(gemm: Gemm, turn: Scalar, *, warpgroup: bool = False) -> None:
    """The same for the rows of the CTA's `turn`th item, if these are late."""
    if gemm.before is not None:
        is_late = gemm.share.item(turn) >= _early_blocks(gemm) * gemm.items_of_block
        pl.when(is_late)(lambda: wait_for_rows(gemm, warpgroup=warpgroup))


def _wait_for_early_rows(gemm: Gemm, *, warpgroup: bool = False) -> None:
    quantizing = jnp.minimum(_first_late_row(gemm), _all_warpgroups(gemm))
    with jax.named_scope("wait_for_early_rows"):
        counters.wait(gemm.counters, jnp.int32(_EARLY_QUANTIZED), quantizing, warpgroup=warpgroup)


def wait_for_results(gemm: Gemm) -> None:
    """A warpgroup waits until all results of the GEMM before this one are written."""
    _wait_for_written(gemm, _written(gemm.index - 1))


def _wait_for_written(gemm: Gemm, counter: Scalar) -> None:
    if gemm.index:
        with jax.named_scope("wait_for_results"):
            counters.wait(gemm.counters, counter, jnp.int32(_all_warpgroups(gemm)), warpgroup=True)


def signal_results(gemm: Gemm) -> None:
    """Signals that this warpgroup has written all of its results."""
    if not gemm.last:
        counters.signal(gemm.counters, _written(gemm.index))


def _quantized(gemm: Gemm) -> Int32[Array, ""]:
    """The index of the counter of warpgroups that have quantized their rows."""
    return jnp.int32(2 * gemm.index)


def _written(index: int) -> Int32[Array, ""]:
    """The index of the counter of warpgroups that have written their results."""
    return jnp.int32(2 * index + 1)
