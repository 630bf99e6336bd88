"""Attention of one new token a row over its cache: a kernel for Hopper GPUs that splits the keys (flash decoding)."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

import math
from functools import reduce

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

ROWS = 64  # of a tensor core's product: the query heads that share keys, and unused ones
KEYS = 128  # of one step
STAGES = 2  # steps whose keys and values are under way
SPLITS = 8  # CTAs that share a long row's keys, at most


def flash_decode(
    query: jax.Array, cache: jax.Array, sinks: jax.Array, positions: jax.Array, window: int | None
) -> jax.Array:
    """Attention of one token a row over positions 0 to its own.

    Args:
        query: bfloat16 or float16 (B, heads, D), rotated; 8 to `ROWS` heads to a key head, by eights; D by 64.
        cache: (2, B, kv_heads, C, D), keys and values of the same dtype, the token's own included; C by `KEYS`.
        sinks: float32 (heads,), one more logit a head, without a value.
        positions: int32 (B,), each token's own.
        window: how many positions it sees, its own included; None for all.

    Returns:
        (B, heads, D) of query's dtype.
    """
    batch, heads, dim = query.shape
    _, _, kv_heads, capacity, _ = cache.shape
    group = heads // kv_heads
    splits = min(SPLITS, capacity // KEYS if window is None else -(-(window - 1) // KEYS) + 1)
    to_bits = math.log2(math.e)  # powers of two are what the hardware has
    scale = to_bits * dim**-0.5

    def kernel(query, cache, positions, out, peaks, totals, scratch):
        rows, key_blocks, value_blocks, staged, stats, barriers = scratch
        rows_in, keys_in, values_in = barriers
        split, kv_head, row = (lax.axis_index(axis) for axis in ("split", "kv_head", "row"))
        position = positions[row]
        first = jnp.int32(0) if window is None else lax.div(jnp.maximum(position - (window - 1), 0), KEYS)
        blocks = lax.div(position, KEYS) + 1 - first
        steps = lax.div(blocks - split + splits - 1, splits)
        its_heads = pl.ds(kv_head * group, group)
        plgpu.copy_gmem_to_smem(query.at[row, its_heads], rows.at[pl.ds(0, group)], rows_in)

        def block(index: jax.Array) -> jax.Array:  # the position at which a step's keys begin
            return (first + split + index * splits) * KEYS

        def bring(index: jax.Array) -> None:
            slot = lax.rem(index, jnp.int32(STAGES))
            for kind, target, arrived in ((0, key_blocks, keys_in), (1, value_blocks, values_in)):
                start = ((kind * batch + row) * kv_heads + kv_head) * capacity + block(index)
                plgpu.copy_gmem_to_smem(cache.at[pl.ds(start, KEYS)], target.at[slot], arrived.at[slot])

        for index in range(STAGES):
            pl.when(index < steps)(lambda index=index: bring(jnp.int32(index)))
        plgpu.barrier_wait(rows_in)

        def full(shape: tuple[int, ...], value: float, layout):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        per_row = plgpu.Layout.WGMMA.reduce(1)
        carry = full((ROWS, dim), 0, plgpu.Layout.WGMMA), full((ROWS,), -jnp.inf, per_row), full((ROWS,), 0, per_row)

        def step(index, carry):
            gathered, peak, total = carry
            slot = lax.rem(index, jnp.int32(STAGES))
            plgpu.barrier_wait(keys_in.at[slot])

            def scored(accumulator):
                plgpu.wgmma(accumulator, rows, key_blocks.at[slot].transpose((1, 0)))
                return accumulator[...]

            scores = pl.run_scoped(scored, plgpu.ACC((ROWS, KEYS), jnp.float32))
            ids = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            distance = position - block(index) - ids
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            scores = jnp.where(seen, scores, -jnp.inf)
            higher = jnp.maximum(peak, scores.max(axis=1) * scale)
            shrink = jnp.exp2(peak - higher)
            powers = jnp.exp2(scores * scale - lax.broadcast_in_dim(higher, scores.shape, [0]))
            gathered *= lax.broadcast_in_dim(shrink, gathered.shape, [0])
            total = total * shrink + powers.sum(axis=1)
            plgpu.barrier_wait(values_in.at[slot])

            def gather(accumulator) -> None:
                plgpu.wgmma(accumulator, powers.astype(query.dtype), value_blocks.at[slot])

            gathered = pl.run_state(gather)(plgpu.ACC.init(gathered))

            @pl.when(index + STAGES < steps)
            def _next() -> None:
                bring(index + STAGES)

            return gathered, higher, total

        gathered, peak, total = lax.fori_loop(0, steps, step, carry)
        staged[...] = gathered
        stats[0] = peak
        stats[1] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, group)], out.at[split, row, its_heads])
        plgpu.copy_smem_to_gmem(stats.at[0, pl.ds(0, group)], peaks.at[split, row, its_heads])
        plgpu.copy_smem_to_gmem(stats.at[1, pl.ds(0, group)], totals.at[split, row, its_heads])
        plgpu.wait_smem_to_gmem(0)

    def entry(query, cache, positions, out, peaks, totals) -> None:
        def shared(*shape: int, dtype=query.dtype):
            tiles = plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128)
            return plgpu.SMEM(shape, dtype, transforms=tiles)

        pl.run_scoped(
            lambda *scratch: kernel(query, cache, positions, out, peaks, totals, scratch),
            shared(ROWS, dim),
            shared(STAGES, KEYS, dim),
            shared(STAGES, KEYS, dim),
            shared(ROWS, dim, dtype=jnp.dtype(jnp.float32)),
            plgpu.SMEM((2, ROWS), jnp.float32),
            (plgpu.Barrier(), plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_barriers=STAGES)),
        )

    per_head = jax.ShapeDtypeStruct((splits, batch, heads), jnp.float32)
    gathered, peaks, totals = plgpu.kernel(
        entry,
        out_type=(jax.ShapeDtypeStruct((splits, *query.shape), jnp.float32), per_head, per_head),
        grid=(splits, kv_heads, batch),
        grid_names=("split", "kv_head", "row"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(query, cache.reshape(-1, dim), positions)

    # A maximum and sums over few splits, written out: XLA would make each reduction a separate kernel.
    sinks = sinks * to_bits
    peak = reduce(jnp.maximum, peaks, sinks)
    parts = [jnp.exp2(split - peak) for split in peaks]
    total = sum((part * split for part, split in zip(parts, totals, strict=True)), jnp.exp2(sinks - peak))
    out = sum(part[..., None] * split for part, split in zip(parts, gathered, strict=True))
    return (out / total[..., None]).astype(query.dtype)
