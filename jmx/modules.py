"""What both Flax modules settle before a weight is made: arguments that hang together, and those that follow."""

from collections.abc import Mapping
from typing import Any

import jax

from jmx import meshes
from jmx.activations import GATE_UP_ORDERS, Activation
from jmx.experts import check_axes
from jmx.routing import Method, TopKSoftmax
from jmx.selection import WEIGHTS_ON


def resolve_order(gate_up_order: str | None, activation: Activation) -> str | None:
    """The order of gate and up rows: "auto" is "concatenated" where `activation` has a gate, else None.

    Raises:
        ValueError: an order that is not known, or that does not fit `activation`.
    """
    if gate_up_order == "auto":
        return "concatenated" if activation.gated else None
    if gate_up_order not in (*GATE_UP_ORDERS, None):
        raise ValueError(f"`gate_up_order` (={gate_up_order!r}) must be 'auto' or one of {(*GATE_UP_ORDERS, None)}")
    if activation.gated != (gate_up_order is not None):
        raise ValueError(
            f"`gate_up_order` (={gate_up_order!r}) must be {'given' if activation.gated else 'None'} for "
            f"`activation` (={activation}), which has {'a' if activation.gated else 'no'} gate"
        )
    return gate_up_order


def resolve_method(routing: Method | None, top_k: int, num_experts: int, *, correction_bias: bool) -> Method:
    """The routing method: `TopKSoftmax(top_k)` where none is given.

    Raises:
        ValueError: a method that has another `top_k`, cannot serve `num_experts`, or has no place for a bias.
    """
    method = TopKSoftmax(top_k) if routing is None else routing
    if method.top_k != top_k:
        raise ValueError(f"`top_k` (={top_k}) must be that of `routing` (={method})")
    method.check(num_experts)
    if correction_bias and not method.takes_bias:
        raise ValueError(
            f"`correction_bias` (=True) must be False for `routing` (={method}), which has no place for it"
        )
    return method


def check_arguments(weights_on: str, axes: Mapping[str, str | None] | None) -> None:
    """Raises ValueError, naming the argument, for a `weights_on` or logical axes that do not exist."""
    if weights_on not in WEIGHTS_ON:
        raise ValueError(f"`weights_on` (={weights_on!r}) must be one of {WEIGHTS_ON}")
    check_axes(axes or {})


def check_auto_axes(axes: Mapping[str, str | None]) -> None:
    """Raises ValueError for `axes` along Explicit axes of the mesh in scope, where Linen places no weights."""
    for axis, name in axes.items():
        if name in jax.sharding.get_abstract_mesh().explicit_axes:
            raise ValueError(
                f"`axes[{axis!r}]` (={name!r}) must not be an Explicit mesh axis: Linen places weights along Auto axes "
                "alone. Leave it out, or make the mesh with jax.sharding.AxisType.Auto"
            )


def check_router_split(x: Any, weights: Mapping[str, Any]) -> None:
    """Raises ValueError where an Explicit mesh axis splits a router's weights, or of x anything but its tokens."""
    meshes.check_whole({"x": x}, x.ndim - 1)
    meshes.check_whole({f"router.{name}": weight for name, weight in weights.items()})
