"""Products of blocks of rows with small matrices of their experts, batched: as adapters have them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx.engines.expert_rows import Rows
from jmx.numerics.formats import precision
from jmx.util.typing import Array, Float, Int32


class Factors(NamedTuple):
    """What is added to each row of outputs, b @ inner: inner (R, r), and b of each expert, or one of all."""

    inner: Float[Array, "R r"]
    b: Float[Array, "*experts N r"]


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
    chosen = (jnp.arange(like.shape[0])[:, None] == experts).astype(d.dtype)
    total = jnp.einsum("eb,bnk->enk", chosen, d, precision=precision(d.dtype), preferred_element_type=jnp.float32)
    return total.astype(d.dtype), None


_take.defvjp(
    lambda matrices, experts: (_take(matrices, experts), (experts, jnp.zeros((matrices.shape[0], 0)))), _take_backward
)
