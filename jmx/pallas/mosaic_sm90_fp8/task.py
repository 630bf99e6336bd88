"""A job of a launch as one thread of it sees it: which items are its multiprocessor's, and where they pass through."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jmx.grouping import Blocks
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.fused_quantize import Rounding
from jmx.pallas.mosaic_sm90_fp8.grouped_gemm import Job, Operands
from jmx.pallas.sm90.reduction import Sums
from jmx.pallas.sm90.tiles import TILE

Array = Any


class Shared(NamedTuple):
    """Shared memory of a launch: the ring's stages, its barriers, and others; None for what there is not."""

    x: Any  # or all units of the rows that are kept, and so are `x_scales`
    values: Any
    scales: Any
    x_scales: Any
    of_warps: Any  # words of each warpgroup, for rounding
    row_scales: Any  # of rows that are kept
    of_kept: Any
    sums_values: Any  # and so on: of `sums`
    sums_full: Any
    sums_empty: Any
    full: Any
    empty: Any
    turns: Any
    rounded: Any

    @property
    def sums(self) -> Sums:
        """That warpgroups along the columns hand over."""
        return Sums(self.sums_values, self.sums_full, self.sums_empty)


class Place(NamedTuple):
    """Where a thread is, and what its multiprocessor went through in the jobs before."""

    warpgroup: Array
    core: Array
    first_item: Array
    stages_before: Array


@dataclass(frozen=True)
class Task:
    """See above. Items go round the multiprocessors; each passes through the ring a stage of its columns at a time.

    Args:
        job: what is computed.
        g: its arrays, as refs.
        work: its blocks of rows, with refs.
        out_g: ref of the result.
        out_s: ref of it in shared memory, a tile's each.
        shared: refs of the rest of that.
        here: where this thread is.
        rounding: of the rows, where that is part of the launch.
        config, num_rows, num_cores: the launch's.
        num_items: of all multiprocessors.
        num_mine: of this one.
    """

    job: Job
    g: Operands
    work: Blocks
    out_g: Any
    out_s: Any
    shared: Shared
    here: Place
    rounding: Rounding | None
    config: Config
    num_rows: int
    num_cores: int
    num_items: Array
    num_mine: Array

    @classmethod
    def of(
        cls,
        job: Job,
        g: Operands,
        blocks: Blocks,
        out_g: Any,
        out_s: Any,
        shared: Shared,
        here: Place,
        rounding: Rounding | None,
        *,
        config: Config,
        num_rows: int,
        num_cores: int,
    ) -> "Task":
        """`blocks` with refs."""
        work = blocks._replace(x_rows=blocks.out_rows) if job.results else blocks
        num_items = work.number * (_steps(job, config) * job.split_k)
        num_mine = lax.div(num_items - here.first_item + (num_cores - 1), num_cores)
        launch = config, num_rows, num_cores
        return cls(job, g, work, out_g, out_s, shared, here, rounding, *launch, num_items, num_mine)

    @property
    def wm(self) -> Array:
        """Which of the warpgroups along the weight's rows this one is."""
        mine, config = self.here.warpgroup, self.config
        return mine if config.warpgroups_k == 1 else lax.rem(mine, config.warpgroups_m)

    @property
    def wk(self) -> Array | int:
        """The same along the columns."""
        mine, config = self.here.warpgroup, self.config
        return 0 if config.warpgroups_k == 1 else lax.div(mine, config.warpgroups_m)

    @property
    def stages(self) -> int:
        """Stages of an item, which is one part of the columns; behind the weight's last unit are zeros."""
        units = -(-self.job.product.units // self.job.split_k)
        return -(-units // self.config.warpgroups_k)

    @property
    def tokens_may_be_a(self) -> bool:
        """Whether tokens are the operand A of some blocks' products."""
        job, config = self.job, self.config
        may = job.rows.by_block and not job.product.decoded and job.split_k == 1 and not config.keeps_rows
        return may and config.tokens_may_be_a and job.product.staged(config) >= TILE

    def item(self, turn: Array) -> tuple[Array, Array, Array]:
        """Block, first tile of the weight's rows and part of the columns; past the end of some item."""
        nth = jnp.clip(self.here.first_item + turn * self.num_cores, 0, jnp.maximum(self.num_items, 1) - 1)
        step, part = lax.div(nth, self.job.split_k), lax.rem(nth, self.job.split_k)
        steps = _steps(self.job, self.config)
        return lax.div(step, steps), lax.rem(step, steps) * self.config.warpgroups_m, part

    def first_slot(self, turn: Array) -> Array:
        """Where in the ring an item begins."""
        return lax.rem(self.here.stages_before + turn * self.stages, self.config.num_stages)

    def after(self, slot: Array) -> Array:
        return jnp.where(slot + 1 == self.config.num_stages, 0, slot + 1)

    @property
    def next_place(self) -> Place:
        """Where this thread is in the job behind, whose items go on from where these end."""
        here, behind = self.here, self.here.first_item + self.num_mine * self.num_cores - self.num_items
        return here._replace(first_item=behind, stages_before=here.stages_before + self.num_mine * self.stages)


def _steps(job: Job, config: Config) -> int:
    """Items of a block and a part of the columns."""
    return -(-job.product.m_tiles // config.warpgroups_m)
