"""Packing: how many copies of each expert there are, and which ranks have them, so that the fullest has little load.

A table (ranks, n) has the expert in each of a rank's n slots, -1 in an empty one. Equal loads are decided by the lower
number, so that the same loads always give the same table.
"""

import heapq

import numpy as np

from jmx.parallel.placement import EMPTY
from jmx.util.typing import Bool, Float, Int, Int32

Table = Int32[np.ndarray, "ranks n"]

_LEAST_GAIN = 1e-9  # of all tokens: less is rounding


def replicate(loads: Float[np.ndarray, " E"], num_slots: int, most: int) -> Int[np.ndarray, " E"]:
    """The copies of each expert, `num_slots` in all: the expert with the most load a copy gets the next copy.

    This minimizes the largest load of a copy. An expert gets `most` copies at most, and one without load a single one:
    then there may be fewer than `num_slots`.
    """
    copies = np.ones(len(loads), np.int64)
    waiting = [(-load, expert) for expert, load in enumerate(loads.tolist()) if load > 0 and most > 1]
    heapq.heapify(waiting)
    for _ in range(num_slots - len(loads)):
        if not waiting:
            break
        expert = heapq.heappop(waiting)[1]
        copies[expert] += 1
        if copies[expert] < most:
            heapq.heappush(waiting, (-float(loads[expert]) / int(copies[expert]), expert))
    return copies


def pack(loads: Float[np.ndarray, " E"], copies: Int[np.ndarray, " E"], num_ranks: int, per_rank: int) -> Table:
    """Each expert's copies on the ranks with the least load that have a free slot, the largest copies first.

    An expert of which fewer ranks have a free slot gets as many copies as these are.
    """
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    shares = loads / copies
    for expert in np.lexsort((np.arange(len(loads)), -shares)).tolist():
        free = [rank for rank in range(num_ranks) if len(slots[rank]) < per_rank]
        chosen = sorted(free, key=lambda rank: (totals[rank], rank))[: int(copies[expert])]
        for rank in chosen:
            slots[rank].append(expert)
            totals[rank] += float(loads[expert]) / len(chosen)
    return np.array([[*sorted(row), *[EMPTY] * (per_rank - len(row))] for row in slots], np.int32)


def adjust(loads: Float[np.ndarray, " E"], copies: Int[np.ndarray, " E"], table: Table) -> Table:
    """`table` with the given number of copies: surplus ones leave the fullest ranks, missing ones go to the emptiest.

    A copy that no rank has a slot for is left out. All other slots keep their experts.
    """
    table = table.copy()
    shares = loads / copies
    totals = np.append(shares, 0)[table].sum(1)
    present = np.bincount(table[table != EMPTY], minlength=len(loads))
    for expert in np.flatnonzero(present > copies).tolist():
        ranks = np.flatnonzero((table == expert).any(1))
        for rank in ranks[np.argsort(-totals[ranks], kind="stable")][: int(present[expert] - copies[expert])]:
            table[rank][table[rank] == expert] = EMPTY
            totals[rank] -= shares[expert]
    missing = np.flatnonzero(present < copies)
    for expert in missing[np.argsort(-shares[missing], kind="stable")].tolist():
        for _ in range(int(copies[expert] - present[expert])):
            free = np.flatnonzero((table == EMPTY).any(1) & ~(table == expert).any(1))
            if len(free):
                rank = free[np.argmin(totals[free])]
                table[rank, np.argmax(table[rank] == EMPTY)] = expert
                totals[rank] += shares[expert]
    return table


def refine(loads: Float[np.ndarray, " E"], table: Table, enough: float) -> Table:
    """`table` after exchanges of two slots, until the fullest rank has a load of `enough` or less, or none helps.

    Each exchange is the one that leaves the fullest rank and its partner the least load.
    """
    table = table.copy()
    shares = np.append(loads / np.maximum(1, np.bincount(table[table != EMPTY], minlength=len(loads))), 0)
    has = np.zeros((len(table), len(shares)), bool)  # of each rank and expert; the last column is of empty slots
    has[np.arange(len(table))[:, None], table] = True
    has[:, EMPTY] = False
    totals = shares[table].sum(1)
    for _ in range(table.size):
        full = int(np.argmax(totals))
        exchange = None if totals[full] <= enough else _best_exchange(shares, table, has, totals, full)
        if exchange is None:
            break
        rank, mine, its = exchange
        for at, leaves, comes in (
            (full, table[full, mine], table[rank, its]),
            (rank, table[rank, its], table[full, mine]),
        ):
            has[at, leaves], has[at, comes] = False, comes != EMPTY
        table[full, mine], table[rank, its] = table[rank, its], table[full, mine]
        totals[[full, rank]] = shares[table[[full, rank]]].sum(1)
    return table


def _best_exchange(
    shares: Float[np.ndarray, " E1"],
    table: Table,
    has: Bool[np.ndarray, "ranks E1"],
    totals: Float[np.ndarray, " ranks"],
    full: int,
) -> tuple[int, int, int] | None:
    """Another rank, a slot of the rank `full`, and a slot of the other one; None if no exchange lowers the load."""
    given = shares[table[full]][:, None, None] - shares[table]  # (n, ranks, n): what the other rank gets more
    worse = np.maximum(totals[full] - given, totals[:, None] + given)
    clash = has[:, table[full]].T[:, :, None] | has[full, table]
    worse = np.where(clash, np.inf, worse)
    worse[:, full] = np.inf
    best = int(np.argmin(worse))
    if worse.flat[best] >= totals[full] - _LEAST_GAIN * totals.sum():
        return None
    mine, rank, its = np.unravel_index(best, worse.shape)
    return int(rank), int(mine), int(its)


def rank_totals(loads: Float[np.ndarray, " E"], table: Table) -> Float[np.ndarray, " ranks"]:
    """The load of each rank, an expert's divided equally among its copies."""
    copies = np.maximum(1, np.bincount(table[table != EMPTY], minlength=len(loads)))
    return np.append(loads / copies, 0)[table].sum(1)
