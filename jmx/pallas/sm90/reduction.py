"""Reduction across warpgroups that share a tile's columns: partial sums pass through shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.sm90 import accumulator

Array = Any


class PartialSums(NamedTuple):
    """Refs, or what `scratch` makes of them.

    Args:
        values: float32 (M, K - 1, 2, n): of M warpgroups along the weight's rows and K along the columns, a thread's
            first and second row.
        full, empty: M barriers each: that sums are there, and that they were read.
    """

    values: Any
    full: Any
    empty: Any

    @classmethod
    def scratch(cls, warpgroups_m: int, warpgroups_k: int, block_n: int) -> "PartialSums":
        others = warpgroups_k - 1
        return cls(
            plgpu.SMEM((warpgroups_m, others, 2, accumulator.row_size(block_n)), jnp.float32),
            plgpu.Barrier(num_barriers=warpgroups_m, num_arrivals=others),
            plgpu.Barrier(num_barriers=warpgroups_m),
        )

    def hand_over(self, wm: Array, wk: Array, width: int, sums: tuple[Array, Array], *, again: Array) -> None:
        """`sums` of `width` rows by a warpgroup that is not the first along the columns; `again`: it did so before."""

        @pl.when(again)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[wm])

        for row in range(2):
            self.values[wm, wk - 1, row, pl.ds(0, accumulator.row_size(width))] = sums[row]
        plgpu.barrier_arrive(self.full.at[wm])

    def take_over(self, wm: Array, width: int, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """By the first of them: `sums`, with those of the others, in their order."""
        size, totals = accumulator.row_size(width), [*sums]
        plgpu.barrier_wait(self.full.at[wm])
        for other in range(self.values.shape[1]):
            for row in range(2):
                totals[row] += accumulator.load_rows(self.values.at[wm, other, row, pl.ds(0, size)], size)
        plgpu.barrier_arrive(self.empty.at[wm])
        return totals[0], totals[1]
