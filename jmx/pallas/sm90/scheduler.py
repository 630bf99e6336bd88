"""The persistent scheduler: one CTA per SM strides over the work items of one GEMM after the other.

A CTA takes every `num_ctas`th item. The next GEMM starts at the CTA after the one that took the last item, so that the
numbers of items of two CTAs differ by at most one. What an item is depends on the kernel.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax

from jmx.util.typing import Array, Int32

Start = tuple[Int32[Array, ""], Int32[Array, ""], Int32[Array, ""]]  # where a CTA is when a GEMM begins


@dataclass(frozen=True)
class Share:
    """A CTA's share of the work items of one GEMM.

    Args:
        first_item: the number of its first item.
        stages_before, items_before: pipeline stages and items that it took in the GEMMs before this one.
        all_items: the number of items of all CTAs.
        item_stages: pipeline stages of an item.
        num_ctas: CTAs of the kernel.
        num_items: the number of items of this CTA.
    """

    first_item: Int32[Array, ""]
    stages_before: Int32[Array, ""]
    items_before: Int32[Array, ""]
    all_items: Int32[Array, ""] | int
    item_stages: int
    num_ctas: int
    num_items: Int32[Array, ""]

    @classmethod
    def of(cls, start: Start, all_items: Int32[Array, ""] | int, item_stages: int, num_ctas: int) -> "Share":
        """`start`: the first three fields: `begin` for the first GEMM, for others the `end` of the one before."""
        num_items = lax.div(all_items - start[0] + (num_ctas - 1), num_ctas)
        return cls(*start, all_items, item_stages, num_ctas, num_items)

    @staticmethod
    def begin(cta: Int32[Array, ""]) -> Start:
        return cta, jnp.int32(0), jnp.int32(0)

    def end(self, *, overrun_first: bool) -> Start:
        """Where the next GEMM begins.

        `overrun_first`: the order of the additions, which does not change the result. The compiler keeps it, and each
        kernel was tuned with one of them: with the other one its machine code has more instructions.
        """
        if overrun_first:
            first_item = self.first_item + (self.num_items * self.num_ctas - self.all_items)
        else:
            first_item = self.item(self.num_items) - self.all_items
        stages = self.stages_before + self.num_items * self.item_stages
        return first_item, stages, self.items_before + self.num_items

    def item(self, turn: Int32[Array, ""]) -> Int32[Array, ""]:
        """The number of the CTA's `turn`th item, which may be past the end."""
        return self.first_item + turn * self.num_ctas

    def stage(self, turn: Int32[Array, ""], step: Int32[Array, ""]) -> Int32[Array, ""]:
        """The number of the `step`th stage of the CTA's `turn`th item, counted over the whole kernel."""
        return self.stages_before + turn * self.item_stages + step
