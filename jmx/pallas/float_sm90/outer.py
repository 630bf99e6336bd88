"""Gradients of the weights: for each group the sum over its rows of d's row times the row, by one persistent kernel.

A work item is a tile of one group's result. In each stage of the pipeline one producer warp copies 64 rows of `d`, and
another one those rows of `rows`; both are operands of wgmma as they are, with the sum along their first axis. The first
rows of a group's first stage and the last ones of its last stage may belong to other groups: consumers overwrite them
with zeros in both operands, since NaN times 0 would be NaN.

Items of one group follow each other, so its rows stay in L2. Groups without rows get zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.float_sm90.blocks import ROW_ALIGNMENT, Groups
from jmx.pallas.float_sm90.config import Config, Launch
from jmx.pallas.float_sm90.product import SharedMemory
from jmx.pallas.float_sm90.tile import SWIZZLED, Accumulator, add_outer, keep_rows, results, send, store
from jmx.pallas.sm90.launch import for_width, launch, persistent_kernel, specialize
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Pipeline
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float, Int32

Scalar = Int32[Array, ""]
_WIDTHS = (8, 16, 32, TILE)  # rows of a copy
_SUMMED = (16, 32, 48, TILE)  # rows of a group's last product


def outer(d: Float[Array, "R N"], rows: Float[Array, "R K"], groups: Groups, its: Launch) -> Float[Array, "E N K"]:
    """The sum over each group's rows of d (N,) times rows (K,).

    Args:
        d, rows: of the same 16-bit floats, N and K multiples of 64, R of 8.
        groups: the rows of each group, which may have rows of no group between them.
    """
    config, num_cores = its.config, its.num_cores
    shape = groups.starts.size, d.shape[1], rows.shape[1]

    def body(d: Ref, rows: Ref, groups: Groups, out: Ref, *, shared: SharedMemory) -> None:
        tiles = -(-shape[1] // config.block_m), -(-shape[2] // config.block_n)
        share = Share.of(Share.begin(lax.axis_index("core")), shape[0] * tiles[0] * tiles[1], 0, num_cores)
        kernel = _Kernel(d, rows, out, groups, tiles, share, config, shared)
        warpgroup = lax.axis_index("warpgroup")
        specialize(warpgroup, config, partial(kernel.consume, warpgroup), kernel.copy_rows, kernel.copy_d)

    outputs = [jax.ShapeDtypeStruct(shape, its.dtype)]
    kernel = persistent_kernel(body, "float_outer", config, num_cores, outputs, _shared_memory(config, rows.dtype, its.dtype))
    return launch(kernel, d, rows, groups)[0]


def _shared_memory(config: Config, dtype: Any, result: Any) -> SharedMemory:
    """`rows` are those of d, one below the other for each warpgroup; `weights` the other rows."""
    stages = config.num_stages
    return SharedMemory(
        plgpu.SMEM((stages, config.warpgroups_m, TILE, config.warpgroup_rows), dtype, transforms=SWIZZLED),
        plgpu.SMEM((stages, TILE, config.block_n), dtype, transforms=SWIZZLED),
        plgpu.Barrier(num_barriers=stages, num_arrivals=1 + config.warpgroups_m),
        plgpu.Barrier(num_barriers=stages, num_arrivals=config.num_warpgroups),
        results(config, result),
    )


@dataclass(frozen=True)
class _Kernel:
    """What all warps of the kernel know."""

    d: Ref
    rows: Ref
    out: Ref
    groups: Groups
    tiles: tuple[int, int]
    share: Share
    config: Config
    shared: SharedMemory

    @property
    def pipeline(self) -> Pipeline:
        return self.shared.pipeline(self.config)

    def position(self, turn: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """An item's group and its tile along both axes of the result."""
        item = self.share.item(turn)
        of_group = self.tiles[0] * self.tiles[1]
        tile = lax.rem(item, of_group)
        return lax.div(item, of_group), lax.rem(tile, self.tiles[0]), lax.div(tile, self.tiles[0])

    def num_stages(self, group: Scalar) -> Scalar:
        """Stages of an item of a group."""
        rows = self.groups.ends[group] - self.groups.aligned[group]
        stages = lax.div(rows + (TILE - 1), TILE)
        return jnp.where(self.groups.ends[group] > self.groups.starts[group], stages, 0)

    def _produce(self, copy: Callable[[Any, int, Scalar, Scalar, Scalar], None]) -> None:
        """Fills the stages of all items. `copy`: takes the first row, their number, both tiles, and the slot."""

        def item(turn: Scalar, state: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            group, m, n = self.position(turn)
            aligned, end = self.groups.aligned[group], self.groups.ends[group]

            def stage(step: Scalar, state: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
                slot, nth = state
                self.pipeline.acquire(slot, nth)
                first = aligned + step * TILE
                seen = lax.div(first, ROW_ALIGNMENT) * ROW_ALIGNMENT  # TMA needs to see that it is a multiple of 8
                for_width(_WIDTHS, end - first, lambda width: copy(seen, width, m, n, slot))
                return self.pipeline.next_slot(slot), nth + 1

            return lax.fori_loop(0, self.num_stages(group), stage, state)

        lax.fori_loop(0, self.share.num_items, item, (jnp.int32(0), jnp.int32(0)))

    def copy_d(self) -> None:
        """Copies rows of `d`: of each warpgroup its 64 columns."""

        def copy(first: Any, width: int, m: Scalar, n: Scalar, slot: Scalar) -> None:
            del n
            for wm in range(self.config.warpgroups_m):
                columns = pl.ds(m * self.config.block_m + wm * self.config.warpgroup_rows, self.config.warpgroup_rows)
                buffer = self.shared.rows.at[slot, wm, pl.ds(0, width)]
                self.pipeline.copy(self.d.at[pl.ds(first, width), columns], buffer, slot)

        self._produce(copy)

    def copy_rows(self) -> None:
        """Copies rows of `rows`."""

        def copy(first: Any, width: int, m: Scalar, n: Scalar, slot: Scalar) -> None:
            del m
            columns = pl.ds(n * self.config.block_n, self.config.block_n)
            buffer = self.shared.weights.at[slot, pl.ds(0, width)]
            self.pipeline.copy(self.rows.at[pl.ds(first, width), columns], buffer, slot)

        self._produce(copy)

    def consume(self, warpgroup: Scalar) -> None:
        """Computes the tiles of a consumer warpgroup."""
        config = self.config

        def item(turn: Scalar, slot: Scalar) -> Scalar:
            group, m, n = self.position(turn)
            count = self.num_stages(group)
            acc = pl.run_scoped(
                partial(self._sum, warpgroup, group, count, slot), Accumulator((config.warpgroup_rows, config.block_n), jnp.float32)
            )
            self._store(acc, group, m * config.block_m + warpgroup * config.warpgroup_rows, n * config.block_n)
            return lax.rem(slot + count, config.num_stages)

        lax.fori_loop(0, self.share.num_items, item, jnp.int32(0))
        if config.staged:
            plgpu.wait_smem_to_gmem(0)

    def _store(self, acc: Array, group: Scalar, row: Scalar, column: Scalar) -> None:
        """Writes a tile of a group's result."""
        _, rows, columns = self.out.shape
        buffers = self.shared.results
        if buffers is None:
            before = group * rows
            store(self.out, acc, before + row, (before, before + rows), column, columns)
            return

        def copy(piece: Ref, down: int, right: int) -> None:
            @pl.when((row + down < rows) & (column + right < columns))
            def _() -> None:
                there = self.out.at[group, pl.ds(row + down, piece.shape[0]), pl.ds(column + right, piece.shape[1])]
                plgpu.copy_smem_to_gmem(piece, there, commit_group=False)

        send(buffers.at[lax.axis_index("warpgroup")], acc, copy)

    def _sum(self, warpgroup: Scalar, group: Scalar, count: Scalar, slot: Scalar, acc: Ref) -> Array:
        """The sum of a work item's products. A stage is released when the product after it has begun."""
        pipeline, shared = self.pipeline, self.shared
        aligned, start, end = (array[group] for array in self.groups)

        def operands(slot: Scalar, step: Scalar) -> tuple[Ref, Ref]:
            """Both operands of a stage, once they are there."""
            pipeline.wait(slot)
            d, rows = shared.rows.at[slot, warpgroup], shared.weights.at[slot]
            inside = start - (aligned + step * TILE), end - (aligned + step * TILE)
            pl.when((inside[0] > 0) | (inside[1] < TILE))(lambda: keep_rows((d, rows), *inside))
            return d, rows

        def stage(step: Scalar, slots: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
            slot, before = slots
            d, rows = operands(slot, step)
            plgpu.wgmma(acc, d.transpose((1, 0)), rows)
            plgpu.wgmma_wait(1)
            pl.when(step > 0)(lambda: pipeline.release(before))
            return pipeline.next_slot(slot), slot

        whole = count - 1 if self.config.fine else count
        slot, before = lax.fori_loop(0, whole, stage, (slot, slot))
        plgpu.wgmma_wait(0)
        pl.when(whole > 0)(lambda: pipeline.release(before))
        total = acc[...]
        if not self.config.fine:
            return total

        def last() -> Array:
            d, rows = operands(slot, count - 1)
            left = end - (aligned + (count - 1) * TILE)
            index = lax.div(jnp.minimum(left, TILE) + 15, 16) - 1
            branches = [partial(lambda width, total: add_outer(total, d, rows, width), width) for width in _SUMMED]
            sums = lax.switch(index, branches, total)
            pipeline.release(slot)
            return sums

        return lax.cond(count > 0, last, lambda: total)
