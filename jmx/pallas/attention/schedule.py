"""Which blocks of queries the CTAs of the kernel for prompts take, and in which order: planned while it is traced."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.pallas.sm90.operation import Ref

BLOCK = 128  # queries of one item of work, and keys of one step
HEADS = 16  # whose items are taken at about the same time, at most: their keys and values then stay in the L2 cache
CACHED = 22_000_000  # bytes of these keys and values, at most: each half of the cache holds what its SMs read


class Item(NamedTuple):
    """A block of queries of one head, and the blocks of keys that they see: `steps` of them from `first` on.

    `tile` is its number among those of the call's row, `start` the position of its first query, and `at` the last block
    of keys. `before` are the steps of the items that its CTA took before.
    """

    head: jax.Array
    tile: jax.Array
    start: jax.Array
    at: jax.Array
    row: jax.Array
    first: jax.Array
    steps: jax.Array
    before: jax.Array


@dataclass(frozen=True)
class Items:
    """The items of a call, which `ctas` CTAs take. Each of `rows` has `length` queries of `heads` heads.

    `token_bytes` is the size of a position's keys and values over the number of heads that share them. An item has
    `queries`, the last one of a row maybe fewer; other numbers than `BLOCK` are for rows that begin at position 0.
    """

    rows: int
    length: int
    heads: int
    window: int | None
    ctas: int
    token_bytes: float
    queries: int = BLOCK

    @property
    def tiles(self) -> int:
        """Items of a row's head."""
        return -(-self.length // self.queries)

    @property
    def count(self) -> int:
        return self.heads * self.rows * self.tiles

    def schedule(self) -> jax.Array | None:
        """What `each` reads; None where each CTA has one item."""
        if self.ctas == self.count:
            return None
        blocks = self.length // BLOCK
        most = blocks if self.window is None else -(-(self.window - 1) // BLOCK) + 1
        together = max(1, min(HEADS, int(CACHED / (most * BLOCK * self.token_bytes))))
        steps = tuple(min(most, -(-min((tile + 1) * self.queries, self.length) // BLOCK)) for tile in range(self.tiles))
        return jnp.asarray(plan(self.ctas, self.heads * self.rows, steps, together))

    def each(
        self, schedule: Ref | None, first_block: Callable[[jax.Array], jax.Array], take: Callable[[Item], None]
    ) -> None:
        """Calls `take` with the items of this CTA in turn. `first_block` of a row: where its queries begin."""
        cta = lax.axis_index("cta")
        if schedule is None:  # the last items, with the most steps, are the first to begin
            take(self._item(self.count - 1 - cta, jnp.int32(0), first_block))
            return

        def take_one(turn: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            number, before = state
            following = schedule[2 + turn, cta]  # is there when this item is done
            item = self._item(number, before, first_block)
            take(item)
            return following, before + item.steps

        lax.fori_loop(0, schedule[0, cta], take_one, (schedule[1, cta], jnp.int32(0)))

    def _item(self, number: jax.Array, before: jax.Array, first_block: Callable[[jax.Array], jax.Array]) -> Item:
        """The item of a number below `count`."""
        tiles, heads = jnp.int32(self.tiles), jnp.int32(self.heads)
        its, tile = lax.div(number, tiles), lax.rem(number, tiles)
        row, head = lax.div(its, heads), lax.rem(its, heads)
        start = tile * self.queries + first_block(row) * BLOCK
        at = tile + first_block(row)
        if self.queries != BLOCK:
            at = lax.div(jnp.minimum(start + self.queries, self.length) - 1, jnp.int32(BLOCK))
        seen_from = jnp.int32(0) if self.window is None else at * BLOCK - (self.window - 1)
        first = lax.div(jnp.maximum(seen_from, 0), jnp.int32(BLOCK))
        return Item(head, tile, start, at, row, first, at + 1 - first, before)


@lru_cache
def plan(ctas: int, heads: int, steps: tuple[int, ...], together: int) -> np.ndarray:
    """Items of each CTA in turn, int32 (turns + 2, ctas): the first row has their number, the last one zeros.

    Each goes to the CTA that is the first to be free: those of `together` heads after each other, of these the longest
    items first, so that short ones fill the end.

    Args:
        ctas: CTAs, at most as many as items.
        heads: of all rows.
        steps: of the items of a head, whose numbers begin at `head * len(steps)`.
        together: heads whose items are taken at about the same time.
    """
    free = [(0, cta) for cta in range(ctas)]
    taken: list[list[int]] = [[] for _ in range(ctas)]
    for first in range(0, heads, together):
        for tile in reversed(range(len(steps))):
            for head in range(first, min(first + together, heads)):
                at, cta = free[0]
                taken[cta].append(head * len(steps) + tile)
                heapq.heapreplace(free, (at + steps[tile] + 1, cta))  # 1: the item's beginning and end
    turns = max(map(len, taken))
    padded = [[len(its), *its, *[0] * (turns + 1 - len(its))] for its in taken]
    return np.array(padded, np.int32).T.copy()
