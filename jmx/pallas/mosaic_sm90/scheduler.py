"""Which work of `kernel` there is, in which order, and who does it: scalars that any thread can compute.

An *item* is a block of rows by a step of `warpgroups_m` tiles along the weight's rows by a part of its columns. Items
go round the multiprocessors. The order matters where one product follows another: its items want rows of h whole, or,
where the columns are summed in parts, the part's columns of them. Then the first product goes by *sections*, which are
the rows of its weight that give one part's columns, over all blocks; and the second one by parts. So most of the
second product has what it needs while the last items of the first are still on their way.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jmx.pallas.mosaic_sm90.config import Config
from jmx.pallas.sm90.tiles import TILE

Scalar = Any  # an int, or an int32 array


class WorkItem(NamedTuple):
    """Where an item is: its block of rows, its first tile of the weight's rows, its part of the columns; and the
    section or part that it belongs to, 0 where all are one."""

    block: Scalar
    tile: Scalar
    part: Scalar
    section: Scalar


@dataclass(frozen=True)
class Schedule:
    """The items of one product.

    Args:
        config: how it is cut.
        m_tiles, k_tiles: tiles along the weight's rows and its columns.
        num_parts: parts of the columns that are summed apart.
        section_steps: steps along the rows in a section, the last of which may have less; all of them where
            `num_parts` is not 1.
    """

    config: Config
    m_tiles: int
    k_tiles: int
    num_parts: int
    section_steps: int

    @property
    def k_steps(self) -> int:
        """Stages of an item."""
        return -(-self.k_tiles // (self.config.stage_tiles * self.num_parts))

    @property
    def m_steps(self) -> int:
        return -(-self.m_tiles // self.config.warpgroups_m)

    @property
    def num_sections(self) -> int:
        """Sections, or parts."""
        return self.num_parts if self.num_parts > 1 else -(-self.m_steps // self.section_steps)

    def num_items(self, num_blocks: Scalar) -> Scalar:
        return num_blocks * (self.m_steps * self.num_parts)

    def first_tile(self, part: Scalar, step: Scalar) -> Scalar:
        """The first tile of the columns that a part's `step`th stage holds."""
        return (part * self.k_steps + step) * self.config.stage_tiles

    def work_item(self, item: Scalar, num_blocks: Scalar) -> WorkItem:
        """Sections run slowest, then blocks, then steps along the rows. Past the end: where some item is."""
        num_blocks = jnp.maximum(num_blocks, 1)
        item = jnp.minimum(item, self.num_items(num_blocks) - 1)
        section = jnp.int32(0)
        if self.num_sections > 1:
            section = lax.div(item, self.section_steps * num_blocks)
            item = item - section * (self.section_steps * num_blocks)
        steps = self._steps(section)
        step = lax.rem(item, steps)
        if self.num_parts == 1:
            step = step + section * self.section_steps
        part = section if self.num_parts > 1 else jnp.int32(0)
        return WorkItem(lax.div(item, steps), step * self.config.warpgroups_m, part, section)

    def _steps(self, section: Scalar) -> Scalar:
        """Steps along the rows of a section."""
        if self.num_parts > 1 or self.num_sections == 1:
            return jnp.int32(self.m_steps)
        return jnp.minimum(self.section_steps, self.m_steps - section * self.section_steps)

    def counter(self, item: WorkItem) -> Scalar:
        """Which counter tells of an item's rows of h: one a section, or, where there is but one, one a block."""
        return item.section if self.num_sections > 1 else item.block

    def needed(self, follower: WorkItem, num_blocks: Scalar) -> tuple[Scalar, Scalar]:
        """The counter that an item of the second product waits for, and its value when all rows of h are written."""
        if self.num_sections == 1:
            return follower.block, jnp.int32(self.m_steps * self.config.warpgroups_m)
        section = jnp.minimum(follower.part, self.num_sections - 1)  # the last parts may be padding only
        return section, self._steps(section) * (num_blocks * self.config.warpgroups_m)


def schedules(
    config: Config, gate_up: tuple[int, int], down: tuple[int, int], tile_columns: int, max_blocks: int
) -> tuple[Schedule, Schedule]:
    """Those of both products, of which the second one's columns are cut into `config.split_k` parts.

    Args:
        gate_up, down: tiles along rows and columns.
        tile_columns: columns of h that a tile of `gate_up` gives.
        max_blocks: blocks that there may be, which is how many counters there are.
    """
    second = Schedule(config, *down, config.split_k, -(-down[0] // config.warpgroups_m))
    m_steps = -(-gate_up[0] // config.warpgroups_m)
    section_steps, rest = divmod(second.k_steps * config.stage_tiles * TILE, tile_columns * config.warpgroups_m)
    exact = config.split_k > 1 and rest == 0 and -(-m_steps // max(1, section_steps)) <= max_blocks
    return Schedule(config, *gate_up, 1, section_steps if exact else m_steps), second
