"""Products of sorted rows with their experts' float weights, and the gradients of both.

XLA has `jax.lax.ragged_dot`. On CPUs it multiplies every row by every expert's weights, so there a loop over blocks of
one expert's rows takes its place: work is proportional to the rows, no weights are copied, and sums have one order.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx import grouping, meshes
from jmx.grouping import Blocks
from jmx.numerics.formats import precision
from jmx.util.typing import Array, Float, Float32, Int32

_BLOCK = 128  # the most rows of a block


def grouped_dot(
    rows: Float[Array, "R K"], weights: Float[Array, "E N K"], sizes: Int32[Array, " E"]
) -> Float32[Array, "R N"]:
    """rows (R, K) times the weights (E, N, K) of their experts, transposed -> float32 (R, N).

    Args:
        rows: sorted by expert. Weights are cast to their dtype.
        sizes: (E,), rows of each expert. Results of the rows after those of all experts are undefined.
    """
    return lax.platform_dependent(rows, weights, sizes, cpu=_by_blocks, default=_ragged)


def _ragged(
    rows: Float[Array, "R K"], weights: Float[Array, "E N K"], sizes: Int32[Array, " E"]
) -> Float32[Array, "R N"]:
    weights = weights.astype(rows.dtype)
    return lax.ragged_dot(rows, weights.mT, sizes, precision=precision(rows.dtype), preferred_element_type=jnp.float32)


@jax.custom_vjp
def _by_blocks(
    rows: Float[Array, "R K"], weights: Float[Array, "E N K"], sizes: Int32[Array, " E"]
) -> Float32[Array, "R N"]:
    return meshes.unchecked(partial(_products, transposed=False))(rows, weights, sizes)


def _forward(rows: Any, weights: Any, sizes: Any) -> tuple[Float32[Array, "R N"], tuple[Any, Any, Any]]:
    return _by_blocks(rows, weights, sizes), (rows, weights, sizes)


def _backward(residuals: tuple[Any, Any, Any], d: Float32[Array, "R N"]) -> tuple[Any, Any, None]:
    rows, weights, sizes = residuals
    drows = meshes.unchecked(partial(_products, transposed=True))(d.astype(rows.dtype), weights, sizes)
    drows = jnp.where(jnp.arange(len(drows))[:, None] < sizes.sum(), drows, 0)
    dweights = meshes.unchecked(_weight_gradients)(rows, d.astype(rows.dtype), sizes)
    return drows.astype(rows.dtype), dweights.astype(weights.dtype), None


_by_blocks.defvjp(_forward, _backward)


def _blocks(num_rows: int, sizes: Int32[Array, " E"]) -> tuple[Blocks, int]:
    """Blocks of rows, and the most rows of one."""
    share = -(-num_rows // sizes.size)
    block = min(_BLOCK, max(8, 1 << (share - 1).bit_length()))
    return grouping.split_groups(sizes, num_rows, block), block


def _products(
    rows: Float[Array, "R in"], weights: Float[Array, "E N K"], sizes: Int32[Array, " E"], *, transposed: bool
) -> Float32[Array, "R out"]:
    """Each row (K,) times its expert's (N, K) transposed, or, if `transposed`, each (N,) times (N, K) itself."""
    blocks, block = _blocks(len(rows), sizes)
    padded = jnp.pad(rows, ((0, block), (0, 0)))
    dot = partial(jnp.einsum, precision=precision(rows.dtype), preferred_element_type=jnp.float32)

    def step(index: Int32[Array, ""], out: Float32[Array, "R out"]) -> Float32[Array, "R out"]:
        first = blocks.x_rows[index]
        product = dot(
            "mn,nk->mk" if transposed else "mk,nk->mn",
            lax.dynamic_slice_in_dim(padded, first, block),
            lax.dynamic_index_in_dim(weights, blocks.experts[index], keepdims=False).astype(rows.dtype),
        )
        # Rows past the block's last one are those of the blocks after it, which overwrite them.
        return lax.dynamic_update_slice_in_dim(out, product, first, 0)

    out = jnp.zeros((len(padded), weights.shape[2 if transposed else 1]), jnp.float32)
    return lax.fori_loop(0, blocks.num_blocks, step, out)[: len(rows)]


def _weight_gradients(
    rows: Float[Array, "R K"], d: Float[Array, "R N"], sizes: Int32[Array, " E"]
) -> Float32[Array, "E N K"]:
    """The sum of d's rows times rows, over each expert's; zeros for experts without rows."""
    blocks, block = _blocks(len(rows), sizes)
    rows, d = (jnp.pad(array, ((0, block), (0, 0))) for array in (rows, d))

    def step(index: Int32[Array, ""], total: Float32[Array, "E N K"]) -> Float32[Array, "E N K"]:
        first = blocks.x_rows[index]
        inside = jnp.arange(block)[:, None] < blocks.counts[index]
        product = jnp.einsum(
            "mn,mk->nk",
            jnp.where(inside, lax.dynamic_slice_in_dim(d, first, block), 0),
            # NaN in a row of another expert times 0 would be NaN.
            jnp.where(inside, lax.dynamic_slice_in_dim(rows, first, block), 0),
            precision=precision(rows.dtype),
            preferred_element_type=jnp.float32,
        )
        return total.at[blocks.experts[index]].add(product, mode="promise_in_bounds")

    zeros = jnp.zeros((sizes.size, d.shape[1], rows.shape[1]), jnp.float32)
    return lax.fori_loop(0, blocks.num_blocks, step, zeros)
