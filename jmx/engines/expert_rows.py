"""Rows of tokens in the order of their experts, in whole blocks: dispatch, combine, and the expert of each block.

Both have transposes of their own: the transpose of a gather would be a scatter, which adds in any order.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx import grouping
from jmx.grouping import SortedRows
from jmx.util.typing import Array, Bool, Float, Float32, Int32

_LEAST, _MOST = 8, 128  # rows of a block


class Rows(NamedTuple):
    """R rows in n = R / M blocks of M, each of one expert.

    Args:
        sorted: the rows of the assignments.
        expert_of_block: (n,) int32; blocks without rows have any.
        valid: (R,) bool, False for rows of no assignment.
    """

    sorted: SortedRows
    expert_of_block: Int32[Array, " n"]
    valid: Bool[Array, " R"]

    @classmethod
    def of(cls, expert_ids: Int32[Array, "T k"], num_experts: int) -> "Rows":
        """Rows for the assignments of `expert_ids` (T, k); ids outside 0..E-1 have none."""
        align = block_rows(expert_ids.size, num_experts)
        rows = grouping.sort_rows(expert_ids, num_experts, align)
        first = jnp.arange(rows.assignment_of_row.size // align, dtype=jnp.int32) * align
        return cls(rows, rows.expert_of(first), rows.assignment_of_row >= 0)

    def blocked(self, rows: Float[Array, "R N"]) -> Float[Array, "n M N"]:
        """Rows as blocks."""
        return rows.reshape(self.expert_of_block.size, -1, rows.shape[-1])

    def weights(self, weights: Float[Array, "T k"]) -> Float32[Array, " R"]:
        """The routing weight of each row, 0 for rows of no assignment."""
        found = weights.astype(jnp.float32).reshape(-1)[jnp.maximum(self.sorted.assignment_of_row, 0)]
        return jnp.where(self.valid, found, 0)

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
