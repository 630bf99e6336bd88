"""Gradients of the layer, and the protocols of backends that compute them themselves."""

import typing
from typing import Any, NamedTuple, Protocol

from jmx.experts import Experts
from jmx.routing import Routing
from jmx.selection.backend import Backend
from jmx.selection.environment import Environment
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Float32

# The name of what `SavesGateUp.apply_saving` saves, for policies of `jax.checkpoint`.
SAVED = "jmx_gate_up"


class Primals(NamedTuple):
    """The arguments of `Backend.apply` that gradients are taken at: x (T, H), routing (T, k), and the experts.

    `saved`: what `SavesGateUp.apply_saving` returned with the result, or None.
    """

    x: Float[Array, "T H"]
    routing: Routing
    experts: Experts
    saved: Any = None


class Gradients(NamedTuple):
    """Cotangents of the layer: x (T, H), weights (T, k), and what is float32, None unless requested: biases, and the
    dequantized values of both weights."""

    x: Float[Array, "T H"]
    weights: Float[Array, "..."]
    gate_up_bias: Float32[Array, "*lead N"] | None
    down_bias: Float32[Array, "*lead H"] | None
    gate_up: Float32[Array, "E N H"] | None = None
    down: Float32[Array, "E H I"] | None = None


class Wanted(NamedTuple):
    """Which of the gradients are requested that nothing needs unless they are. Static."""

    gate_up_bias: bool = False
    down_bias: bool = False
    gate_up: bool = False
    down: bool = False

    @property
    def biases(self) -> tuple[bool, bool]:
        return self.gate_up_bias, self.down_bias

    @property
    def weights(self) -> bool:
        """Whether those of a weight are among them."""
        return self.gate_up or self.down


@typing.runtime_checkable
class Differentiable(Protocol):
    """What a backend with a backward pass of its own has beside `jmx.selection.backend.Backend`."""

    def backward(
        self, problem: Problem, primals: Primals, environment: Environment, dy: Float[Array, "T H"], wanted: Wanted
    ) -> Gradients:
        """Gradients at the primals, given those of the result of `Backend.apply`, while tracing.

        Args:
            dy: (T, H) of x's dtype.
            wanted: gradients of biases; of weights only if there are some (`WeightGradients`).
        """
        ...


@typing.runtime_checkable
class WeightGradients(Differentiable, Protocol):
    """What such a backend has whose backward pass also gives gradients of what weights were rounded from."""

    def has_weight_gradients(self, problem: Problem) -> bool:
        """Whether it does for `problem`: then `wanted` may ask for them."""
        ...


@typing.runtime_checkable
class SavesGateUp(Differentiable, Protocol):
    """What a backend has beside `Differentiable` if its backward pass can use what the forward pass computed."""

    def apply_saving(
        self, problem: Problem, x: Float[Array, "T H"], routing: Routing, experts: Experts, environment: Environment
    ) -> tuple[Float[Array, "T H"], Any]:
        """The result of `Backend.apply`, and arrays for `backward`: the outputs of the experts' first product."""
        ...


def has_gradients(backend: Backend, problem: Problem, *, weights: bool) -> typing.TypeGuard[Differentiable]:
    """Whether a backend computes the gradients of `problem` itself, with those of `weights` or without."""
    if weights:
        return isinstance(backend, WeightGradients) and backend.has_weight_gradients(problem)
    return isinstance(backend, Differentiable)


def refuse_weight_gradients(experts: Any) -> None:
    """Raises TypeError, naming the array, if a gradient of a quantized weight or of a scale of inputs is requested.

    `experts`: with `jax.custom_derivatives.CustomVJPPrimal` in the places of arrays.
    """
    for role in ("gate_up", "down"):
        scale = getattr(experts, f"{role}_input_scale")
        if scale is not None and scale.perturbed:
            raise TypeError(f"no gradient of `{role}_input_scale`: inputs are rounded by it, as by a constant")
        for name, leaf in getattr(experts, role)._asdict().items():
            if leaf is not None and leaf.perturbed and not experts.format.is_float:
                raise TypeError(
                    f"no gradient of `{role}.{name}` ({leaf.value.dtype}): quantized weights have none; "
                    "differentiate with respect to x, the routing weights or the biases"
                )
