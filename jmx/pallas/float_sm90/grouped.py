"""Grouped products of 16-bit floats with their gradients, by the kernels."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jmx import meshes
from jmx.guard import guarded
from jmx.pallas.float_sm90.blocks import ROW_ALIGNMENT, Groups
from jmx.pallas.float_sm90.config import Launch
from jmx.pallas.float_sm90.outer import outer
from jmx.pallas.float_sm90.product import product
from jmx.util.typing import Array, Float, Float32, Int32


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_dot(
    rows: Float[Array, "R K"], weights: Float[Array, "E N K"], sizes: Int32[Array, " E"], num_cores: int
) -> Float32[Array, "R N"]:
    """As `jmx.floats.grouped_dot`. R that is no multiple of 8 costs a copy of the rows."""
    return _product(rows, weights, sizes, Launch.of(weights.shape[1], jnp.float32, num_cores), transposed=False)


def _forward(rows: Any, weights: Any, sizes: Any, num_cores: int) -> tuple[Float32[Array, "R N"], tuple[Any, Any, Any]]:
    return grouped_dot(rows, weights, sizes, num_cores), (rows, weights, sizes)


def _backward(num_cores: int, residuals: tuple[Any, Any, Any], d: Float32[Array, "R N"]) -> tuple[Any, Any, None]:
    rows, weights, sizes = residuals
    d = d.astype(rows.dtype)
    drows = _product(d, weights, sizes, Launch.of(weights.shape[2], rows.dtype, num_cores), transposed=True)
    drows = jnp.where(jnp.arange(len(drows))[:, None] < sizes.sum(), drows, 0)
    return drows, weight_gradients(d, rows, sizes, weights.dtype, num_cores), None


grouped_dot.defvjp(_forward, _backward)


@partial(jax.jit, static_argnames=("its", "transposed"))  # outside of any jit, too
def _product(
    rows: Float[Array, "R C"], weights: Float[Array, "E N K"], sizes: Int32[Array, " E"], its: Launch, transposed: bool
) -> Float[Array, "R W"]:
    """As `product.product`, of any number of rows, and batchable."""
    if rows.size == 0:
        return jnp.zeros((len(rows), weights.shape[2 if transposed else 1]), its.dtype)

    @meshes.unchecked
    def multiply(rows: Any, weights: Any, sizes: Any) -> Any:
        return product(_in_eights(rows), weights, Groups.of(sizes), its, transposed=transposed)[: len(rows)]

    @sequential_vmap
    def run(rows: Any, weights: Any, sizes: Any) -> Any:
        return multiply(rows, guarded({"weights": weights})["weights"], sizes)

    return run(rows, weights, sizes)


@partial(jax.jit, static_argnums=(3, 4))
def weight_gradients(
    d: Float[Array, "R N"], rows: Float[Array, "R K"], sizes: Int32[Array, " E"], dtype: Any, num_cores: int
) -> Float[Array, "E N K"]:
    """As `outer.outer`, of any number of rows, and batchable."""
    if rows.size == 0:
        return jnp.zeros((sizes.size, d.shape[1], rows.shape[1]), dtype)

    @sequential_vmap
    @meshes.unchecked
    def run(d: Any, rows: Any, sizes: Any) -> Any:
        its = Launch.of(rows.shape[1], dtype, num_cores)
        return outer(_in_eights(d), _in_eights(rows), Groups.of(sizes), its)

    return run(d, rows, sizes)


def _in_eights(rows: Float[Array, "R C"]) -> Float[Array, "r C"]:
    missing = -len(rows) % ROW_ALIGNMENT
    return jnp.pad(rows, ((0, missing), (0, 0))) if missing else rows
