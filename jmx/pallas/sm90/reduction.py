"""Reduction over warpgroups that share a tile's columns: partial sums are passed through shared memory."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.sm90 import accumulator
from jmx.pallas.sm90.operation import Ref
from jmx.util.typing import Array, Bool, Float32, Int32

RowSums = tuple[Float32[Array, " n"], Float32[Array, " n"]]  # per-thread elements of the first and the second row


class PartialSums(NamedTuple):
    """References to shared memory and barriers, or, from `scratch`, their types.

    Args:
        values: float32 (M, K - 1, 2, n), where M warpgroups are along the weight's rows and K along the columns:
            per-thread elements of the first and the second row.
        full_barriers, empty_barriers: M each: sums have been written, sums have been read.
    """

    values: Ref
    full_barriers: Ref
    empty_barriers: Ref

    @classmethod
    def scratch(cls, warpgroups_m: int, warpgroups_k: int, block_n: int) -> "PartialSums":
        others = warpgroups_k - 1
        return cls(
            plgpu.SMEM((warpgroups_m, others, 2, accumulator.row_size(block_n)), jnp.float32),
            plgpu.Barrier(num_barriers=warpgroups_m, num_arrivals=others),
            plgpu.Barrier(num_barriers=warpgroups_m),
        )

    @jax.named_scope("send_partial_sums")
    def send(
        self, wm: Int32[Array, ""], wk: Int32[Array, ""] | int, width: int, sums: RowSums, *, again: Bool[Array, ""]
    ) -> None:
        """Writes `sums` of `width` rows: for warpgroups that are not the first along the columns.

        `again`: whether the warpgroup has sent sums before, which must have been read by now.
        """

        @pl.when(again)
        def _() -> None:
            plgpu.barrier_wait(self.empty_barriers.at[wm])

        for row in range(2):
            self.values[wm, wk - 1, row, pl.ds(0, accumulator.row_size(width))] = sums[row]
        plgpu.barrier_arrive(self.full_barriers.at[wm])

    @jax.named_scope("reduce_partial_sums")
    def reduce(self, wm: Int32[Array, ""], width: int, sums: RowSums) -> RowSums:
        """`sums` plus those that the others have sent, always in the same order: for the first warpgroup."""
        size, totals = accumulator.row_size(width), [*sums]
        plgpu.barrier_wait(self.full_barriers.at[wm])
        for other in range(self.values.shape[1]):
            for row in range(2):
                totals[row] += accumulator.load_rows(self.values.at[wm, other, row, pl.ds(0, size)], size)
        plgpu.barrier_arrive(self.empty_barriers.at[wm])
        return totals[0], totals[1]
