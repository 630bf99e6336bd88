"""The producer/consumer pipeline of both Hopper kernels: a ring of stages in shared memory, and its barriers.

A producer warp fills a stage by TMA copies, which arrive at the stage's full barrier as they complete. Consumer
warpgroups wait for that, multiply, and arrive at its empty barrier, for which the producer waits before it fills the
stage again. Stages run on across work items and across the GEMMs of a kernel, so that memory is never idle in between.

    producer   | acquire 0 | copy 0 | acquire 1 | copy 1 | ...          --> full_barriers[slot]
    consumer   | wait 0 | multiply 0 | release 0 | wait 1 | ...         --> empty_barriers[slot]
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.sm90.scheduler import Share

Array = Any


class Stage(NamedTuple):
    """Buffers in shared memory: of all stages, of one, or a warpgroup's part of one; None for what there is not.

    Args:
        x: rows.
        values, scales, zero_points: of the weight.
        x_scales: of the rows.
    """

    x: Any = None
    values: Any = None
    scales: Any = None
    zero_points: Any = None
    x_scales: Any = None


@dataclass(frozen=True)
class Pipeline:
    """Barriers of the stages.

    Args:
        full_barriers: refs of `num_stages` barriers, at which all copies into a stage arrive.
        empty_barriers: the same, at which all consumer warpgroups arrive.
        num_stages: stages of the ring.
    """

    full_barriers: Any
    empty_barriers: Any
    num_stages: int

    def first_slot(self, share: Share, turn: Array) -> Array:
        """The slot of the first stage of a CTA's `turn`th work item."""
        return lax.rem(share.stages_before + turn * share.item_stages, self.num_stages)

    def after(self, slot: Array) -> Array:
        """The slot of the next stage."""
        return jnp.where(slot + 1 == self.num_stages, 0, slot + 1)

    def acquire(self, slot: Array, nth: Array) -> None:
        """A producer waits until the slot is free for the `nth` stage of the kernel: at once in the first round."""

        @pl.when(nth >= self.num_stages)
        @jax.named_scope("acquire")
        def _() -> None:
            plgpu.barrier_wait(self.empty_barriers.at[slot])

    def copy(self, source: Any, buffer: Any, slot: Array) -> None:
        """A producer's copy into a stage, which arrives at the slot's full barrier when it completes."""
        plgpu.copy_gmem_to_smem(source, buffer, self.full_barriers.at[slot])

    def wait(self, slot: Array) -> None:
        """A consumer waits until all copies into the slot have completed."""
        with jax.named_scope("wait"):
            plgpu.barrier_wait(self.full_barriers.at[slot])

    def release(self, slot: Array) -> None:
        """A consumer is done with the slot."""
        plgpu.barrier_arrive(self.empty_barriers.at[slot])

    def produce(self, share: Share, prologue: Callable[[Array], Callable[[Array, Array], None]]) -> None:
        """Fills the stages of all work items of a CTA.

        Args:
            share: the CTA's work items.
            prologue: of an item's turn; returns what fills a stage, given its number in the item and its slot.
        """

        @pl.loop(0, share.num_items)
        def _(turn: Array) -> None:
            fill = prologue(turn)

            def stage(step: Array, slot: Array) -> jax.Array:
                fill(step, slot)
                return self.after(slot)

            lax.fori_loop(0, share.item_stages, stage, self.first_slot(share, turn))

    def consume(self, share: Share, turn: Array, carry: Any, multiply: Callable[[Any, Array], Any]) -> Any:
        """What becomes of `carry` by `multiply(carry, slot)` for each stage of a work item."""

        def stage(_: Array, state: tuple[Any, Array]) -> tuple[Any, Array]:
            carry, slot = state
            self.wait(slot)
            carry = multiply(carry, slot)
            self.release(slot)
            return carry, self.after(slot)

        return lax.fori_loop(0, share.item_stages, stage, (carry, self.first_slot(share, turn)))[0]
