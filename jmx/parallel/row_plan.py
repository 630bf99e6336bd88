"""The rows that a device sends, one a (token, rank), in rounds of a fixed number of rows for each pair of ranks."""

from math import ceil, comb
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jmx.parallel.exchange import Call
from jmx.routing import Routing
from jmx.util.typing import Array, Bool, Int32

# Rows of a pair of ranks in a round, in units of the average: every one is sent, also if it is empty, and what does not
# fit needs another round, which reads all weights again. It must be between 1 and 2.
ROWS_OF_A_ROUND = 1.5


class RowPlan(NamedTuple):
    """Where the rows of this device's T tokens are among those that it sends; a pytree.

    needed: (T, R) whether a token is sent to a rank.
    position: (T, R) the number of its row among those sent to this rank, in the order of the tokens.
    tokens: (R, n) the token of each row, in rounds of n / (number of rounds) rows; T where a row is empty.
    """

    needed: Bool[Array, "T R"]
    position: Int32[Array, "T R"]
    tokens: Int32[Array, "R n"]


def average_rows(call: Call) -> float:
    """Rows of a pair of ranks, on average if each k of E experts are equally likely: T (1 - C(E - n, k) / C(E, k)) with
    n experts a rank."""
    total, k = call.num_experts, min(call.top_k, call.num_experts)
    return call.num_tokens * (1 - comb(total - call.experts_per_rank, k) / comb(total, k))


def accepted_rows(call: Call) -> int:
    """Rows that a rank accepts from each: those of all its tokens, or of the capacity, rounded up."""
    if call.capacity is None:
        return call.num_tokens
    return ceil(min(call.num_tokens, call.capacity * average_rows(call)))  # the product may be infinite


def rows_of_a_round(call: Call) -> int:
    """Rows of a pair of ranks in a round, at least one."""
    return max(1, min(accepted_rows(call), int(ROWS_OF_A_ROUND * average_rows(call))))


def most_rounds(call: Call) -> int:
    """The number of rounds if all tokens are sent to one rank."""
    return ceil(accepted_rows(call) / rows_of_a_round(call))


def plan_rows(call: Call, routing: Routing, first_experts: Int32[Array, " R"]) -> RowPlan:
    """The rows of this device's tokens; `first_experts`: the first one of each rank."""
    local_ids = routing.expert_ids[:, None, :] - first_experts[None, :, None]
    needed = ((local_ids >= 0) & (local_ids < call.experts_per_rank)).any(-1)
    position = jnp.cumsum(needed, axis=0, dtype=jnp.int32) - 1
    needed &= position < accepted_rows(call)
    size = most_rounds(call) * rows_of_a_round(call)
    ranks = jnp.broadcast_to(jnp.arange(call.num_ranks), needed.shape)
    token = jnp.broadcast_to(jnp.arange(call.num_tokens, dtype=jnp.int32)[:, None], needed.shape)
    empty = jnp.full((call.num_ranks, size), call.num_tokens, jnp.int32)
    tokens = empty.at[ranks, jnp.where(needed, position, size)].set(token, mode="drop")
    return RowPlan(needed, position, tokens)


def rounds_needed(call: Call, plan: RowPlan) -> Int32[Array, ""]:
    """The number of rounds that the rows of all ranks need, the same on each of them."""
    most = jnp.max(jnp.sum(plan.needed, axis=0, dtype=jnp.int32), initial=0)
    return -(-lax.pmax(most, call.axes) // rows_of_a_round(call))
