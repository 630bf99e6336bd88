"""Grouping: which tokens go to which expert, in jit, with static shapes.

An *assignment* is one (token, slot) pair of a routing of T tokens to k experts each; there are R = T * k of them, and
assignment `a` belongs to token `a // k`. Sorting them by expert puts every expert's rows next to each other; cutting
those runs into blocks of at most `block_m` rows gives equal pieces of work.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Groups(NamedTuple):
    """Assignments sorted by expert.

    `order` (R,) int32: the assignment that stands at each sorted position; equal experts keep token order.
    `inverse` (R,) int32: the sorted position of each assignment.
    `sizes` (E,) int32: assignments of each expert. Ids outside 0..E-1 are sorted last and counted nowhere.
    """

    order: Array
    inverse: Array
    sizes: Array


def group(expert_ids: Array, num_experts: int) -> Groups:
    """Groups `expert_ids` (T, k), any integer dtype, by expert; see `Groups`."""
    flat = expert_ids.reshape(-1)
    if flat.dtype.itemsize < 4:  # a byte may not hold `num_experts`, which would wrap around in what follows
        flat = flat.astype(jnp.int32)
    inside = (flat >= 0) & (flat < num_experts)
    keys = jnp.where(inside, flat, num_experts).astype(jnp.int32)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    return Groups(order, inverse, jnp.zeros(num_experts, jnp.int32).at[keys].add(1, mode="drop"))


class Blocks(NamedTuple):
    """Pieces of at most `block_m` sorted rows of one expert, in expert order.

    `experts` (B,) int32: the expert of each block; `starts`, `ends` (B,) int32: its rows in sorted order.
    `num_blocks` () int32: how many of the B = `max_blocks` are real. The rest are empty and repeat the last real
    expert, so that reading their weights touches no further expert.
    """

    experts: Array
    starts: Array
    ends: Array
    num_blocks: Array


def max_blocks(num_assignments: int, num_experts: int, block_m: int) -> int:
    """The most blocks that any routing can need: a bound known while tracing."""
    whole = max(0, num_assignments - num_experts) // block_m  # each expert has one block that may not be full
    return min(num_assignments, num_experts + whole)


def cut(sizes: Array, num_assignments: int, block_m: int) -> Blocks:
    """Cuts groups of `sizes` (E,) into blocks of at most `block_m` rows; see `Blocks`."""
    (num_experts,) = sizes.shape
    per_expert = -(-sizes // block_m)
    block_ends = jnp.cumsum(per_expert)
    num_blocks = block_ends[-1]
    index = jnp.arange(max_blocks(num_assignments, num_experts, block_m), dtype=jnp.int32)
    experts = jnp.searchsorted(block_ends, jnp.minimum(index, num_blocks - 1), side="right").astype(jnp.int32)
    experts = jnp.clip(experts, 0, num_experts - 1)
    row_ends = jnp.cumsum(sizes)
    nth = index - (block_ends - per_expert)[experts]
    starts = (row_ends - sizes)[experts] + nth * block_m
    ends = jnp.where(index < num_blocks, jnp.minimum(starts + block_m, row_ends[experts]), starts)
    return Blocks(experts, starts.astype(jnp.int32), ends.astype(jnp.int32), num_blocks)
