"""The call of the NNX and Linen modules: router logits, and `jmx.moe` with the module's settings."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmx import meshes
from jmx.experts import Axes
from jmx.layer import moe
from jmx.lora import Adapters
from jmx.module_arguments import Arguments
from jmx.parallel.experts_form import AnyExperts, whole_shapes
from jmx.parallel.split import Split
from jmx.routing import Logits, Method, Routing, route, token_counts
from jmx.routing.routing import NOWHERE, as_int32
from jmx.selection.problem import Problem, check_x
from jmx.util.checks import is_array, shown
from jmx.util.typing import AnyArray, Array, Bool, Float, Int32, Shaped


def call(
    settings: Any,
    x: Float[AnyArray, "*tokens H"],
    routing: Routing | Logits,
    experts: AnyExperts,
    mask: Bool[AnyArray, "*tokens"] | None,
    split: Split | None,
    adapters: Adapters | None,
) -> Float[Array, "*tokens H"]:
    """`jmx.moe` with the activation, `weights_on`, `input_format`, backend and `save_gate_up` of a module or its
    `Arguments`."""
    return moe(
        x,
        routing,
        experts,
        activation=settings.activation,
        weights_on=settings.weights_on,
        input_format=settings.input_format,
        mask=mask,
        backend=settings.backend,
        split=split,
        adapters=adapters,
        save_gate_up=settings.save_gate_up,
    )


def router_logits(
    x: Float[AnyArray, "*tokens H"],
    values: Any,
    method: Method,
    *,
    hidden_size: int,
    num_experts: int,
    router: Callable[[Float[AnyArray, "*tokens H"]], Float[Array, "*tokens E"]] | None,
    correction_bias: Float[Array, " E"] | None,
) -> Logits:
    """Router logits for a module's routing method.

    Args:
        values: floating (..., E), passed to the call as `routing`; None: those that `router` computes of x.
        router: the module's router, or None if it has none.

    Raises:
        ValueError, TypeError: an x that does not fit the experts, values that are not (..., E), or neither values nor a
            router.
    """
    check_x(x, hidden_size)
    if values is None:
        if router is None:
            raise ValueError("`routing` must be given: this layer was made with router=False")
        values = router(x)
    if not is_array(values):
        raise TypeError(f"`routing` ({shown(values)}) must be a jmx.Routing, jmx.Logits, router logits, or None")
    if values.shape[-1:] != (num_experts,):
        raise ValueError(f"`routing` (shape {values.shape}) must be router logits (..., {num_experts}), one an expert")
    return Logits(values, method, correction_bias)


def router_options(given: Arguments) -> dict[str, Any]:
    """Options of a router, a `Linear` or `Dense`, which computes in float32."""
    return {
        "use_bias": given.router_bias,
        "dtype": jnp.float32,
        "param_dtype": given.param_dtype,
        "precision": jax.lax.Precision.HIGHEST,
        "dot_general": _router_product,
    }


@partial(jax.jit, static_argnames=("dimension_numbers", "precision", "preferred_element_type"))
def _router_product(
    x: Float[Array, "*tokens H"], kernel: Float[Array, "H E"], dimension_numbers: Any, **options: Any
) -> Float[Array, "*tokens E"]:
    """`jax.lax.dot_general` of tokens, which Explicit mesh axes may split, and a router's kernel."""
    return jax.lax.dot_general(x, meshes.beside(kernel, x), dimension_numbers, **options)


def check_router_split(x: Float[Any, "*tokens H"], weights: Mapping[str, Shaped[Any, "..."]]) -> None:
    """Raises ValueError if an Explicit mesh axis splits a router's weights, or the last axis of x."""
    meshes.check_whole({"x": x}, x.ndim - 1)
    meshes.check_whole({f"router.{name}": weight for name, weight in weights.items()})


def problem_of(settings: Any, x: Float[Any, "*tokens H"], experts: AnyExperts, adapted: bool) -> Problem:
    """The problem of a module's call on x, of all devices; `settings` as in `call`.

    Raises:
        ValueError, TypeError: an x that does not fit the experts.
    """
    top_k, whole = settings.routing.top_k, whole_shapes(experts)
    return Problem.of(x, top_k, whole, settings.activation, settings.weights_on, settings.input_format, adapted)


def call_counts(
    routing: Routing | Logits, mask: Bool[AnyArray, "*tokens"] | None, num_experts: int, axes: Axes | None
) -> Int32[Array, " E"]:
    """How many slots of a module's call go to each expert, of all devices; a masked token has none.

    Args:
        routing: of the call, which has been checked.
        mask, axes: of the call and of the module.
    """
    if isinstance(routing, Logits):
        routing = route(routing, mask)
    elif mask is not None:
        routing = routing._replace(expert_ids=jnp.where(mask[..., None], as_int32(routing.expert_ids), NOWHERE))
    return summed_counts(routing, num_experts, axes)


def summed_counts(routing: Routing, num_experts: int, axes: Axes | None) -> Int32[Array, " E"]:
    """`jmx.token_counts` of the tokens of all devices: of a routing that a mesh divides, or one inside `jax.shard_map`.

    Args:
        axes: of the module. Inside `jax.shard_map` counts are added along those of "token".
    """
    if isinstance(routing, Routing) and is_array(routing.expert_ids):
        routing = routing._replace(expert_ids=meshes.gathered(routing.expert_ids))
    counts = token_counts(routing, num_experts)
    names = meshes.names_of((axes or {}).get("token"))
    manual = tuple(name for name in names if name in jax.sharding.get_abstract_mesh().manual_axes)
    return jax.lax.psum(counts, manual) if manual else counts
