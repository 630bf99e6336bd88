"""The mixture-of-experts layer as a function: check, route, select a backend, run it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jmx import autodiff
from jmx.activations import Activation
from jmx.backends import BACKENDS
from jmx.experts import Experts
from jmx.routing import NOWHERE, Logits, Routing, route, validate
from jmx.selection import WEIGHTS_ON, Computation, Environment, Problem, select

Array = Any


def moe(
    x: Array,
    routing: Routing | Logits,
    experts: Experts,
    *,
    activation: Activation,
    weights_on: str = "output",
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
        activation: gated if and only if the experts are.
        weights_on: "output": routing weights multiply what an expert returns; "input": what it is given.
        mask: (...) bool or None; False is a padding token, which routes nowhere and gets y = 0.
        backend: name of the backend that must run; None takes the `use_backend` context, else the first that can.

    Returns:
        (..., H) of x's dtype.

    Raises:
        ValueError, TypeError: arguments that do not fit each other.
        NoBackendError: the requested backend cannot run, or none can; it says why, and what would help.
    """
    _check(x, experts, activation, weights_on)
    tokens = x.reshape(-1, x.shape[-1])
    routing = flat_routing(routing, x.shape[:-1], mask)
    computation = Computation(activation, weights_on)

    def run(x: jax.Array, routing: Routing, experts: Experts) -> jax.Array:
        # Selected in here, so that a vmapped call is judged by all the tokens it has.
        problem = Problem.of(x, routing.expert_ids.shape[-1], experts, activation, weights_on)
        selection = select(problem, environment, backend, BACKENDS)
        return selection.backend.apply(computation, x, routing, experts)

    environment = Environment.probe(x, routing, experts)
    return autodiff.differentiable(run, computation)(tokens, routing, experts).reshape(x.shape)


def flat_routing(routing: Routing | Logits, leading: tuple[int, ...], mask: Array | None = None) -> Routing:
    """Routing of (T, k) out of routing or logits with `leading` axes; masked tokens route nowhere.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit `leading`.
    """
    values = routing.values if isinstance(routing, Logits) else routing.expert_ids
    if tuple(values.shape[:-1]) != tuple(leading):
        raise ValueError(f"`routing` (of shape {values.shape}) must have the leading axes {tuple(leading)} of x")
    if mask is not None:
        if tuple(mask.shape) != tuple(leading) or mask.dtype != jnp.bool_:
            raise ValueError(f"`mask` ({mask.dtype}, shape {mask.shape}) must be bool of shape {tuple(leading)}")
        mask = mask.reshape(-1)
    if isinstance(routing, Logits):
        return route(dataclasses.replace(routing, values=values.reshape(-1, values.shape[-1])), mask)
    flat = Routing(*(array.reshape(-1, array.shape[-1]) for array in routing))
    validate(flat, flat.expert_ids.shape[0])
    return flat if mask is None else flat._replace(expert_ids=jnp.where(mask[:, None], flat.expert_ids, NOWHERE))


def _check(x: Array, experts: Experts, activation: Activation, weights_on: str) -> None:
    if x.ndim < 1 or x.shape[-1] != experts.hidden_size:
        raise ValueError(f"`x` (of shape {x.shape}) must be (..., {experts.hidden_size}), the experts' hidden size")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`x` (dtype {x.dtype}) must be floating")
    experts.check_activation(activation)
    if weights_on not in WEIGHTS_ON:
        raise ValueError(f"`weights_on` (={weights_on!r}) must be one of {WEIGHTS_ON}")
