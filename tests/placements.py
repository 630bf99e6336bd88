"""Random placements for tests of `jmx.parallel`."""

import numpy as np

from jmx.parallel import Placement


def random_table(rng: np.random.Generator, num_experts: int, num_ranks: int, per_rank: int) -> np.ndarray:
    """Experts in random slots (S,): each in one, and in about half of the spare slots copies on other ranks."""
    table = np.full((num_ranks, per_rank), -1, np.int32)
    table.flat[rng.permutation(table.size)[:num_experts]] = rng.permutation(num_experts)
    for slot in np.flatnonzero(table.reshape(-1) < 0):
        absent = np.setdiff1d(np.arange(num_experts), table[slot // per_rank])
        if len(absent) and rng.random() < 0.5:
            table.flat[slot] = rng.choice(absent)
    return table.reshape(-1)


def random_placement(rng: np.random.Generator, num_experts: int, num_ranks: int, per_rank: int) -> Placement:
    table = random_table(rng, num_experts, num_ranks, per_rank)
    return Placement.of(table, num_experts=num_experts, num_ranks=num_ranks)
