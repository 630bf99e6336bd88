"""Inputs with one dynamic scale for all tokens, as inputs with static scales, which are found here.

The scale of the first product's inputs belongs to the rows of all assignments, and that of the second one's to all
activations. Those are computed twice: once for the largest of them, and then to be multiplied.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jmx.experts import Experts
from jmx.numerics.input_formats import FP8_STATIC, FP8_TENSOR
from jmx.numerics.tensor_scales import largest_of_rows, static_scale
from jmx.routing import Routing
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Float32

Largest = Callable[[Problem, Experts], Float32[Array, ""]]


def of_tensor(problem: Problem) -> bool:
    """Whether inputs have such scales."""
    return problem.input_format == FP8_TENSOR.name


def with_static_scales(problem: Problem, experts: Experts, largest: tuple[Largest, Largest]) -> tuple[Problem, Experts]:
    """A problem and experts with static scales for the same bits.

    `largest`: the largest magnitude, NaN if one is NaN, of the inputs of the first product, and of those of the second
    one, for a problem and experts that have the first scale already.
    """
    problem = dataclasses.replace(problem, input_format=FP8_STATIC.name)
    for role, its_largest in zip(("gate_up", "down"), largest, strict=True):
        experts = with_scale(experts, role, its_largest(problem, experts))
    return problem, experts


def with_scale(experts: Experts, role: str, largest: Float32[Array, ""]) -> Experts:
    """Experts with the static scale for inputs of `role` whose largest magnitude is given."""
    scale = static_scale(largest)
    if experts.index is not None:
        scale = jnp.broadcast_to(scale, experts.canonical_shape()[:-3])
    changed = {f"{role}_input_scale": scale, "input_format": FP8_STATIC.name}
    return dataclasses.replace(experts, **changed)


def largest_token(problem: Problem, x: Float[Array, "T H"], routing: Routing) -> Float32[Array, ""]:
    """The largest magnitude in the rows of all assignments, times their weights if these multiply the input."""
    inside = (routing.expert_ids >= 0) & (routing.expert_ids < problem.num_experts)
    if not problem.on_input:
        return largest_of_rows(x, inside.any(axis=1))

    def slot(most: Float32[Array, ""], its: tuple[Array, Array]) -> tuple[Float32[Array, ""], None]:
        weights, valid = its
        rows = (x * weights.astype(jnp.float32)[:, None]).astype(x.dtype)
        return jnp.maximum(most, largest_of_rows(rows, valid)), None

    most, _ = lax.scan(slot, jnp.float32(0), (routing.weights.T, inside.T))
    return most
