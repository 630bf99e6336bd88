"""Keeping experts where they are: ranks of a packing are renumbered, and their slots reordered, to move few weights."""

import numpy as np

from jmx.parallel.packing import Table
from jmx.parallel.placement import EMPTY
from jmx.util.typing import Bool, Int


def kept(table: Table, before: Table, hosts: int = 1) -> Table:
    """`table` with its ranks in another order, and each rank's slots, so that most slots hold the same as `before`.

    `hosts`: how many hosts the ranks are divided among; ranks keep their company. With one host any order is allowed.
    """
    num_experts = max(int(table.max()), int(before.max())) + 1
    by_host = (hosts, -1, table.shape[1])
    new, old = table.reshape(by_host), before.reshape(by_host)
    new = new[_matched(_holds(new, num_experts), _holds(old, num_experts))]
    ranks = [
        mine[_matched(_holds(mine, num_experts), _holds(its, num_experts))] for mine, its in zip(new, old, strict=True)
    ]
    return np.stack([_in_place(*rows) for rows in zip(np.concatenate(ranks), before, strict=True)])


def moves(table: Table, before: Table) -> int:
    """How many slots need the weights of another slot."""
    return int(((table != before) & (table != EMPTY)).sum())


def _holds(tables: Int[np.ndarray, "units ..."], num_experts: int) -> Bool[np.ndarray, "units E"]:
    """Whether each unit, a rank or a host, holds each expert."""
    flat = tables.reshape(len(tables), -1)
    found = np.zeros((len(tables), num_experts + 1), bool)
    found[np.arange(len(tables))[:, None], flat] = True
    return found[:, :num_experts]  # without the column of empty slots


def _matched(new: Bool[np.ndarray, "units E"], old: Bool[np.ndarray, "units E"]) -> Int[np.ndarray, " units"]:
    """Which unit of `new` takes the place of each of `old`, so that most experts stay in their unit."""
    from scipy.optimize import linear_sum_assignment  # jax depends on it; importing it takes long

    stay = old.astype(np.int64) @ new.T.astype(np.int64)
    own = np.eye(len(new)) / (len(new) + 1)  # of matches that are as good, the one that renumbers least
    return linear_sum_assignment(stay + own, maximize=True)[1]


def _in_place(row: Int[np.ndarray, " n"], before: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The experts of `row` in the slots that have them in `before`, the others in the remaining slots, in order."""
    placed = np.where(np.isin(before, row), before, EMPTY)
    coming = row[~np.isin(row, placed)]
    placed[np.flatnonzero(placed == EMPTY)[: len(coming)]] = coming
    return placed
