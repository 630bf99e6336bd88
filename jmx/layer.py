"""The mixture-of-experts layer as a function: check, route, select a backend, run it."""

import dataclasses
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jmx import activations, autodiff
from jmx.activations import Activation
from jmx.backends import BACKENDS
from jmx.checks import check_array, check_instance, check_one_of
from jmx.experts import Experts
from jmx.routing import NOWHERE, Logits, Routing, as_int32, route, validate
from jmx.selection import (
    WEIGHTS_ON,
    Computation,
    Environment,
    Problem,
    check_backend,
    check_x,
    resolve_input_format,
    select,
)

Array = Any


def moe(
    x: Array,
    routing: Routing | Logits,
    experts: Experts,
    *,
    activation: Activation | str,
    weights_on: str = "output",
    input_format: str | None = None,
    mask: Array | None = None,
    backend: str | None = None,
) -> jax.Array:
    """y[t] = sum over slots s of weights[t, s] * expert[ids[t, s]](x[t]), the backend chosen while tracing.

    An expert computes down(activation(gate_up(x) + gate_up_bias)) + down_bias. Expert ids outside 0..E-1 contribute
    nothing. Differentiable (reverse mode) with respect to x, the routing weights or logits, and the biases.

    Args:
        x: (..., H) bfloat16, float16 or float32.
        routing: `Routing` of (..., k), or router `Logits` of (..., E), with x's leading axes.
        experts: the weights.
        activation: gated if and only if the experts are; or its name in `jmx.ACTIVATIONS`.
        weights_on: "output": routing weights multiply what an expert returns; "input": what it is given.
        input_format: what both products' inputs are rounded to first: a key of `inputs.INPUT_FORMATS`, or a family of
            them; None: what the experts declare, else nothing. Gradients pass the rounding as if it were not there.
        mask: (...) bool or None; False is a padding token, which routes nowhere and gets y = 0.
        backend: name of the backend that must run; None takes the `use_backend` context, else the first that can.

    Returns:
        (..., H) of x's dtype.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        NoBackendError: the requested backend cannot run, or none can; it says why, and what would help.
    """
    activation = activations.get(activation)
    check_arguments(x, routing, experts, activation, weights_on)
    check_backend(backend, BACKENDS)
    environment = Environment.probe(x, routing, experts)
    tokens = x.reshape(-1, x.shape[-1])
    routing = flat_routing(routing, x.shape[:-1], mask)
    computation = Computation(activation, weights_on, resolve_input_format(experts, input_format))
    return _run(tokens, routing, experts, computation, environment, backend).reshape(x.shape)


@partial(jax.jit, static_argnums=(3, 4, 5))  # so that calls outside of any jit are traced and compiled once, too
def _run(
    x: Array,
    routing: Routing,
    experts: Experts,
    computation: Computation,
    environment: Environment,
    backend: str | None,
) -> jax.Array:
    def run(x: jax.Array, routing: Routing, experts: Experts) -> jax.Array:
        # Selected in here, so that a vmapped call is judged by all the tokens it has.
        top_k = routing.expert_ids.shape[-1]
        problem = Problem.of(
            x, top_k, experts, computation.activation, computation.weights_on, computation.input_format
        )
        selection = select(problem, environment, backend, BACKENDS)
        return selection.backend.apply(computation, x, routing, experts, environment)

    return autodiff.differentiable(run, computation)(x, routing, experts)


def flat_routing(routing: Routing | Logits, leading: tuple[int, ...], mask: Array | None = None) -> Routing:
    """Routing of (T, k) out of routing or logits with `leading` axes; masked tokens route nowhere.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit `leading`.
    """
    named = {"values": routing.values} if isinstance(routing, Logits) else routing._asdict()
    for name, array in named.items():
        check_array(name, array)
        if not array.shape or tuple(array.shape[:-1]) != tuple(leading):
            raise ValueError(f"`{name}` (shape {array.shape}) must be {tuple(leading)}, as x, and one more axis")
    if mask is not None:
        check_array("mask", mask, jnp.bool_)
        if tuple(mask.shape) != tuple(leading):
            raise ValueError(f"`mask` (shape {mask.shape}) must be {tuple(leading)}, the leading axes of x")
        mask = mask.reshape(-1)
    num_tokens = prod(leading)
    flat = [array.reshape(num_tokens, array.shape[-1]) for array in named.values()]
    if isinstance(routing, Logits):
        return route(dataclasses.replace(routing, values=flat[0]), mask)
    validate(Routing(*flat), num_tokens)
    ids, weights = as_int32(flat[0]), flat[1]
    return Routing(ids if mask is None else jnp.where(mask[:, None], ids, NOWHERE), weights)


def check_arguments(x: Array, routing: Any, experts: Any, activation: Any, weights_on: str) -> None:
    """Raises ValueError or TypeError, naming the argument, where `moe` refuses its arguments; these may be abstract."""
    check_instance("routing", routing, Routing | Logits, "a jmx.Routing or jmx.Logits")
    check_instance("experts", experts, Experts, "jmx.Experts")
    check_x(x, experts.hidden_size)
    if isinstance(routing, Logits):
        values = check_array("values", routing.values)
        if values.shape[-1:] != (experts.num_experts,):
            raise ValueError(f"`values` (shape {values.shape}) must be (..., {experts.num_experts}), one an expert")
    experts.check_activation(activation)
    experts.check_one_layer()
    check_one_of("weights_on", weights_on, WEIGHTS_ON)
