"""Auxiliary losses of a router, from its logits. All are computed in float32, and differentiable in the logits.

Each is 0 for no tokens. Multiply it by a coefficient, and add it to the model's loss: papers use 0.01 for
`load_balancing_loss`, 0.001 for `router_z_loss` and 0.0001 for `sequence_balance_loss`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.routing import Logits, check_mask, route
from jmx.routing.top_k import sqrt_softplus
from jmx.util.checks import check_array, check_one_of, shown
from jmx.util.typing import AnyArray, Array, Bool, Float, Float32

_SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "sqrt_softplus": sqrt_softplus}


def load_balancing_loss(
    logits: Logits, mask: Bool[AnyArray, "*tokens"] | None = None, *, axis_name: str | tuple[str, ...] | None = None
) -> Float32[Array, ""]:
    """E * sum over experts of (its share of the routed slots) * (its mean probability): 1 where all are equal.

    From Switch Transformers (Fedus et al. 2021, equations 4 to 6), for any k: shares are of all slots, so that the
    least value is 1 for any k. Probabilities are the softmax over all experts. Gradients flow through the
    probabilities; shares have none.

    Args:
        logits: router logits (..., E), with the method that chooses k experts.
        mask: (...) bool or None; False is a padding token, which does not count.
        axis_name: a mesh axis, or several, along which tokens are split, inside `jax.shard_map`: shares and means are
            then those of all devices. Elsewhere arrays are whole, and need no name.

    Raises:
        ValueError, TypeError: as `jmx.route`; an `axis_name` that is not a Manual mesh axis here.
    """
    ids = route(logits, mask).expert_ids
    values, used = _tokens(logits, mask)
    num_experts = values.shape[-1]
    tokens = tuple(range(values.ndim - 1))
    counts = _chosen(ids, num_experts).sum(axis=tokens)
    probabilities = (jax.nn.softmax(values) * used[..., None]).sum(axis=tokens)
    counts, probabilities, num_tokens = _over(axis_name, (counts, probabilities, used.sum()))
    shares = lax.stop_gradient(counts / jnp.maximum(counts.sum(), 1))
    return num_experts * (shares * probabilities).sum() / jnp.maximum(num_tokens, 1)


def sequence_balance_loss(
    logits: Logits, mask: Bool[AnyArray, "*batch S"] | None = None, *, scoring: str = "sigmoid"
) -> Float32[Array, ""]:
    """`load_balancing_loss` of each sequence by itself, averaged over sequences (DeepSeek-V3, equations 17 to 20).

    An expert's probability is its score over the sum of the token's scores.

    Args:
        logits: router logits (..., S, E), S tokens of a sequence.
        mask: (..., S) bool or None; False is a padding token. Sequences of padding alone do not count.
        scoring: "sigmoid" (DeepSeek-V3), "softmax" or "sqrt_softplus" of the logits.

    Raises:
        ValueError, TypeError: as `jmx.route`; logits without an axis of sequences; an unknown `scoring`.
    """
    check_one_of("scoring", scoring, _SCORES)
    ids = route(logits, mask).expert_ids
    shape = logits.values.shape
    if len(shape) < 2:
        raise ValueError(f"`values` (shape {shape}) must be (..., S, E), S the tokens of a sequence")
    values, used = _tokens(logits, mask)
    scores = _SCORES[scoring](values)
    probabilities = scores / scores.sum(axis=-1, keepdims=True)
    counts = _chosen(ids, shape[-1]).sum(axis=-2)
    lengths = used.sum(axis=-1)
    shares = lax.stop_gradient(counts / jnp.maximum(counts.sum(axis=-1, keepdims=True), 1))
    means = (probabilities * used[..., None]).sum(axis=-2) / jnp.maximum(lengths, 1)[..., None]
    return shape[-1] * (shares * means).sum() / jnp.maximum((lengths > 0).sum(dtype=jnp.float32), 1)


def router_z_loss(
    logits: Logits | Float[AnyArray, "*tokens E"],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> Float32[Array, ""]:
    """The mean over tokens of logsumexp(logits) squared, which keeps logits small (ST-MoE, Zoph et al. 2022, eq. 5).

    Args:
        logits: router logits (..., E), as an array or as `jmx.Logits`.
        mask: (...) bool or None; False is a padding token, which does not count.
        axis_name: as for `load_balancing_loss`.

    Raises:
        ValueError, TypeError: logits that are not floating, a mask that is not bool or not of their leading axes.
    """
    values, used = _tokens(logits, mask)
    squares = jnp.square(jax.nn.logsumexp(values, axis=-1)) * used
    total, num_tokens = _over(axis_name, (squares.sum(), used.sum()))
    return total / jnp.maximum(num_tokens, 1)


def _tokens(logits: Any, mask: Any) -> tuple[Float32[Array, "*tokens E"], Float32[Array, "*tokens"]]:
    """Logits as float32, and 1 for tokens that count, 0 for padding, whose logits become 0.

    A NaN in padding would otherwise reach gradients through its product with 0.
    """
    values = check_array("logits", logits.values if isinstance(logits, Logits) else logits, jnp.floating)
    if len(values.shape) == 0:
        raise ValueError("`logits` (a scalar) must have shape (..., num_experts)")
    check_mask(mask, values.shape[:-1], "`logits`")
    values = jnp.asarray(values, jnp.float32)
    if mask is None:
        return values, jnp.ones(values.shape[:-1], jnp.float32)
    used = jnp.asarray(mask)
    return jnp.where(used[..., None], values, 0), used.astype(jnp.float32)


def _chosen(ids: Any, num_experts: int) -> Float32[Array, "*tokens E"]:
    """1 where a token (..., k) is routed to the expert, else 0."""
    experts = lax.broadcast_to_rank(jnp.arange(num_experts), ids.ndim + 1)
    return (ids[..., None] == experts).any(axis=-2).astype(jnp.float32)


def _over(axis_name: str | tuple[str, ...] | None, sums: Any) -> Any:
    """Sums of all devices along mesh axes."""
    if axis_name is None:
        return sums
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for name in names:
        if not isinstance(name, str):
            rule = "the name of a mesh axis, a tuple of those, or None"
            raise TypeError(f"`axis_name` ({shown(axis_name)}) must be {rule}")
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not {*names} <= {*manual}:
        raise ValueError(f"`axis_name` (={axis_name!r}) must be Manual axes, inside `jax.shard_map`: here {manual} are")
    return lax.psum(sums, names)
