"""Gradients of the layer, and the protocol of backends that compute them themselves."""

import typing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax

from jmx.experts import Experts
from jmx.routing import Routing
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Float32


class Primals(NamedTuple):
    """The arguments of `Backend.apply` that gradients are taken at: x (T, H), routing (T, k), and the experts."""

    x: Float[Array, "T H"]
    routing: Routing
    experts: Experts


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """Of which biases gradients are requested; those of x and the routing weights always are."""

    gate_up_bias: bool
    down_bias: bool


class Gradients(NamedTuple):
    """Cotangents of the layer: x (T, H), weights (T, k), and float32 biases, None unless requested."""

    x: Float[Array, "T H"]
    weights: Float[Array, "..."]
    gate_up_bias: Float32[Array, "*lead N"] | None
    down_bias: Float32[Array, "*lead H"] | None


@typing.runtime_checkable
class Differentiable(Protocol):
    """What a backend with a backward pass of its own has beside `jmx.selection.backend.Backend`."""

    def backward(
        self, problem: Problem, primals: Primals, environment: Environment, dy: Float[Array, "T H"], wanted: Wanted
    ) -> Gradients:
        """Gradients at the primals, given those of the result of `Backend.apply`, while tracing.

        `dy`: (T, H) of x's dtype.
        """
        ...
