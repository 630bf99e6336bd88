"""Products of rows with the small matrices of their experts: batched, one block of rows at a time.

A block reads a copy of its expert's matrix, so time does not depend on the number of experts, and rows are not padded
to those of the busiest one. Where a device has a fast `jax.lax.ragged_dot` that does the same; XLA's for GPUs without
one multiplies every row by every expert's matrix.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jmx.engines.by_products import Added
from jmx.lora.adapters import Adapter, Adapters
from jmx.util.typing import Array, Float, Int32
from jmx.xla.dot import precision


def added_by(adapters: Adapters) -> Added:
    """What adapters add to the products of a layer. bfloat16 tokens are multiplied by adapters rounded to bfloat16,
    others by float32 ones."""

    def of(
        target: str, blocks: Float[Array, "n M K"], expert_of_block: Int32[Array, " n"], dtype: Any
    ) -> Float[Array, "n M N"] | None:
        adapter = getattr(adapters, target)
        return None if adapter is None else _added(adapter, blocks, expert_of_block, dtype)

    return of


def _added(
    adapter: Adapter, blocks: Float[Array, "n M K"], expert_of_block: Int32[Array, " n"], dtype: Any
) -> Float[Array, "n M N"]:
    """scale * b @ (a @ row) of each row, of `dtype`, in which both products read and write; sums are float32."""
    # Scaled where it is smallest, in float32.
    inner = _product(blocks.astype(dtype), adapter.a.astype(dtype), expert_of_block, jnp.float32) * adapter.scale
    return _product(inner.astype(dtype), adapter.b.astype(dtype), expert_of_block, dtype)


def _product(
    blocks: Float[Array, "n M K"], matrix: Float[Array, "*lead N K"], expert_of_block: Int32[Array, " n"], dtype: Any
) -> Float[Array, "n M N"]:
    """Each row times its expert's matrix (E, N, K), or the one (N, K) of all, transposed; the result is of `dtype`."""
    exact = precision(blocks.dtype)
    if matrix.ndim == 2:
        return jnp.einsum("bmk,nk->bmn", blocks, matrix, precision=exact, preferred_element_type=dtype)
    chosen = _take(matrix, expert_of_block)
    return jnp.einsum("bmk,bnk->bmn", blocks, chosen, precision=exact, preferred_element_type=dtype)


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
