"""Groups of rows as blocks that begin where TMA can read, at a multiple of 8 rows; and the order of work items."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.pallas.sm90.tiles import ROW_ALIGNMENT
from jmx.util.typing import Array, Int32

FITTED = 16  # rows, of which blocks that are fitted to their group have a multiple


class Groups(NamedTuple):
    """Where the rows of each group are, (E,) int32 each.

    Args:
        aligned: `starts`, rounded down to a multiple of 8: the first row that is read.
        starts, ends: the first row, and the one after the last.
    """

    aligned: Int32[Array, " E"]
    starts: Int32[Array, " E"]
    ends: Int32[Array, " E"]

    @classmethod
    def of(cls, sizes: Int32[Array, " E"]) -> "Groups":
        """Groups of `sizes` (E,), one after the other."""
        return cls.at(_sums(sizes) - sizes, sizes)

    @classmethod
    def at(cls, starts: Int32[Array, " E"], sizes: Int32[Array, " E"]) -> "Groups":
        """Groups of `sizes` (E,) from their rows `starts` on."""
        return cls(starts & -ROW_ALIGNMENT, starts, starts + sizes)


class RowBlocks(NamedTuple):
    """B blocks of rows of one group, (B,) int32 each; B is the most that any sizes need.

    All blocks of a group but the last one end `block_m` rows after the row that they begin to read at.

    Args:
        groups: the group of each block.
        rows: the rows of each block: those from `starts` on are written to the result, those from `aligned` on read.
        number: of blocks in use, B times.
    """

    groups: Int32[Array, " B"]
    rows: Groups
    number: Int32[Array, " B"]

    @classmethod
    def of(cls, every: Groups, num_rows: int, block_m: int) -> "RowBlocks":
        """Blocks of all groups, of at most `num_rows` rows together."""
        return cls._of(every, num_rows, block_m, lambda rows, number: jnp.full_like(rows, block_m))

    @classmethod
    def fitted(cls, every: Groups, num_rows: int, most: int) -> "RowBlocks":
        """Blocks of at most `most` rows, a multiple of 16. Those of a group have as many rows each, a multiple of 16,
        but the last one, which has what is left."""

        def size(rows: Any, number: Any) -> Any:
            return -(-rows // (FITTED * jnp.maximum(number, 1))) * FITTED

        return cls._of(every, num_rows, most, size)

    @classmethod
    def _of(cls, every: Groups, num_rows: int, most: int, size: Callable[[Any, Any], Any]) -> "RowBlocks":
        """`size`: from each group's rows, from where they are read, and its number of blocks, to rows of a block."""
        rows = every.ends - every.aligned
        needed = jnp.where(every.ends > every.starts, -(-rows // most), 0)
        sizes = size(rows, needed)
        ends = _sums(needed)
        index = jnp.arange(max_blocks(num_rows, every.starts.size, most), dtype=jnp.int32)
        group = (ends[None] <= jnp.minimum(index, ends[-1] - 1)[:, None]).sum(axis=1, dtype=jnp.int32)
        group = jnp.minimum(group, every.starts.size - 1)
        first = every.aligned[group] + (index - (ends - needed)[group]) * sizes[group]
        last = jnp.minimum(first + sizes[group], every.ends[group])
        rows = Groups(first, jnp.maximum(first, every.starts[group]), last)
        return cls(group, rows, jnp.broadcast_to(ends[-1], index.shape))


@dataclass(frozen=True)
class Schedule:
    """The order of work items.

    Args:
        column_blocks: of the result.
        section: column blocks of a section, of which the last one may have fewer.
    """

    column_blocks: int
    section: int

    def num_items(self, num_blocks: Any) -> Any:
        return num_blocks * self.column_blocks

    def position(self, item: Any, num_blocks: Any) -> tuple[Any, Any]:
        """An item's block of rows and block of columns: sections vary slowest, then blocks of rows."""
        size = self.section * num_blocks
        section = lax.div(item, size)
        item = item - section * size
        columns = jnp.minimum(self.section, self.column_blocks - section * self.section)
        return lax.div(item, columns), section * self.section + lax.rem(item, columns)


def _sums(values: Int32[Array, " E"]) -> Int32[Array, " E"]:
    """Inclusive sums, by a reduction of all pairs, which takes fewer kernels than cumsum."""
    index = np.arange(values.size)
    return jnp.where(index[None] <= index[:, None], values[None], 0).sum(axis=1, dtype=jnp.int32)


def max_blocks(num_rows: int, num_groups: int, block_m: int) -> int:
    """The most blocks that groups of so many rows need: each in use may begin 7 rows early and have one part block."""
    used = min(num_rows, num_groups)
    return max(1, used + (num_rows + used * (ROW_ALIGNMENT - 2)) // block_m)
