"""Quantization of rows within the launch of both products, and the counters by which CTAs signal their progress.

All consumer warpgroups quantize a share of a GEMM's rows to global memory, and wait for each other. Or, with
`resident_rows`, each CTA quantizes all rows of a block to its own shared memory, one row per warpgroup, where they stay
while they are multiplied: other CTAs do not need them, and no producer copies them. This is done once for x, but again
for each item for h; so with more than one row per warpgroup it would take too long.

Quantization of h starts once all of its columns are written, which counters in global memory signal.
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

_COUNTERS = 4  # for each of two GEMMs: rows quantized, results written


def new_counters(blocks: Blocks) -> Int32[Array, " counters"]:
    """Zeros, at least four."""
    zeros = blocks.zeros
    return zeros if zeros.size >= _COUNTERS else jnp.pad(zeros, (0, _COUNTERS - zeros.size))


def _unquantized(gemm: Gemm) -> InputRows:
    assert gemm.unquantized is not None
    return gemm.unquantized


def _all_warpgroups(gemm: Gemm) -> int:
    """Consumer warpgroups of all CTAs."""
    return gemm.share.num_ctas * gemm.config.num_warpgroups


def quantize_share(gemm: Gemm) -> None:
    """Quantizes this warpgroup's share of the rows, and waits until all others have quantized theirs."""
    rows = _unquantized(gemm)
    num_rows = rows.values.shape[0]
    first = gemm.cta + gemm.share.num_ctas * gemm.warpgroup

    @pl.when(first < num_rows)
    @jax.named_scope("quantize")
    def _() -> None:
        step = _all_warpgroups(gemm)
        wait_for_results(gemm)

        @pl.loop(0, lax.div(num_rows - first + (step - 1), step))
        def _(nth: Array) -> None:
            row = first + nth * step
            quantize_row(rows, row, gemm.x.values, gemm.x.scales, gemm.shared.warp_maxima.at[gemm.warpgroup])

        counters.signal(gemm.counters, _quantized(gemm))

    wait_for_rows(gemm, warpgroup=True)


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
    """A warp waits until it may copy quantized rows, or a warpgroup until it may read their scales."""
    quantizing = min(_unquantized(gemm).values.shape[0], _all_warpgroups(gemm))
    with jax.named_scope("wait_for_rows"):
        counters.wait(gemm.counters, _quantized(gemm), jnp.int32(quantizing), warpgroup=warpgroup)


def wait_for_results(gemm: Gemm) -> None:
    """A warpgroup waits until all results of the GEMM before this one are written."""
    if gemm.index:
        with jax.named_scope("wait_for_results"):
            counters.wait(gemm.counters, _written(gemm.index - 1), jnp.int32(_all_warpgroups(gemm)), warpgroup=True)


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
