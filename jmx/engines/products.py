"""Products of rows with their experts' weights, one at a time: differentiable in the rows, and in weights of floats.

Quantized weights are frozen.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jmx import meshes
from jmx.engines.gradients import refuse_weight_gradients
from jmx.experts import Experts
from jmx.grouping import SortedRows
from jmx.guard import guarded
from jmx.numerics.formats import BlockScaled
from jmx.util.primals import values_of
from jmx.util.typing import Array, Float

# Of one role: rows (R, K), how they are sorted, experts -> (R, N). Rows of no assignment may come out as anything:
# `differentiable` makes them 0.
Product = Callable[[Float[Array, "R K"], SortedRows, Experts], Float[Array, "R N"]]
# Of one role: the cotangent of such a result, rows, how they are sorted, experts -> (E, N, K), a cotangent of weights.
Outer = Callable[[Float[Array, "R N"], Float[Array, "R K"], SortedRows, Experts], Float[Array, "E N K"]]


def differentiable(role: str, product: Product, transposed: Product, outer: Outer) -> Product:
    """`product`, whose cotangents are those of `transposed` and `outer`. All are linear in the rows, without biases.

    A vmapped call runs one element of the batch after the other. The gradient of a quantized weight is a TypeError
    that names it; for floats of a stack's layer that of the stack is zero elsewhere. First-order reverse mode only.
    """

    @jax.custom_vjp
    def call(rows: Float[Array, "R K"], sorted: SortedRows, experts: Experts) -> Float[Array, "R N"]:
        return _of_assignments(product)(rows, sorted, experts)

    def forward(rows: Any, sorted: Any, experts: Any) -> tuple[Float[Array, "R N"], Any]:
        refuse_weight_gradients(experts)
        trained = getattr(experts, role).values.perturbed
        rows, sorted, experts = values_of((rows, sorted, experts))
        kept = rows if trained else None
        return _of_assignments(product)(rows, sorted, experts), (kept, sorted, experts, jnp.zeros(0, rows.dtype))

    def backward(residuals: Any, dy: Any) -> tuple[Any, None, Any]:
        rows, sorted, experts, like = residuals
        if isinstance(dy, SymbolicZero):
            return None, None, None
        drows = _of_assignments(transposed)(dy, sorted, experts).astype(like.dtype)
        if rows is None:
            return drows, None, None
        dweights = _of_stack(experts, role, _batchable(outer)(dy, rows, sorted, experts))
        empty = BlockScaled(*(None,) * len(BlockScaled._fields))
        dexperts = experts.with_arrays({})
        return drows, None, dataclasses.replace(dexperts, **{role: empty._replace(values=dweights)}, index=None)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return lambda rows, sorted, experts: call(
        rows, sorted, dataclasses.replace(experts, gate_up_bias=None, down_bias=None)
    )


def with_derivative_of(
    at_once: Callable[..., Float[Array, "R I"]], first: Callable[..., Float[Array, "n M I"]]
) -> Callable[..., Float[Array, "n M I"]]:
    """A function that is `at_once`, and where it is differentiated `first`. The gradient of a quantized weight is a
    TypeError that names it.

    Args:
        at_once: rows (R, H), factors, how rows are sorted, experts -> (R, I).
        first: rows, factors, bias rows of blocks or None, `expert_rows.Rows`, experts -> (n, M, I). Neither may have
            arrays of its own.
    """

    @jax.custom_vjp
    def call(of_rows: Any, factors: Any, bias: Any, rows: Any, experts: Experts) -> Float[Array, "n M I"]:
        del bias  # that of the experts
        return rows.blocked(_batchable(at_once)(of_rows, factors, rows.sorted, experts))

    def forward(*arguments: Any) -> tuple[Float[Array, "n M I"], Any]:
        refuse_weight_gradients(arguments[-1])
        *given, rows, experts = values_of(arguments)
        return jax.vjp(lambda *its: first(*its, rows, experts), *given)

    def backward(vjp: Any, da: Any) -> tuple[Any, ...]:
        given = (None, None, None) if isinstance(da, SymbolicZero) else vjp(da)
        return (*given, None, None)

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _of_stack(experts: Experts, role: str, dweights: Float[Array, "E N K"]) -> Float[Array, "*lead E N K"]:
    """The cotangent of the weights of all layers of a stack, by that of one."""
    values = getattr(experts, role).values
    dweights = dweights.astype(values.dtype)
    return dweights if experts.index is None else jnp.zeros_like(values).at[experts.index].set(dweights)


def _of_assignments(product: Product) -> Product:
    def call(rows: Float[Array, "R K"], sorted: SortedRows, experts: Experts) -> Float[Array, "R N"]:
        out = _batchable(product)(rows, sorted, experts)
        return jnp.where(sorted.assignment_of_row[:, None] >= 0, out, 0)  # a NaN would reach gradients of weights

    return call


def _batchable(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays, with experts as the last argument, whose weights no mesh axis may divide."""

    @jax.custom_batching.sequential_vmap
    def call(*arguments: Any) -> Any:
        *arrays, experts = arguments
        return meshes.unchecked(function)(*arrays, experts.with_arrays(guarded(experts.arrays())))

    return call
