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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.float_sm90.blocks import Groups
from jmx.pallas.float_sm90.config import Config, Launch
from jmx.pallas.float_sm90.rows_kernel import multiply_stages
from jmx.pallas.float_sm90.tile import SWIZZLED, Accumulator, buffers, keep_rows, send, store
from jmx.pallas.sm90.launch import for_width, launch, persistent_kernel, specialize
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Pipeline
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import TILE, aligned_row
from jmx.util.typing import Array, Float, Int32

Scalar = Int32[Array, ""]
_WIDTHS = (8, 16, 32, TILE)  # rows of a copy


def outer(d: Float[Array, "R N"], rows: Float[Array, "R K"], groups: Groups, its: Launch) -> Float[Array, "E N K"]:
    """The sum over each group's rows of d (N,) times rows (K,).

    Args:
        d, rows: of the same 16-bit floats, N and K multiples of 64, R of 8.
        groups: the rows of each group, which may have rows of no group between them.
    """
    config, num_cores = its.config, its.num_cores
    assert isinstance(config, Config)
    shape = groups.starts.size, d.shape[1], rows.shape[1]

    def body(d: Ref, rows: Ref, groups: Groups, out: Ref, *, shared: SharedMemory) -> None:
        tiles = -(-shape[1] // config.block_m), -(-shape[2] // config.block_n)
        share = Share.of(Share.begin(lax.axis_index("core")), shape[0] * tiles[0] * tiles[1], 0, num_cores)
        kernel = _Kernel(d, rows, out, groups, tiles, share, config, shared)
        warpgroup = lax.axis_index("warpgroup")
        specialize(warpgroup, config, partial(kernel.consume, warpgroup), kernel.copy_rows, kernel.copy_d)

    outputs = [jax.ShapeDtypeStruct(shape, its.dtype)]
    kernel = persistent_kernel(
        body, "float_outer", config, num_cores, outputs, SharedMemory.of(config, rows.dtype, its.dtype)
    )
    return launch(kernel, d, rows, groups)[0]


class SharedMemory(NamedTuple):
    """Shared memory of a CTA: types, or references.

    Args:
        d, rows: of all stages; d's for each warpgroup.
        results: see `tile.buffers`.
        full_barriers, empty_barriers: of the pipeline.
    """

    d: Ref
    rows: Ref
    results: Ref
    full_barriers: Ref
    empty_barriers: Ref

    @classmethod
    def of(cls, config: Config, dtype: Any, result: Any) -> "SharedMemory":
        stages = config.num_stages
        return cls(
            plgpu.SMEM((stages, config.warpgroups_m, TILE, TILE), dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, TILE, config.block_n), dtype, transforms=SWIZZLED),
            buffers(config, result),
            plgpu.Barrier(num_barriers=stages, num_arrivals=1 + config.warpgroups_m),
            plgpu.Barrier(num_barriers=stages, num_arrivals=config.num_warpgroups),
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
        return Pipeline(self.shared.full_barriers, self.shared.empty_barriers, self.config.num_stages)

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
                seen = aligned_row(first)
                for_width(_WIDTHS, end - first, lambda width: copy(seen, width, m, n, slot))
                return self.pipeline.next_slot(slot), nth + 1

            return lax.fori_loop(0, self.num_stages(group), stage, state)

        lax.fori_loop(0, self.share.num_items, item, (jnp.int32(0), jnp.int32(0)))

    def copy_d(self) -> None:
        """Copies rows of `d`: of each warpgroup its 64 columns."""

        def copy(first: Any, width: int, m: Scalar, n: Scalar, slot: Scalar) -> None:
            del n
            for wm in range(self.config.warpgroups_m):
                columns = pl.ds(m * self.config.block_m + wm * TILE, TILE)
                buffer = self.shared.d.at[slot, wm, pl.ds(0, width)]
                self.pipeline.copy(self.d.at[pl.ds(first, width), columns], buffer, slot)

        self._produce(copy)

    def copy_rows(self) -> None:
        """Copies rows of `rows`."""

        def copy(first: Any, width: int, m: Scalar, n: Scalar, slot: Scalar) -> None:
            del m
            columns = pl.ds(n * self.config.block_n, self.config.block_n)
            buffer = self.shared.rows.at[slot, pl.ds(0, width)]
            self.pipeline.copy(self.rows.at[pl.ds(first, width), columns], buffer, slot)

        self._produce(copy)

    def consume(self, warpgroup: Scalar) -> None:
        """Computes the tiles of a consumer warpgroup."""
        config = self.config

        def item(turn: Scalar, slot: Scalar) -> Scalar:
            group, m, n = self.position(turn)
            count = self.num_stages(group)
            acc = pl.run_scoped(
                partial(self._sum, warpgroup, group, count, slot), Accumulator((TILE, config.block_n), jnp.float32)
            )
            self._store(acc, warpgroup, group, m * config.block_m + warpgroup * TILE, n * config.block_n)
            return lax.rem(slot + count, config.num_stages)

        lax.fori_loop(0, self.share.num_items, item, jnp.int32(0))
        if config.staged:
            plgpu.wait_smem_to_gmem(0)

    def _store(self, acc: Array, warpgroup: Scalar, group: Scalar, row: Scalar, column: Scalar) -> None:
        """Writes a tile of a group's result; what is past its end is left out."""
        _, rows, columns = self.out.shape
        if not self.config.staged:
            before = group * rows
            store(self.out, acc, before + row, (before, before + rows), column, columns)
            return

        def copy(buffer: Ref, first: int) -> None:
            @pl.when((row < rows) & (column + first < columns))
            def _() -> None:
                place = pl.ds(row, TILE), pl.ds(column + first, buffer.shape[1])
                plgpu.copy_smem_to_gmem(buffer, self.out.at[(group, *place)], commit_group=False)

        send(self.shared.results.at[warpgroup], acc, copy)

    def _sum(self, warpgroup: Scalar, group: Scalar, count: Scalar, slot: Scalar, acc: Ref) -> Array:
        """The sum of a work item's products."""
        shared = self.shared
        aligned, start, end = (array[group] for array in self.groups)

        def product(step: Scalar, slot: Scalar) -> None:
            d, rows = shared.d.at[slot, warpgroup], shared.rows.at[slot]
            first = aligned + step * TILE
            inside = start - first, end - first

            pl.when((inside[0] > 0) | (inside[1] < TILE))(lambda: keep_rows((d, rows), *inside))

            plgpu.wgmma(acc, d.transpose((1, 0)), rows)

        last = multiply_stages(self.pipeline, slot, count, product)
        pl.when(count > 0)(lambda: self.pipeline.release(last))
        return acc[...]
