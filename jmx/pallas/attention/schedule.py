"""Which blocks of queries the CTAs of the kernel for prompts take, and in which order: planned while it is traced."""

import heapq
from functools import lru_cache

import numpy as np

HEADS = 16  # whose items are taken at about the same time: their keys and values are then read from the L2 cache


@lru_cache
def plan(ctas: int, heads: int, blocks: int, most: int) -> np.ndarray:
    """Items of each CTA in turn, int32 (turns + 2, ctas): the first row has their number, the last one zeros.

    Item `head * blocks + block` takes `min(block + 1, most)` steps. Each goes to the CTA that is the first to be free:
    those of `HEADS` heads after each other, of these the longest items first, so that short ones fill the end.

    Args:
        ctas: CTAs, at most as many as items.
        heads: of all rows.
        blocks: of queries of a head.
        most: steps of an item at most: those that a window has.
    """
    free = [(0, cta) for cta in range(ctas)]
    taken: list[list[int]] = [[] for _ in range(ctas)]
    for first in range(0, heads, HEADS):
        for block in reversed(range(blocks)):
            for head in range(first, min(first + HEADS, heads)):
                at, cta = free[0]
                taken[cta].append(head * blocks + block)
                heapq.heapreplace(free, (at + min(block + 1, most) + 1, cta))  # 1: the item's beginning and end
    turns = max(map(len, taken))
    padded = [[len(its), *its, *[0] * (turns + 1 - len(its))] for its in taken]
    return np.array(padded, np.int32).T.copy()
