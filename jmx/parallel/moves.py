"""Moves: from which slot each slot of a new placement copies its weights, and in which rounds ranks send them."""

from typing import NamedTuple

import numpy as np

from jmx.parallel.placement import EMPTY, Placement, check_alike, check_placement
from jmx.util.typing import Int32


class Schedule(NamedTuple):
    """What each rank sends and receives, in rounds of one slot a rank; arrays (ranks, ...), one row a rank.

    For each distance d = 1..ranks - 1, in `rounds[d - 1]` rounds, rank r sends a slot to rank r + d (modulo ranks). The
    shapes depend on the number of ranks and slots only. Slots of a rank count from its first one.

        sources: (ranks, S), see `sources`; the same in each row.
        local: (ranks, n), from which of its own slots a rank copies each slot, before the first round.
        send: (ranks, ranks - 1, n), which slot a rank sends in each round; 0 in rounds in which nobody needs it.
        receive: (ranks, ranks - 1, n), into which slot it receives; -1 in rounds in which it receives nothing.
        rounds: (ranks, ranks - 1), the number of rounds of each distance; the same in each row.
    """

    sources: Int32[np.ndarray, "ranks S"]
    local: Int32[np.ndarray, "ranks n"]
    send: Int32[np.ndarray, "ranks distances n"]
    receive: Int32[np.ndarray, "ranks distances n"]
    rounds: Int32[np.ndarray, "ranks distances"]


def sources(before: Placement, after: Placement) -> Int32[np.ndarray, " S"]:
    """The slot of `before` that has the weights of each slot of `after`, of one layer.

    A slot that keeps its expert, or becomes empty, is its own source. Of several copies one on the same rank is taken,
    else one of those whose ranks send least, the nearest by number.

    Raises:
        ValueError, TypeError: placements of several layers, or of different sizes.
    """
    check_placement("before", before, layers=())
    check_placement("after", after, layers=())
    check_alike("after", after, before)
    per_rank = before.slots_per_rank
    old, new = (np.asarray(placement.expert_of_slot) for placement in (before, after))
    found = np.arange(after.num_slots, dtype=np.int32)
    sent = [0] * before.num_ranks
    slots_of_expert, copies = np.asarray(before.slots_of_expert), np.asarray(before.copies)
    for slot in np.flatnonzero((new != old) & (new != EMPTY)).tolist():
        rank, expert = slot // per_rank, new[slot]
        holders = slots_of_expert[expert, : copies[expert]].tolist()
        here = [holder for holder in holders if holder // per_rank == rank]
        found[slot] = min(here or holders, key=lambda h: (sent[h // per_rank], abs(h // per_rank - rank), h))
        if not here:
            sent[found[slot] // per_rank] += 1
    return found


def schedule(sources: Int32[np.ndarray, " S"], num_ranks: int) -> Schedule:
    """The rounds in which `num_ranks` ranks move each slot's weights from its source, of one layer."""
    per_rank = len(sources) // num_ranks
    local = np.tile(np.arange(per_rank, dtype=np.int32), (num_ranks, 1))
    shape = (num_ranks, num_ranks - 1, per_rank)
    send, receive = np.zeros(shape, np.int32), np.full(shape, EMPTY, np.int32)
    count = np.zeros(shape[:2], np.int32)  # of slots that each rank sends over each distance
    for slot, source in enumerate(sources.tolist()):
        (to, into), (rank, of) = divmod(slot, per_rank), divmod(source, per_rank)
        if to == rank:
            local[rank, into] = of
            continue
        distance = (to - rank) % num_ranks - 1
        place = count[rank, distance]
        send[rank, distance, place] = of
        receive[to, distance, place] = into
        count[rank, distance] += 1
    every = (num_ranks, 1)
    return Schedule(np.tile(sources, every), local, send, receive, np.tile(count.max(0, initial=0), every))
