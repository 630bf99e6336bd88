"""Products of blocks of rows with small matrices of their experts, batched: as adapters have them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx.engines.expert_rows import Rows
from jmx.numerics.formats import precision
from jmx.numerics.gate_up import join_gate_up
from jmx.util.typing import Array, Float, Int32


class Factors(NamedTuple):
    """What is added to each row of outputs, b @ inner: inner (R, r), and b of each expert, or one of all."""

    inner: Float[Array, "R r"]
    b: Float[Array, "*experts N r"]


def joined(both: Factors | None, gate: Factors | None, up: Factors | None, order: str | None) -> Factors | None:
    """What is added to all outputs of the first product, or to gate and up, as one; None if nothing is."""
    halves = [(its, of_up) for its, of_up in ((gate, False), (up, True)) if its is not None]
    if both is not None or not halves:
        return both
    inner = side_by_side([its.inner for its, _ in halves], -1)
    return Factors(inner, side_by_side([of_half(its.b, str(order), of_up=of_up) for its, of_up in halves], -1))


def of_half(b: Float[Array, "*lead I r"], order: str, *, of_up: bool) -> Float[Array, "*lead N r"]:
    """The rows of `b`, of gate or of up, among those of both, with zeros for the other half."""
    halves = (jnp.zeros_like(b.mT), b.mT) if of_up else (b.mT, jnp.zeros_like(b.mT))
    return join_gate_up(*halves, order).mT


def side_by_side(parts: Sequence[Float[Array, "..."]], axis: int) -> Float[Array, "..."]:
    """Matrices side by side; one that is shared beside one of each expert is repeated for each."""
    lead = max((part.shape[:-2] for part in parts), key=len)
    return jnp.concatenate([jnp.broadcast_to(part, (*lead, *part.shape[-2:])) for part in parts], axis=axis)


def multiply(factors: Factors, rows: Rows, dtype: Any) -> Float[Array, "n M N"]:
    """Their product, of `dtype`."""
    return block_product(rows.blocked(factors.inner), factors.b, rows.expert_of_block, dtype)


def dot(numbers: str, left: Float[Array, "..."], right: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    return jnp.einsum(numbers, left, right, precision=precision(left.dtype), preferred_element_type=dtype)


def block_product(
    blocks: Float[Array, "n M K"], matrix: Float[Array, "*lead N K"], expert_of_block: Int32[Array, " n"], dtype: Any
) -> Float[Array, "n M N"]:
    """Each row times its expert's matrix (E, N, K), or the one (N, K) of all, transposed; the result is of `dtype`."""
    if matrix.ndim == 2:
        return dot("bmk,nk->bmn", blocks, matrix, dtype)
    return dot("bmk,bnk->bmn", blocks, _take(matrix, expert_of_block), dtype)


@jax.custom_vjp
def _take(matrices: Float[Array, "E N K"], experts: Int32[Array, " n"]) -> Float[Array, "n N K"]:
    """The matrices of some experts. Its transpose is a product with a one-hot matrix, whose sums have one order."""
    return matrices.at[experts].get(mode="promise_in_bounds")


def _take_backward(residuals: tuple[Any, Any], d: Float[Array, "n N K"]) -> tuple[Any, None]:
    experts, like = residuals
    chosen = (jnp.arange(like.shape[0])[:, None] == experts[None]).astype(d.dtype)
    total = jnp.einsum("eb,bnk->enk", chosen, d, precision=precision(d.dtype), preferred_element_type=jnp.float32)
    return total.astype(d.dtype), None


_take.defvjp(
    lambda matrices, experts: (_take(matrices, experts), (experts, jnp.zeros((matrices.shape[0], 0)))), _take_backward
)
