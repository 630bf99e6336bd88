"""Products of rows with frozen quantized weights, differentiable in the rows alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jmx import meshes
from jmx.autodiff import refuse_weight_gradients
from jmx.experts import Experts
from jmx.grouping import SortedRows
from jmx.guard import guarded
from jmx.util.typing import Array, Float

# Of one role: rows (R, K), how they are sorted, experts -> (R, N). Rows of no assignment may come out as anything:
# `differentiable` makes them 0.
Product = Callable[[Float[Array, "R K"], SortedRows, Experts], Float[Array, "R N"]]


def differentiable(product: Product, transposed: Product) -> Product:
    """`product`, whose cotangent is that of `transposed`. Both are linear in the rows, and leave biases out.

    A vmapped call runs one element of the batch after the other. The gradient of a quantized weight is a TypeError
    that names it. First-order reverse mode only.
    """

    @jax.custom_vjp
    def call(rows: Float[Array, "R K"], sorted: SortedRows, experts: Experts) -> Float[Array, "R N"]:
        return _batchable(product)(rows, sorted, experts)

    def forward(rows: Any, sorted: Any, experts: Any) -> tuple[Float[Array, "R N"], Any]:
        refuse_weight_gradients(experts)
        rows, sorted, experts = jax.tree.map(
            lambda primal: primal.value, (rows, sorted, experts), is_leaf=lambda leaf: hasattr(leaf, "perturbed")
        )
        return _batchable(product)(rows, sorted, experts), (sorted, experts, jnp.zeros(0, rows.dtype))

    def backward(residuals: Any, dy: Any) -> tuple[Any, None, None]:
        sorted, experts, like = residuals
        if isinstance(dy, SymbolicZero):
            return None, None, None
        return _batchable(transposed)(dy, sorted, experts).astype(like.dtype), None, None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return lambda rows, sorted, experts: call(
        rows, sorted, dataclasses.replace(experts, gate_up_bias=None, down_bias=None)
    )


def _batchable(product: Product) -> Product:
    @jax.custom_batching.sequential_vmap
    def call(rows: Float[Array, "R K"], sorted: SortedRows, experts: Experts) -> Float[Array, "R N"]:
        whole = experts.with_arrays(guarded(experts.arrays()))
        out = meshes.unchecked(product)(rows, sorted, whole)
        return jnp.where(sorted.assignment_of_row[:, None] >= 0, out, 0)  # a NaN would reach the adapters' gradients

    return call
