"""Attention over a whole prompt in one kernel for Hopper GPUs: scores never leave the chip (FlashAttention 3).

After `jax.experimental.pallas.ops.gpu.attention_mgpu`, which knows neither sinks nor windows nor bfloat16.
"""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

import math
from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 64  # queries of one warpgroup, of which two share the keys that a third one brings
BLOCK = 2 * ROWS  # queries of one CTA, and keys of one step
STAGES = {64: 4, 128: 2}  # by size of a head: blocks of keys and values under way, as many as shared memory holds


def flash_prefill(
    query: jax.Array, keys: jax.Array, values: jax.Array, sinks: jax.Array, window: int | None
) -> jax.Array:
    """Causal attention of T tokens among themselves; only blocks of keys that some query sees are read.

    Args:
        query: bfloat16 or float16 (B, T, heads, D), rotated; T a multiple of `BLOCK`, D a key of `STAGES`.
        keys, values: (B, T, kv_heads, D), of the same dtype.
        sinks: float32 (heads,), one more logit a head, without a value.
        window: how many positions a query sees, its own included; None for all.

    Returns:
        (B, T, heads, D) of query's dtype.
    """
    batch, length, heads, dim = query.shape
    group, stages = heads // keys.shape[2], STAGES[dim]
    to_bits = math.log2(math.e)  # powers of two are what the hardware has
    scale = to_bits * dim**-0.5

    def kernel(query, keys, values, sinks, out, scratch):
        (rows, key_blocks, value_blocks), barriers, turn = scratch
        rows_in, keys_in, values_in, keys_out, values_out = barriers
        head, tile, row = (lax.axis_index(axis) for axis in ("heads", "tile", "batch"))
        tile = length // BLOCK - 1 - tile  # the longest first, so that the short ones fill up the end
        warpgroup = lax.axis_index("warpgroup")
        first = jnp.int32(0) if window is None else lax.div(jnp.maximum(tile * BLOCK - (window - 1), 0), BLOCK)
        steps = tile + 1 - first

        def take_turns() -> None:  # so that one warpgroup multiplies while the other takes exponentials
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        @pl.when(warpgroup < 2)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            mine = rows.at[warpgroup]
            start = tile * BLOCK + warpgroup * ROWS
            plgpu.copy_gmem_to_smem(query.at[row, pl.ds(start, ROWS), head], mine, rows_in.at[warpgroup])
            plgpu.barrier_wait(rows_in.at[warpgroup])

            def full(shape: tuple[int, ...], value: jax.typing.ArrayLike, layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            per_row = plgpu.Layout.WGMMA.reduce(1)
            # The sink is where the running softmax begins: the peak so far, with a total of 1 and nothing gathered.
            carry = (
                full((ROWS, dim), 0, plgpu.Layout.WGMMA),
                full((ROWS,), sinks[head] * to_bits, per_row),
                full((ROWS,), 1, per_row),
            )
            pl.when(warpgroup == 1)(take_turns)

            def step(index, carry, *, masked: bool):
                gathered, peak, total = carry
                slot = lax.rem(index, jnp.int32(stages))
                plgpu.barrier_wait(keys_in.at[slot])

                def scored(accumulator):
                    plgpu.wgmma(accumulator, mine, key_blocks.at[slot].transpose((1, 0)))
                    take_turns()
                    return accumulator[...]

                scores = pl.run_scoped(scored, plgpu.ACC((ROWS, BLOCK), jnp.float32))
                plgpu.barrier_arrive(keys_out.at[slot])
                if masked:
                    ids = [
                        plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
                        for axis in (0, 1)
                    ]
                    distance = (ids[0] + start) - (ids[1] + (first + index) * BLOCK)
                    seen = distance >= 0
                    if window is not None:
                        seen &= distance < window
                    scores = jnp.where(seen, scores, -jnp.inf)
                higher = jnp.maximum(peak, scores.max(axis=1) * scale)
                shrink = jnp.exp2(peak - higher)
                powers = jnp.exp2(scores * scale - lax.broadcast_in_dim(higher, scores.shape, [0]))
                gathered *= lax.broadcast_in_dim(shrink, gathered.shape, [0])
                total = total * shrink + powers.sum(axis=1)
                weights = powers.astype(query.dtype)
                gathered, total, higher, weights = lax.optimization_barrier((gathered, total, higher, weights))
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(values_in.at[slot])
                plgpu.barrier_wait(turn)

                def gather(accumulator) -> None:
                    plgpu.wgmma(accumulator, weights, value_blocks.at[slot])

                gathered = pl.run_state(gather)(plgpu.ACC.init(gathered))
                plgpu.barrier_arrive(values_out.at[slot])
                return gathered, higher, total

            inner = 0 if window is not None else steps - 1  # blocks that every query sees whole
            if window is None:
                carry = lax.fori_loop(0, inner, lambda i, c: step(i, c, masked=False), carry)
            gathered, _, total = lax.fori_loop(inner, steps, lambda i, c: step(i, c, masked=True), carry)
            pl.when(warpgroup == 0)(take_turns)
            mine[...] = (gathered / lax.broadcast_in_dim(total, gathered.shape, [0])).astype(query.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, out.at[row, pl.ds(start, ROWS), head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 2)
        def _bring() -> None:
            plgpu.set_max_registers(40, action="decrease")
            kv_head = lax.div(head, jnp.int32(group))

            @pl.loop(0, steps)
            def _step(index) -> None:
                slot = lax.rem(index, jnp.int32(stages))
                block = (row, pl.ds((first + index) * BLOCK, BLOCK), kv_head)
                for source, target, arrived, free in (
                    (keys, key_blocks, keys_in, keys_out),
                    (values, value_blocks, values_in, values_out),
                ):
                    pl.when(index >= stages)(partial(plgpu.barrier_wait, free.at[slot]))
                    plgpu.copy_gmem_to_smem(source.at[block], target.at[slot], arrived.at[slot])

    def entry(query, keys, values, sinks, out) -> None:
        def shared(*shape: int):
            tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
            return plgpu.SMEM(shape, query.dtype, transforms=tiles)

        pl.run_scoped(
            lambda *scratch: kernel(query, keys, values, sinks, out, scratch),
            (shared(2, ROWS, dim), shared(stages, BLOCK, dim), shared(stages, BLOCK, dim)),
            (
                plgpu.Barrier(num_barriers=2),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            ),
            plgpu.Barrier(num_arrivals=2),
            collective_axes="warpgroup",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(heads, length // BLOCK, batch),
        grid_names=("heads", "tile", "batch"),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, keys, values, sinks)
