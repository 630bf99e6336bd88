"""Load balancing without a loss: a bias of the choice of experts, moved against their load."""

import jax.numpy as jnp

from jmx.util.checks import check_array, check_finite
from jmx.util.typing import AnyArray, Array, Float, Float32, Shaped


def updated_correction_bias(
    correction_bias: Float[AnyArray, " E"], counts: Shaped[AnyArray, " E"], rate: float
) -> Float32[Array, " E"]:
    """The bias after a training step: `rate` higher for experts below the mean load, lower for those above it.

    The bias takes part in the choice of experts, not in their weights, so results get no gradient from balancing
    (DeepSeek-V3, section 2.1.2; Wang et al. 2024, "Auxiliary-loss-free load balancing"). An expert with just the mean
    load keeps its bias.

    Args:
        correction_bias: floating (E,).
        counts: integer or floating (E,), slots that went to each expert in the step, of all devices: those of
            `jmx.token_counts`.
        rate: how far biases move, at least 0; DeepSeek-V3 has 0.001, and 0 for its last steps.

    Raises:
        TypeError: arrays of other types, a rate that is not a number.
        ValueError: shapes that are not (E,) both, or a rate below 0.
    """
    check_array("correction_bias", correction_bias, jnp.floating)
    check_array("counts", counts)
    if jnp.issubdtype(counts.dtype, jnp.bool_) or not jnp.issubdtype(counts.dtype, jnp.number):
        raise TypeError(f"`counts` (dtype {counts.dtype}) must be integers or floats")
    rate = check_finite("rate", rate)
    if rate < 0:
        raise ValueError(f"`rate` (={rate}) must be at least 0")
    if len(correction_bias.shape) != 1:
        raise ValueError(f"`correction_bias` (shape {correction_bias.shape}) must be (E,)")
    if counts.shape != correction_bias.shape:
        raise ValueError(f"`counts` (shape {counts.shape}) must be {correction_bias.shape}, that of `correction_bias`")
    load = jnp.asarray(counts, jnp.float32)
    return jnp.asarray(correction_bias, jnp.float32) + rate * jnp.sign(load.mean() - load)
