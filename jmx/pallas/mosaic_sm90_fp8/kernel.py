"""A grouped product on Hopper's FP8 tensor cores, in one Pallas Mosaic GPU kernel: rows @ weight[expert].T, and on.

As in `mosaic_sm90.kernel`, results are computed transposed: 64 rows of the weight are the operand A, and a block of
rows of one expert, at most 256, is B, in parts where registers do not hold its sums at once. E4M3 weights are read from
shared memory; MXFP4 ones become e5m2 in registers. Large blocks whose scales belong to 128 columns are A themselves,
where that costs less: see `token_fragments`. Every multiprocessor runs one block of threads for good. One warp fetches
weights and another one rows (`fetching`) into a ring of stages, 128 columns each (but see `one_launch` for rows that
are kept); one to five warpgroups compute (`computing`):

    weights   | W0 | W1 | W2 | ...                             full[slot] -->
    rows      | X0 | X1 | X2 | ...                             full[slot] -->
    compute   | wait 0 | elements 0 | wgmma 0 | totals += sums * scales | wait 1 | ...              --> empty[slot]

Or warpgroups share the columns of an item, a unit of each stage each, and add up what they have at its end.

Results leave by way of shared memory, and are on their way while the next item is computed.

Between the products rows of h are rounded anew, for which a token's h has to be there as a whole. Where rows are few,
that and the rounding of x before are part of one launch with both products; see `one_launch`. Weights are on their way
meanwhile.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90_fp8 import staging, wgmma
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.consumer import compute
from jmx.pallas.mosaic_sm90_fp8.fused_quantize import KEPT_BARRIERS, Rounding, new_counters
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Job, Operands
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS, value_rows
from jmx.pallas.mosaic_sm90_fp8.producer import fetch_rows, fetch_weights
from jmx.pallas.mosaic_sm90_fp8.quantize import Sources
from jmx.pallas.mosaic_sm90_fp8.quantize_row import WORDS, Unrounded
from jmx.pallas.mosaic_sm90_fp8.task import Place, Shared, Task
from jmx.pallas.sm90.launch import launch
from jmx.pallas.sm90.reduction import Sums

Array = Any
_FETCH_REGISTERS = 40


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
    num_compute, num_stages, block_n = config.num_warpgroups, config.num_stages, config.block_n
    tiles, units = config.warpgroups_m, config.warpgroups_k  # of a stage
    first = jobs[0]
    by_block, decoded = first.rows.by_block, first.product.decoded
    given = [Operands.of(job) for job in jobs]
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
        shared = Shared(*(None if one is None else rest.pop(0) for one in scratch))
        core = lax.axis_index("core")
        here = Place(lax.axis_index("warpgroup"), core, core, jnp.int32(0))
        tasks = []
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
            given_to = job, g, work, out_g, out_s, shared, here, rounding
            tasks.append(Task.of(*given_to, config=config, num_rows=num_rows, num_cores=num_cores))
            here = tasks[-1].next_place

        @pl.when(here.warpgroup < num_compute)
        def _() -> None:
            plgpu.set_max_registers(config.registers, action="increase")
            pl.when(here.warpgroup == 1)(lambda: plgpu.barrier_arrive(shared.turns.at[0]))
            for task in tasks:
                compute(task)

        @pl.when(here.warpgroup == num_compute)
        def _() -> None:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp: Array) -> None:
                @pl.when(warp == 0)
                def _() -> None:
                    for task in tasks:
                        fetch_weights(task)

                @pl.when(warp == 1)
                def _() -> None:
                    for task in tasks:
                        fetch_rows(task)

    values, scales = first.product.weight.values, given[0].scales
    value_stages = (num_stages, tiles, units * value_rows(first.product.format), values.shape[-1])
    row_slots = config.row_slots(max(job.product.units for job in jobs))
    of_weights = [
        plgpu.SMEM(value_stages, values.dtype, transforms=() if decoded else wgmma.SWIZZLED),
        None if scales is None else plgpu.SMEM((num_stages, tiles, units, scales.shape[-1]), scales.dtype),
    ]
    of_rows = [
        plgpu.SMEM((row_slots, block_n, UNIT_COLUMNS), jnp.float8_e4m3fn, transforms=wgmma.SWIZZLED),
        plgpu.SMEM((row_slots, 1, config.scales_n), jnp.float32) if by_block else None,
    ]
    copies = sum(one is not None for one in of_weights)  # into a stage
    if not kept:
        copies += units * sum(one is not None for one in of_rows)
    scratch = [
        of_rows[0],
        *of_weights,
        of_rows[1],
        plgpu.SMEM((num_compute, WORDS), jnp.int32) if unrounded else None,
        plgpu.SMEM((config.scales_n,), jnp.float32) if kept and not by_block else None,
        plgpu.Barrier(num_barriers=KEPT_BARRIERS, num_arrivals=num_compute) if kept else None,
        *(Sums.scratch(tiles, units, block_n) if units > 1 else (None, None, None)),
        plgpu.Barrier(num_barriers=num_stages, num_arrivals=copies),
        plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_compute),
        plgpu.Barrier(num_barriers=2, num_arrivals=1),
        plgpu.Barrier(num_arrivals=num_compute) if unrounded else None,
    ]
    on_their_way = []
    for job in jobs:
        columns, staged = job.product.tile_columns, job.product.staged(config)
        transforms = staging.swizzled_rows(columns, job.product.dtype)
        on_their_way.append(plgpu.SMEM((tiles, staged, columns), job.product.dtype, transforms=transforms))
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
    told = [jax.new_ref(new_counters(blocks.experts))] if unrounded else []
    return launch(kernel, *operands, *blocks.arrays, *told)[len(jobs) - 1]
