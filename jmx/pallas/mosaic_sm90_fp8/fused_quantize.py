"""Quantization of rows fused with the products' launch, and the counters by which its CTAs signal how far they are.

All consumer warpgroups quantize a share of a GEMM's rows into global memory, and wait for each other. Or, with
`keeps_rows`, a CTA quantizes all rows of a block into its own shared memory, a warpgroup each, where they stay while
they are multiplied: no other CTA needs them, and nothing copies them. Of x that is done once; of h for each item anew,
which is why there are not two rows a warpgroup.

For h either begins once all of its columns are there, which counters in global memory signal.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8.gemm import Gemm
from jmx.pallas.mosaic_sm90_fp8.quantize import quantize_row, quantize_row_to_shared
from jmx.pallas.mosaic_sm90_fp8.rows import UnquantizedRows
from jmx.pallas.sm90 import counters

Array = Any
_COUNTERS = 4  # of how far a launch is


def new_counters(experts: jax.Array) -> jax.Array:
    """Those of two GEMMs. Zeros, which XLA makes in the kernel that makes `experts`, if these are enough."""
    zeros = experts >> 30
    return zeros if zeros.size >= _COUNTERS else jnp.pad(zeros, (0, _COUNTERS - zeros.size))


def _unquantized(gemm: Gemm) -> UnquantizedRows:
    assert gemm.unquantized is not None
    return gemm.unquantized


def _targets(gemm: Gemm) -> tuple[Any, Any]:
    """Where values and scales are written to."""
    of_rows = gemm.operands.x_row_scales
    return gemm.operands.x, gemm.operands.x_block_scales if of_rows is None else of_rows


def _everyone(gemm: Gemm) -> int:
    """Consumer warpgroups of all CTAs."""
    return gemm.share.num_ctas * gemm.config.num_warpgroups


def quantize_share(gemm: Gemm) -> None:
    """This warpgroup's share of the rows, and then until all others have theirs."""
    rows = _unquantized(gemm)
    num_rows = rows.x.shape[0]
    first = gemm.cta + gemm.share.num_ctas * gemm.warpgroup

    @pl.when(first < num_rows)
    @jax.named_scope("quantize")
    def _() -> None:
        step = _everyone(gemm)
        wait_for_results(gemm)

        @pl.loop(0, lax.div(num_rows - first + (step - 1), step))
        def _(nth: Array) -> None:
            row = first + nth * step
            quantize_row(rows, row, *_targets(gemm), gemm.shared.warp_maxima.at[gemm.warpgroup])

        counters.signal(gemm.counters, _quantized(gemm))

    wait_for_rows(gemm, warpgroup=True)


def keep_rows(gemm: Gemm, first_row: Array, count: Array, part: Array) -> None:
    """Rows from `first_row` on, of a part of the columns, in place of what was kept before."""
    units = gemm.share.item_stages  # nobody shares columns of rows that are kept
    first_unit = part * units
    if gemm.index:
        _meet(gemm, 0)

    @pl.when(gemm.warpgroup < count)
    @jax.named_scope("quantize")
    def _() -> None:
        quantize_row_to_shared(
            _unquantized(gemm),
            first_row + gemm.warpgroup,
            *_targets(gemm),
            gemm.shared.warp_maxima.at[gemm.warpgroup],
            place=gemm.warpgroup,
            first_unit=first_unit,
            num_units=units,
            all_units=units * gemm.product.split_k,
        )

    plgpu.commit_smem()
    _meet(gemm, 1)


def _meet(gemm: Gemm, barrier: int) -> None:
    plgpu.barrier_arrive(gemm.shared.kept.at[barrier])
    plgpu.barrier_wait(gemm.shared.kept.at[barrier])


def wait_for_rows(gemm: Gemm, *, warpgroup: bool = False) -> None:
    """A warp waits until it may copy them, or a warpgroup until it may read their scales."""
    quantizing = min(_unquantized(gemm).x.shape[0], _everyone(gemm))
    with jax.named_scope("wait_for_rows"):
        counters.wait(gemm.counters, _quantized(gemm), jnp.int32(quantizing), warpgroup=warpgroup)


def wait_for_results(gemm: Gemm) -> None:
    """A warpgroup waits until all those of the GEMM before are there."""
    if gemm.index:
        with jax.named_scope("wait_for_results"):
            counters.wait(gemm.counters, _written(gemm.index - 1), jnp.int32(_everyone(gemm)), warpgroup=True)


def signal_results(gemm: Gemm) -> None:
    """By this warpgroup: all of its own are written."""
    if not gemm.last:
        counters.signal(gemm.counters, _written(gemm.index))


def _quantized(gemm: Gemm) -> Array:
    return jnp.int32(2 * gemm.index)


def _written(index: int) -> Array:
    return jnp.int32(2 * index + 1)
