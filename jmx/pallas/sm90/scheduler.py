"""The persistent scheduler: one CTA an SM strides over the work items of one GEMM after the other.

A CTA takes every `num_ctas`th item. The items of the next GEMM go on from where those of the last one ended, so that
no SM has more than one item more than another. What an item is, each kernel knows.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

Array = Any


@dataclass(frozen=True)
class Share:
    """A CTA's share of the work items of one GEMM.

    Args:
        first_item: the number of its first one.
        stages_before, items_before: pipeline stages and items that it takes in the GEMMs before.
        all_items: items of all CTAs.
        item_stages: pipeline stages of an item.
        num_ctas: CTAs of the kernel.
        num_items: items of this CTA.
    """

    first_item: Array
    stages_before: Array
    items_before: Array
    all_items: Array
    item_stages: int
    num_ctas: int
    num_items: Array

    @classmethod
    def of(cls, start: tuple[Array, Array, Array], all_items: Array, item_stages: int, num_ctas: int) -> "Share":
        """`start`: the first three fields: `begin` of the first GEMM, `end` of the one before for the others."""
        num_items = lax.div(all_items - start[0] + (num_ctas - 1), num_ctas)
        return cls(*start, all_items, item_stages, num_ctas, num_items)

    @staticmethod
    def begin(cta: Array) -> tuple[Array, Array, Array]:
        return cta, jnp.int32(0), jnp.int32(0)

    def end(self, *, overrun_first: bool) -> tuple[Array, Array, Array]:
        """Where the next GEMM begins.

        `overrun_first`: the order of additions, which the compiler keeps: the other one costs a kernel instructions.
        """
        if overrun_first:
            first_item = self.first_item + (self.num_items * self.num_ctas - self.all_items)
        else:
            first_item = self.item(self.num_items) - self.all_items
        stages = self.stages_before + self.num_items * self.item_stages
        return first_item, stages, self.items_before + self.num_items

    def item(self, turn: Array) -> Array:
        """The number of its `turn`th item, which may be past the end."""
        return self.first_item + turn * self.num_ctas

    def stage(self, turn: Array, step: Array) -> Array:
        """The number of a stage of its `turn`th item in the whole kernel."""
        return self.stages_before + turn * self.item_stages + step
