"""Router logits, and `route`, which turns them into a routing."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jmx import meshes
from jmx.routing.methods import CODEC, Method
from jmx.routing.routing import NOWHERE, Routing, check_mask
from jmx.util import pytrees
from jmx.util.checks import check_array, check_instance, check_values
from jmx.util.typing import AnyArray, Bool, Float, Float32, Shaped


@pytrees.register(data=["values", "correction_bias"], static=["method"], method=CODEC)
@dataclass(frozen=True)
class Logits:
    """Router logits and the method that routes by them; a pytree in which `method` is static.

    Args:
        values: floating (..., E), any leading token axes.
        method: the routing method.
        correction_bias: floating (E,) or None; takes part in the choice of experts, never in their weights. An expert
            whose bias is NaN or -inf is never chosen.
    """

    values: Float[Any, "*tokens E"]
    method: Method
    correction_bias: Float[Any, " E"] | None = None


def route(logits: Logits, mask: Bool[AnyArray, "*tokens"] | None = None) -> Routing:
    """Chooses experts and their weights; differentiable with respect to the logits' values.

    Args:
        logits: router logits (..., E).
        mask: bool (...) or None; False is a padding token, which routes nowhere.

    Returns:
        `Routing` of expert_ids (..., k) int32 and weights (..., k) float32, best expert first.

    Raises:
        TypeError: values or a correction bias that are not floating, a mask that is not bool.
        ValueError: shapes that do not fit each other, a method that cannot choose among E experts, or arrays that
            Explicit mesh axes split along axes other than those of tokens.
    """
    leading = check(logits)
    check_mask(mask, leading, "`values`")
    check_values({"values": logits.values, "correction_bias": logits.correction_bias})
    bias = None if logits.correction_bias is None else jnp.asarray(logits.correction_bias, jnp.float32)
    by_token = {"values": logits.values} if mask is None else {"values": logits.values, "mask": mask}
    split = meshes.leading_split(len(leading), by_token, {} if bias is None else {"correction_bias": bias})
    if split is None:
        return route_checked(by_token, bias, logits.method)
    return _route_on_devices(by_token, bias, logits.method, split)


def check(logits: Logits) -> tuple[int, ...]:
    """Raises as `route` does; returns the leading axes of tokens."""
    check_instance("logits", logits, Logits, "jmx.Logits")
    values, bias, method = logits.values, logits.correction_bias, logits.method
    check_array("values", values, jnp.floating, abstract=True)
    check_instance("method", method, Method, "a routing method, such as jmx.TopKSoftmax(top_k=2)")
    if len(values.shape) == 0:
        raise ValueError("`values` (a scalar) must have shape (..., num_experts)")
    *leading, num_experts = values.shape
    method.check(num_experts)
    if bias is not None:
        if not method.takes_bias:
            raise ValueError(f"`correction_bias` must be None for {type(method).__name__}, which has no such bias")
        check_array("correction_bias", bias, jnp.floating, abstract=True)
        if bias.shape != (num_experts,):
            raise ValueError(f"`correction_bias` (shape {bias.shape}) must be {(num_experts,)}")
    return tuple(leading)


def route_checked(by_token: dict[str, Shaped[Any, "..."]], bias: Float32[Any, " E"] | None, method: Method) -> Routing:
    """`route` of checked arrays, `values` and perhaps `mask`, which no Explicit mesh axis splits."""
    *leading, num_experts = by_token["values"].shape
    num_tokens = prod(leading)
    values = jnp.asarray(by_token["values"], jnp.float32).reshape(num_tokens, num_experts)
    ids, weights = method(values, bias)
    if "mask" in by_token:
        routed = by_token["mask"].reshape(num_tokens, 1)
        ids, weights = jnp.where(routed, ids, NOWHERE), jnp.where(routed, weights, 0)
    return Routing(ids.reshape(*leading, method.top_k), weights.reshape(*leading, method.top_k))


@partial(jax.jit, static_argnums=(2, 3))
def _route_on_devices(
    by_token: dict[str, Shaped[Any, "..."]], bias: Float32[Any, " E"] | None, method: Method, split: meshes.TokenSplit
) -> Routing:
    return meshes.over_devices(split, lambda by_token, bias: route_checked(by_token, bias, method), by_token, bias)
