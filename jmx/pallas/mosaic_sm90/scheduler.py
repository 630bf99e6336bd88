"""The kernel's work items and their order. All of it is arithmetic on scalars, which any thread can do.

A work *item* is a block of rows by `warpgroups_m` tiles along the weight's rows (a *step*) by a part of its columns,
which come in stages. CTAs stride over the items. The order matters for the second GEMM, whose items need whole rows of
h, or with split-K a part's columns of them. With split-K the first GEMM runs by *sections*: the rows of its weight that
give one part's columns of h, for all blocks. The second GEMM runs by parts in the same order. So most of the second
GEMM's inputs are complete while the last items of the first GEMM are still being computed.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.sm90.tiles import TILE

Scalar = Any  # an int, or an int32 scalar of jax or, in tests, of numpy


class WorkItem(NamedTuple):
    """The position of an item: its block of rows, its first tile of the weight's rows, its part of the columns, its
    section, and how many tiles it has."""

    block: Scalar
    tile: Scalar
    part: Scalar
    section: Scalar
    tiles: Scalar


class Tail(NamedTuple):
    """The narrow items at the end of a GEMM.

    `first`, `first_block`: the first of them, and its block; all items of this block and of those after it are narrow.
    `tiles`, `per_block`: tiles of each, and how many a block has.
    """

    first: Scalar
    first_block: Scalar
    tiles: Scalar
    per_block: Scalar


@dataclass(frozen=True)
class Schedule:
    """The items of one GEMM.

    Args:
        config: the sizes of items.
        m_tiles, k_tiles: tiles along the weight's rows and its columns.
        num_parts: parts of the columns that are summed separately (split-K).
        section_steps: steps along the rows in a section, of which the last section may have fewer; all of them unless
            `num_parts` is 1.
        steps_before: items of a block in the GEMMs of the kernel before this one.
        num_ctas: of the kernel, if this is its last GEMM and its last items are narrow; None: they are not.
    """

    config: Config
    m_tiles: int
    k_tiles: int
    num_parts: int
    section_steps: int
    steps_before: int = 0
    num_ctas: int | None = None

    @property
    def item_stages(self) -> int:
        """Stages of an item."""
        return -(-self.k_tiles // (self.config.stage_tiles * self.num_parts))

    @property
    def m_steps(self) -> int:
        """Steps along the weight's rows."""
        return -(-self.m_tiles // self.config.warpgroups_m)

    @property
    def num_sections(self) -> int:
        """The number of sections; with several parts, that of parts."""
        return self.num_parts if self.num_parts > 1 else -(-self.m_steps // self.section_steps)

    def num_items(self, num_blocks: Scalar) -> Scalar:
        """The number of items of all CTAs."""
        if self.num_ctas is None:
            return num_blocks * (self.m_steps * self.num_parts)
        tail = self.tail(num_blocks, self.num_ctas)
        return tail.first + (num_blocks - tail.first_block) * tail.per_block

    def tail(self, num_blocks: Scalar, num_ctas: int) -> Tail:
        """The narrow items, of as few tiles as give each CTA at most one of the last items."""
        rest = lax.rem(num_blocks * (self.steps_before + self.m_steps), num_ctas)
        blocks = jnp.minimum(lax.div(rest + (self.m_steps - 1), self.m_steps), num_blocks)
        free = num_ctas + blocks * self.m_steps - rest
        tiles, per_block = jnp.int32(self.config.warpgroups_m), jnp.int32(self.m_steps)
        for fewer in reversed(range(1, self.config.warpgroups_m)):
            items = -(-self.m_tiles // fewer)
            fits = blocks * items <= free
            tiles, per_block = jnp.where(fits, fewer, tiles), jnp.where(fits, items, per_block)
        first_block = num_blocks - blocks
        return Tail(first_block * self.m_steps, first_block, tiles, per_block)

    def first_tile(self, part: Scalar, stage: Scalar) -> Scalar:
        """The first tile along the columns of a part's `stage`th stage."""
        return (part * self.item_stages + stage) * self.config.stage_tiles

    def work_item(self, item: Scalar, num_blocks: Scalar) -> WorkItem:
        """The position of an item: sections vary slowest, then blocks, then steps. Past the end: that of some item."""
        num_blocks = jnp.maximum(num_blocks, 1)
        item = jnp.minimum(item, self.num_items(num_blocks) - 1)
        if self.num_ctas is not None:
            return self._with_tail(item, self.tail(num_blocks, self.num_ctas))
        section = jnp.int32(0)
        if self.num_sections > 1:
            section = lax.div(item, self.section_steps * num_blocks)
            item = item - section * (self.section_steps * num_blocks)
        steps = self._steps(section)
        step = lax.rem(item, steps)
        if self.num_parts == 1:
            step = step + section * self.section_steps
        part = section if self.num_parts > 1 else jnp.int32(0)
        tiles = jnp.int32(self.config.warpgroups_m)
        return WorkItem(lax.div(item, steps), step * self.config.warpgroups_m, part, section, tiles)

    def _with_tail(self, item: Scalar, tail: Tail) -> WorkItem:
        """`work_item` of a GEMM whose last items are narrow, which has one part and one section."""
        nth, only = item - tail.first, jnp.int32(0)
        narrow = nth >= 0
        per_block = jnp.where(narrow, tail.per_block, self.m_steps)
        nth, before = jnp.where(narrow, nth, item), jnp.where(narrow, tail.first_block, 0)
        tiles = jnp.where(narrow, tail.tiles, jnp.int32(self.config.warpgroups_m))
        block = lax.div(nth, per_block)
        return WorkItem(before + block, (nth - block * per_block) * tiles, only, only, tiles)

    def _steps(self, section: Scalar) -> Scalar:
        """Steps along the weight's rows in a section."""
        if self.num_parts > 1 or self.num_sections == 1:
            return jnp.int32(self.m_steps)
        return jnp.minimum(self.section_steps, self.m_steps - section * self.section_steps)

    def counter(self, item: WorkItem) -> Scalar:
        """The counter that signals an item's rows of h: one per section, or, if there is only one, one per block."""
        return item.section if self.num_sections > 1 else item.block

    def needed(self, follower: WorkItem, num_blocks: Scalar) -> tuple[Scalar, Scalar]:
        """The counter that an item of the second GEMM waits for, and its value once all rows of h are written."""
        if self.num_sections == 1:
            return follower.block, jnp.int32(self.m_steps * self.config.warpgroups_m)
        section = jnp.minimum(follower.part, self.num_sections - 1)  # the last parts may consist of padding
        return section, self._steps(section) * (num_blocks * self.config.warpgroups_m)


def schedules(
    config: Config, gate_up: tuple[int, int], down: tuple[int, int], tile_columns: int, max_blocks: int, num_ctas: int
) -> tuple[Schedule, Schedule]:
    """The schedules of both GEMMs; in the second one columns are divided into `config.split_k` parts.

    Without parts, and if each warpgroup has tiles of its own, the last items of the second one are narrow: of fewer
    tiles, so that CTAs that would have none take part, while some of each CTA's warpgroups wait.

    Args:
        gate_up, down: tiles along rows and columns.
        tile_columns: columns of h from one tile of `gate_up`.
        max_blocks: the maximal number of blocks, which is the number of counters.
        num_ctas: of the kernel.
    """
    m_steps = -(-gate_up[0] // config.warpgroups_m)
    narrow = config.split_k == 1 and config.warpgroups_k == 1 and config.warpgroups_m > 1
    tail = (m_steps, num_ctas if narrow else None)
    second = Schedule(config, *down, config.split_k, -(-down[0] // config.warpgroups_m), *tail)
    section_steps, rest = divmod(second.item_stages * config.stage_tiles * TILE, tile_columns * config.warpgroups_m)
    exact = config.split_k > 1 and rest == 0 and -(-m_steps // max(1, section_steps)) <= max_blocks
    return Schedule(config, *gate_up, 1, section_steps if exact else m_steps), second
