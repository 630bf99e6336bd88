"""Rows of tokens in the order of their experts, in whole blocks: dispatch, combine, and the expert of each block.

What takes rows from tokens, or adds rows up, has a transpose of its own: that of a gather would be a scatter, which
adds in any order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx import grouping
from jmx.grouping import SortedRows
from jmx.util.typing import Array, Bool, Float, Float32, Int32, Integer

_LEAST, _MOST = 8, 128  # rows of a block


class Rows(NamedTuple):
    """R rows in n = R / M blocks of M, each of one expert.

    Args:
        sorted: the rows of the assignments.
        expert_of_block: (n,) int32; blocks without rows have any.
        valid: (R,) bool, False for rows of no assignment.
        expert_ids: (T, k), those of the assignments.
    """

    sorted: SortedRows
    expert_of_block: Int32[Array, " n"]
    valid: Bool[Array, " R"]
    expert_ids: Integer[Array, "T k"]

    @classmethod
    def of(cls, expert_ids: Int32[Array, "T k"], num_experts: int) -> "Rows":
        """Rows for the assignments of `expert_ids` (T, k); ids outside 0..E-1 have none."""
        align = block_rows(expert_ids.size, num_experts)
        rows = grouping.sort_rows(expert_ids, num_experts, align)
        first = jnp.arange(rows.assignment_of_row.size // align, dtype=jnp.int32) * align
        return cls(rows, rows.expert_of(first), rows.assignment_of_row >= 0, expert_ids)

    def blocked(self, rows: Float[Array, "R N"]) -> Float[Array, "n M N"]:
        """Rows as blocks."""
        return rows.reshape(self.expert_of_block.size, -1, rows.shape[-1])

    def weights(self, weights: Float[Array, "T k"]) -> Float32[Array, " R"]:
        """The routing weight of each row, 0 for rows of no assignment."""
        found = weights.astype(jnp.float32).reshape(-1)[jnp.maximum(self.sorted.assignment_of_row, 0)]
        return jnp.where(self.valid, found, 0)

    @property
    def expert_of_row(self) -> Int32[Array, " R"]:
        """The expert of each row; of rows of no assignment, any."""
        return jnp.repeat(self.expert_of_block, self.valid.size // self.expert_of_block.size)

    @property
    def token_of_row(self) -> Int32[Array, " R"]:
        """The token of each row; 0 for rows of no assignment."""
        return jnp.maximum(self.sorted.assignment_of_row, 0) // self.sorted.row_of.shape[1]


def block_rows(num_assignments: int, num_experts: int) -> int:
    """M: about an eighth of an expert's average rows, a power of two, so that padding adds a sixteenth on average."""
    share = num_assignments // (8 * num_experts)
    return min(_MOST, max(_LEAST, 1 << max(0, share.bit_length() - 1)))


@jax.custom_vjp
def dispatch(x: Float[Array, "T H"], rows: Rows) -> Float[Array, "R H"]:
    """The token of each row, zeros for rows of no assignment."""
    return _gather(x, rows)


@jax.custom_vjp
def combine(of_rows: Float32[Array, "R H"], rows: Rows) -> Float32[Array, "T H"]:
    """Each token's sum over its rows, in the order of its slots."""
    return grouping.combine(of_rows[None], rows.sorted, None)


@jax.custom_vjp
def take(of_tokens: Float[Array, "T E r"], rows: Rows) -> Float[Array, "R r"]:
    """Of each row's token the values of its expert, or, if E is 1, those of all; zeros for rows of no assignment."""
    return _take(of_tokens, rows)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(of_rows: Float[Array, "R r"], rows: Rows, num_experts: int) -> Float32[Array, "T E r"]:
    """Each token's rows in the places of their experts, zeros for others; or, with one expert, their sum."""
    return _collect(of_rows, rows, num_experts)


def _take(of_tokens: Float[Array, "T E r"], rows: Rows) -> Float[Array, "R r"]:
    num_experts = of_tokens.shape[1]
    place = rows.token_of_row * num_experts + (rows.expert_of_row if num_experts > 1 else 0)
    flat = of_tokens.reshape(-1, of_tokens.shape[2])
    return jnp.where(rows.valid[:, None], flat.at[place].get(mode="promise_in_bounds"), 0)


def _collect(of_rows: Float[Array, "R r"], rows: Rows, num_experts: int) -> Float32[Array, "T E r"]:
    row_of, ids = rows.sorted.row_of, rows.expert_ids
    total = jnp.zeros((row_of.shape[0], num_experts, of_rows.shape[1]), jnp.float32)
    for slot in range(row_of.shape[1]):
        row = row_of[:, slot]
        found = of_rows.at[jnp.maximum(row, 0)].get(mode="promise_in_bounds").astype(jnp.float32)
        here = (row >= 0)[:, None] if num_experts == 1 else ids[:, slot, None] == jnp.arange(num_experts)[None]
        total += jnp.where(here[..., None], found[:, None], 0)
    return total


take.defvjp(
    lambda of_tokens, rows: (_take(of_tokens, rows), (rows, jnp.zeros((of_tokens.shape[1], 0), of_tokens.dtype))),
    lambda residuals, d: (_collect(d, residuals[0], len(residuals[1])).astype(residuals[1].dtype), None),
)
collect.defvjp(
    lambda of_rows, rows, num_experts: (_collect(of_rows, rows, num_experts), (rows, jnp.zeros(0, of_rows.dtype))),
    lambda num_experts, residuals, d: (_take(d, residuals[0]).astype(residuals[1].dtype), None),
)


def _gather(x: Float[Array, "T H"], rows: Rows) -> Float[Array, "R H"]:
    return jnp.where(rows.valid[:, None], x.at[rows.token_of_row].get(mode="promise_in_bounds"), 0)


def _dispatch_backward(residuals: tuple[Rows, Any], drows: Float[Array, "R H"]) -> tuple[Any, None]:
    rows, like = residuals
    return grouping.combine(drows[None], rows.sorted, None).astype(like.dtype), None


dispatch.defvjp(lambda x, rows: (_gather(x, rows), (rows, jnp.zeros(0, x.dtype))), _dispatch_backward)
combine.defvjp(
    lambda of_rows, rows: (grouping.combine(of_rows[None], rows.sorted, None), rows),
    lambda rows, dy: (_gather(dy, rows), None),
)
