"""How rows are rounded in the launch that multiplies them, and how its threads tell each other how far it is.

All warpgroups that compute round a share of a job's rows into global memory, and wait for each other. Or, with
`keeps_rows`, a multiprocessor rounds all rows of a block into its own shared memory, a warpgroup each, where they stay
while they are multiplied: nobody has to be told of them, and nothing fetches them. Of x that is done once; of h for
each item anew, which is why there are not two rows a warpgroup.

For h either begins once all of its columns are there, which counters in global memory tell.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.mosaic_sm90_fp8.quantize import Sources, keep_row, round_row
from jmx.pallas.mosaic_sm90_fp8.quantize_row import Unrounded
from jmx.pallas.sm90 import counters

Array = Any
_COUNTERS = 4  # of how far a launch is
KEPT_BARRIERS = 2  # that nobody multiplies the rows that are kept any more, and that others are there


def new_counters(experts: jax.Array) -> jax.Array:
    """Those of two jobs. Zeros, which XLA makes in the kernel that makes `experts`, if these are enough."""
    zeros = experts >> 30
    return zeros if zeros.size >= _COUNTERS else jnp.pad(zeros, (0, _COUNTERS - zeros.size))


class Rounding(NamedTuple):
    """Of a job's rows, as one thread sees it.

    Args:
        rows, sources: what is rounded.
        values, scales: refs of what becomes of it: as in `rows.rounded`, or as `keep_row` has it.
        of_warps: int32 (WORDS,) of the warpgroup's, in shared memory.
        counters: see `counters`.
        barriers: `KEPT_BARRIERS`, at which all warpgroups that compute arrive; None where no rows are kept.
        job: of the launch, which has so many before it.
        last: whether it has none behind it.
        core, warpgroup: the thread's.
        num_cores, num_compute: multiprocessors, and warpgroups of each that compute.
    """

    rows: Unrounded
    sources: Sources
    values: Any
    scales: Any
    of_warps: Any
    counters: Any
    barriers: Any
    job: int
    last: bool
    core: Array
    warpgroup: Array
    num_cores: int
    num_compute: int

    @property
    def _everyone(self) -> int:
        return self.num_cores * self.num_compute

    def round_share(self) -> None:
        """This warpgroup's share of the rows, and then until all others have theirs."""
        num_rows = self.rows.x.shape[0]
        first = self.core + self.num_cores * self.warpgroup

        @pl.when(first < num_rows)
        def _() -> None:
            step = self._everyone
            self.wait_for_results()

            @pl.loop(0, lax.div(num_rows - first + (step - 1), step))
            def _(nth: Array) -> None:
                row = first + nth * step
                round_row(self.rows, row, self.sources, self.values, self.scales, self.of_warps)

            counters.signal(self.counters, self._rounded)

        self.wait_for_rows(warpgroup=True)

    def keep(self, first_row: Array, count: Array, first_unit: Array, num_units: int, all_units: int) -> None:
        """Rows from `first_row` on, in place of what was kept before; for the rest see `keep_row`."""
        if self.job:
            self._meet(0)

        @pl.when(self.warpgroup < count)
        def _() -> None:
            keep_row(
                self.rows,
                first_row + self.warpgroup,
                self.sources,
                self.values,
                self.scales,
                self.of_warps,
                place=self.warpgroup,
                first_unit=first_unit,
                num_units=num_units,
                all_units=all_units,
            )

        plgpu.commit_smem()
        self._meet(1)

    def _meet(self, barrier: int) -> None:
        plgpu.barrier_arrive(self.barriers.at[barrier])
        plgpu.barrier_wait(self.barriers.at[barrier])

    def wait_for_rows(self, *, warpgroup: bool = False) -> None:
        """A warp waits until it may fetch them, or a warpgroup until it may read their scales."""
        rounding = min(self.rows.x.shape[0], self._everyone)
        counters.wait(self.counters, self._rounded, jnp.int32(rounding), warpgroup=warpgroup)

    def wait_for_results(self) -> None:
        """A warpgroup waits until all those of the job before are there."""
        if self.job:
            written = self._written(self.job - 1)
            counters.wait(self.counters, written, jnp.int32(self._everyone), warpgroup=True)

    def results_are_written(self) -> None:
        """By this warpgroup: all of its own."""
        if not self.last:
            counters.signal(self.counters, self._written(self.job))

    @property
    def _rounded(self) -> Array:
        return jnp.int32(2 * self.job)

    @staticmethod
    def _written(job: int) -> Array:
        return jnp.int32(2 * job + 1)
