"""What `product` and `fitted` share, both rows of groups times their group's weights.

That is how they are launched, their work items, and the copies of rows. The loop over the stages of a sum is `outer`'s,
too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.float_sm90.blocks import RowBlocks, Schedule
from jmx.pallas.float_sm90.config import Launch
from jmx.pallas.sm90.launch import for_width, launch, persistent_kernel, specialize
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.pipeline import Pipeline
from jmx.pallas.sm90.scheduler import Share
from jmx.pallas.sm90.tiles import TILE, aligned_row
from jmx.util.typing import Array, Float, Int32

Scalar = Int32[Array, ""]


@dataclass(frozen=True)
class RowsKernel:
    """What all warps of a kernel know; `copy_weights` and `consume` are the kernel's own.

    Args:
        rows, weights, out: in global memory.
        blocks: of rows, of which the first `num_blocks` are used.
        schedule: the order of work items.
        share: those of the CTA.
        config: `product`'s or `fitted`'s.
        shared: shared memory, with `rows`, `full_barriers` and `empty_barriers`.
        transposed: whether weights are multiplied as they are.
    """

    rows: Ref
    weights: Ref
    out: Ref
    blocks: RowBlocks
    num_blocks: Scalar
    schedule: Schedule
    share: Share
    config: Any
    shared: Any
    transposed: bool

    @classmethod
    def launch(
        cls,
        name: str,
        operands: tuple[Float[Array, "R C"], Float[Array, "every N K"], RowBlocks],
        its: Launch,
        tile_columns: int,
        shared: Any,
        *,
        transposed: bool,
    ) -> Float[Array, "R W"]:
        """The products of `operands`. `tile_columns`: of the result. `shared`: types of shared memory."""
        config, num_cores, (rows, weights, _) = its.config, its.num_cores, operands
        num_rows, columns = len(rows), weights.shape[2 if transposed else 1]
        schedule = Schedule(-(-columns // tile_columns), config.section)

        def body(rows: Ref, weights: Ref, blocks: RowBlocks, out: Ref, *, shared: Any) -> None:
            num_blocks = blocks.number[0]
            share = Share.of(
                Share.begin(lax.axis_index("core")), schedule.num_items(num_blocks), rows.shape[1] // TILE, num_cores
            )
            kernel = cls(rows, weights, out, blocks, num_blocks, schedule, share, config, shared, transposed)
            warpgroup = lax.axis_index("warpgroup")
            specialize(warpgroup, config, partial(kernel.consume, warpgroup), kernel.copy_weights, kernel.copy_rows)

        if transposed:
            name += "_transposed"
        outputs = [jax.ShapeDtypeStruct((num_rows, columns), its.dtype)]
        return launch(persistent_kernel(body, name, config, num_cores, outputs, shared), *operands)[0]

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.shared.full_barriers, self.shared.empty_barriers, self.config.num_stages)

    def position(self, turn: Scalar) -> tuple[Scalar, Scalar]:
        return self.schedule.position(self.share.item(turn), self.num_blocks)

    def consume(self, warpgroup: Scalar) -> None:
        """Computes the tiles of a consumer warpgroup."""
        raise NotImplementedError

    def copy_weights(self) -> None:
        """Copies weights of all items."""
        raise NotImplementedError

    def copy_rows(self) -> None:
        """Copies the rows of a block, rounded up to one of a few numbers; what is behind them is not stored."""
        blocks = self.blocks

        def prologue(block: Scalar, column: Scalar) -> Callable[[Scalar, Scalar], None]:
            del column
            first, end = blocks.rows.aligned[block], blocks.rows.ends[block]
            aligned = aligned_row(first)

            def fill(step: Scalar, slot: Scalar) -> None:
                def copy(width: int) -> None:
                    source = self.rows.at[pl.ds(aligned, width), pl.ds(step * TILE, TILE)]
                    self.pipeline.copy(source, self.shared.rows.at[slot, pl.ds(0, width)], slot)

                for_width(self.config.widths, end - first, copy)

            return fill

        self.produce(prologue)

    def produce(self, prologue: Callable[[Scalar, Scalar], Callable[[Scalar, Scalar], None]]) -> None:
        """Fills the stages of all items; `prologue` takes an item's blocks of rows and columns, see `Pipeline`."""
        pipeline, share = self.pipeline, self.share

        def of_turn(turn: Scalar) -> Callable[[Scalar, Scalar], None]:
            fill = prologue(*self.position(turn))

            def acquired(step: Scalar, slot: Scalar) -> None:
                pipeline.acquire(slot, share.stage(turn, step))
                fill(step, slot)

            return acquired

        pipeline.produce(share, of_turn)

    def multiply(self, turn: Scalar, product: Callable[[Scalar], None]) -> None:
        """Starts the products of an item, `product` those of a slot's stage, and waits for them."""
        pipeline, share = self.pipeline, self.share
        last = multiply_stages(pipeline, pipeline.first_slot(share, turn), share.item_stages, lambda _, at: product(at))
        pipeline.release(last)


def multiply_stages(
    pipeline: Pipeline, slot: Scalar, count: Scalar | int, product: Callable[[Scalar, Scalar], None]
) -> Scalar:
    """Starts the products of `count` stages from `slot` on, and waits for them.

    A stage is released when the product after it has begun; the caller releases the last one, whose slot is returned.
    `product` takes a stage's number and its slot.
    """

    def stage(step: Scalar, slots: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        slot, before = slots
        pipeline.wait(slot)
        product(step, slot)
        plgpu.wgmma_wait(1)
        pl.when(step > 0)(lambda: pipeline.release(before))
        return pipeline.next_slot(slot), slot

    _, last = lax.fori_loop(0, count, stage, (slot, slot))
    plgpu.wgmma_wait(0)
    return last
