"""The shared memory of the kernel for prompts, and its barriers: stages of keys and values, queries, results, turns."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

from functools import partial
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jmx.pallas.attention.schedule import BLOCK
from jmx.pallas.attention.softmax import shared_memory
from jmx.pallas.sm90.operation import Ref

ROWS = 64  # queries of one consumer warpgroup; two or three share the keys that a producer warpgroup loads


class Stages(NamedTuple):
    """Blocks of keys, or of values, in the stages of the pipeline, by the number of a step of the CTA."""

    blocks: Ref
    full: Ref
    empty: Ref

    @classmethod
    def types(cls, count: int, consumers: int, channels: int, dtype: jax.typing.DTypeLike) -> "Stages":
        return cls(
            blocks=shared_memory(count, BLOCK, channels, dtype=dtype),
            full=plgpu.Barrier(num_barriers=count),
            empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=count),
        )

    def stage(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.blocks.shape[0]))

    def load(self, step: jax.Array, source: Ref) -> None:
        """Begins to copy a block, once both consumers are done with the one before it."""
        stage = self.stage(step)
        with jax.named_scope("acquire"):
            pl.when(step >= self.blocks.shape[0])(partial(plgpu.barrier_wait, self.empty.at[stage]))
        plgpu.copy_gmem_to_smem(source, self.blocks.at[stage], self.full.at[stage])

    @jax.named_scope("wait")
    def wait(self, step: jax.Array) -> Ref:
        """The block, when it is here."""
        stage = self.stage(step)
        plgpu.barrier_wait(self.full.at[stage])
        return self.blocks.at[stage]

    def release(self, step: jax.Array) -> None:
        """A consumer is done with the block."""
        plgpu.barrier_arrive(self.empty.at[self.stage(step)])


class Shared(NamedTuple):
    """The shared memory of a CTA, and its barriers: types, or references. Rows, results and turns are by consumer.

    Consumers take turns at tensor cores: one multiplies while the other takes exponentials.
    """

    rows: Ref
    results: Ref
    keys: Stages
    values: Stages
    rows_full: Ref
    rows_empty: Ref
    turns: Ref

    @classmethod
    def types(
        cls, stages: int, consumers: int, dim: int, value_dim: int, stored: int, dtype: jax.typing.DTypeLike
    ) -> "Shared":
        """Types for `stages` of the pipeline, and results of which `stored` channels are written at a time."""
        return cls(
            rows=shared_memory(consumers, ROWS, dim, dtype=dtype),
            results=shared_memory(consumers, ROWS, stored, dtype=dtype),
            keys=Stages.types(stages, consumers, dim, dtype),
            values=Stages.types(stages, consumers, value_dim, dtype),
            rows_full=plgpu.Barrier(num_barriers=consumers),
            rows_empty=plgpu.Barrier(num_arrivals=consumers),
            turns=plgpu.Barrier(num_barriers=consumers),
        )

    @property
    def consumers(self) -> int:
        return self.rows.shape[0]

    @jax.named_scope("take_turns")
    def take_turn(self, warpgroup: jax.Array) -> None:
        """Waits until the consumer before passes the turn."""
        plgpu.barrier_wait(self.turns.at[warpgroup])

    def pass_turn(self, warpgroup: jax.Array) -> None:
        """To the next consumer."""
        if self.consumers == 2:
            plgpu.barrier_arrive(self.turns.at[1 - warpgroup])
        else:
            plgpu.barrier_arrive(self.turns.at[lax.rem(warpgroup + 1, jnp.int32(self.consumers))])

    def skip_step(self, step: jax.Array, warpgroup: jax.Array) -> None:
        """A step of the CTA that this consumer's queries do not see: others wait for its turn, and its releases."""
        self.take_turn(warpgroup)
        self.pass_turn(warpgroup)
        for stages in (self.keys, self.values):
            stages.wait(step)
            stages.release(step)
