"""The producer/consumer pipeline of both Hopper kernels: a circular buffer of stages in shared memory, with barriers.

A producer warp fills a stage by TMA copies, which arrive at the stage's full barrier as they complete. Consumer
warpgroups wait for that barrier, multiply, and arrive at the stage's empty barrier, which the producer waits for before
it fills the stage again. Stages continue across work items and across the GEMMs of a kernel, so that memory is never
idle in between.

    producer   | acquire 0 | copy 0 | acquire 1 | copy 1 | ...          --> full_barriers[slot]
    consumer   | wait 0 | multiply 0 | release 0 | wait 1 | ...         --> empty_barriers[slot]

Every wait for a stage and every release of one is a call of these four methods of `Pipeline`:

    acquire, copy    `produce` below calls the `fill` functions in `mosaic_sm90.producer` and `mosaic_sm90_fp8.producer`
    wait, release    `mosaic_sm90`: `consume` below
                     `mosaic_sm90_fp8`: in `mosaic_sm90_fp8.consumer`, `_add_units` waits, for several stages at a time;
                     `_adder` or, with tokens as operand A, `_multiply_by_token` releases each after its product,
                     or all of them after the last one
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.sm90.mlir import utils
from jmx.pallas.sm90.operation import Ref, operation
from jmx.pallas.sm90.scheduler import Share
from jmx.util.typing import Array, Int32

Scalar = Int32[Array, ""]


def finish_reads() -> None:
    """What this thread has read of a stage is read before copies into it that wait for its release.

    A load may still be reading when the release is issued, since nothing may need its result earlier. And the release
    orders no copies of TMA after it without a fence (PTX: the generic and the asynchronous proxy). What only wgmma has
    read needs none: it has been waited for.
    """

    @operation()
    def body(_: Any) -> None:
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    body()


class Stage(NamedTuple):
    """References to shared memory: of all stages, of one, or a warpgroup's part of one. Arrays that a format lacks are
    None.

    Args:
        x: rows.
        values, scales, zero_points: of the weight.
        x_scales: of the rows.
    """

    x: Ref = None
    values: Ref = None
    scales: Ref = None
    zero_points: Ref = None
    x_scales: Ref = None


@dataclass(frozen=True)
class Pipeline:
    """The barriers of the stages.

    Args:
        full_barriers: `num_stages` barriers, at which all copies into a stage arrive.
        empty_barriers: `num_stages` barriers, at which all consumer warpgroups arrive.
        num_stages: stages of the circular buffer.
    """

    full_barriers: Ref
    empty_barriers: Ref
    num_stages: int

    def first_slot(self, share: Share, turn: Scalar) -> Scalar:
        """The slot of the first stage of a CTA's `turn`th work item."""
        return lax.rem(share.stages_before + turn * share.item_stages, self.num_stages)

    def next_slot(self, slot: Scalar) -> Scalar:
        """The slot of the next stage."""
        return jnp.where(slot + 1 == self.num_stages, 0, slot + 1)

    def acquire(self, slot: Scalar, nth: Scalar) -> None:
        """A producer waits until the slot is free for the kernel's `nth` stage; the first `num_stages` do not wait."""

        @pl.when(nth >= self.num_stages)
        @jax.named_scope("acquire")
        def _() -> None:
            plgpu.barrier_wait(self.empty_barriers.at[slot])

    def copy(self, source: Ref, buffer: Ref, slot: Scalar) -> None:
        """A producer starts a copy into a stage, which arrives at the slot's full barrier when it completes."""
        plgpu.copy_gmem_to_smem(source, buffer, self.full_barriers.at[slot])

    def wait(self, slot: Scalar) -> None:
        """A consumer waits until all copies into the slot have completed."""
        with jax.named_scope("wait"):
            plgpu.barrier_wait(self.full_barriers.at[slot])

    def release(self, slot: Scalar) -> None:
        """A consumer warpgroup has read the slot, which may be filled again once all of them have."""
        plgpu.barrier_arrive(self.empty_barriers.at[slot])

    def produce(self, share: Share, prologue: Callable[[Scalar], Callable[[Scalar, Scalar], None]]) -> None:
        """Fills the stages of all work items of a CTA.

        Args:
            share: the CTA's work items.
            prologue: called with each item's turn; returns the function that fills a stage, given its number in the
                item and its slot.
        """

        @pl.loop(0, share.num_items)
        def _(turn: Scalar) -> None:
            fill = prologue(turn)

            def stage(step: Scalar, slot: Scalar) -> Scalar:
                fill(step, slot)
                return self.next_slot(slot)

            lax.fori_loop(0, share.item_stages, stage, self.first_slot(share, turn))

    def consume[T](self, share: Share, turn: Scalar, carry: T, multiply: Callable[[T, Scalar], T]) -> T:
        """Folds `multiply(carry, slot)` over the stages of a work item, waiting for each and releasing it."""

        def stage(_: Scalar, state: tuple[T, Scalar]) -> tuple[T, Scalar]:
            carry, slot = state
            self.wait(slot)
            carry = multiply(carry, slot)
            self.release(slot)
            return carry, self.next_slot(slot)

        return lax.fori_loop(0, share.item_stages, stage, (carry, self.first_slot(share, turn)))[0]

    def skip(self, share: Share, turn: Scalar) -> None:
        """Waits for the stages of a work item and releases them, for a consumer that has no part in it."""
        self.consume(share, turn, jnp.int32(0), lambda carry, _: carry)
