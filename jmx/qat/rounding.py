"""Rounding of floats to a format while tracing, and the gradients that pass through it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.numerics import formats, quantization
from jmx.numerics.formats import MXFP4, BlockScaled, Format
from jmx.util.checks import check_array, check_one_of
from jmx.util.typing import AnyArray, Array, Bool, Float

# What a rounded weight's gradient becomes at the master weight. "straight_through": the same. "clipped": the same, and
# 0 where the master weight is above the largest, or below the least, value that its block can hold with its scale.
GRADIENTS = ("straight_through", "clipped")

# A byte of elements (one of 8 bits or two of 4) with the least and the largest finite value, by the elements' dtype.
_LIMITS = {"float4_e2m1fn": (0xFF, 0x77), "float8_e4m3fn": (0xFE, 0x7E), "int4": (0x88, 0x77), "int8": (0x80, 0x7F)}


def rounded(
    weights: Float[AnyArray, "*lead K"],
    format: Format | str = MXFP4,
    *,
    gradients: str = "straight_through",
    scale_rule: str = "ocp",
) -> Float[Array, "*lead K"]:
    """Floats rounded to a format and back, `jmx.dequantize` of `jmx.quantize`, with a gradient.

    For weights outside experts; those of experts are `MasterExperts`. Reverse mode only.

    Args:
        weights: float32 or bfloat16 (..., N, K), blocks along the last axis.
        format: the block format, without "order".
        gradients: one of `GRADIENTS`.
        scale_rule: as of `jmx.quantize`.

    Returns:
        (..., N, K) of the dtype of `weights`. A block with NaN or infinity is NaN.

    Raises:
        ValueError, TypeError: other arguments; a last axis that blocks do not divide.
    """
    format = formats.get(format)
    check_gradients(gradients)
    check_master("weights", weights)
    q = quantization.quantize(lax.stop_gradient(weights), format, scale_rule=scale_rule, nonfinite="nan_block")
    return _as_if(gradients == "clipped", format, jnp.asarray(weights), formats.pack(q))


def check_gradients(gradients: Any) -> str:
    """Raises ValueError for other gradients than `GRADIENTS`."""
    return check_one_of("gradients", gradients, GRADIENTS)


def check_master(name: str, weights: Any, *, abstract: bool = False) -> None:
    """Raises TypeError, naming the array, unless it is float32 or bfloat16. `abstract`: whether it needs no values."""
    if check_array(name, weights, abstract=abstract).dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"`{name}` (dtype {weights.dtype}) must be float32 or bfloat16")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _as_if(clip: bool, format: Format, weights: Float[Array, "*lead K"], q: BlockScaled) -> Float[Array, "*lead K"]:
    return quantization.dequantize(q, weights.dtype, format)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def clipped(format: Format, weights: Float[Array, "*lead K"], q: BlockScaled) -> Float[Array, "*lead K"]:
    """`weights`, whose cotangent is 0 where they are outside of what the blocks of `q` (packed) can hold."""
    return weights


def _clip(format: Format, residuals: tuple[Any, BlockScaled], d: Float[Array, "*lead K"]) -> tuple[Any, None]:
    weights, q = residuals
    return jnp.where(_holds(q, weights, format), d, 0), None


def _pass(clip: bool, format: Format, residuals: Any, d: Float[Array, "*lead K"]) -> tuple[Any, None]:
    return _clip(format, residuals, d) if clip else (d, None)


_as_if.defvjp(
    lambda clip, format, weights, q: (_as_if(clip, format, weights, q), (weights, q) if clip else None), _pass
)
clipped.defvjp(lambda format, weights, q: (weights, (weights, q)), _clip)


def _holds(q: BlockScaled, weights: Float[Array, "*lead K"], format: Format) -> Bool[Array, "*lead K"]:
    """Whether each weight is between the least and the largest value of its block."""
    if format.is_float:
        return jnp.abs(weights) <= jnp.finfo(format.element_dtype).max.astype(jnp.float32)
    least, most = (
        quantization.dequantize(q._replace(values=jnp.full_like(q.values, byte)), jnp.float32, format)
        for byte in _LIMITS[format.element_dtype.name]
    )
    weights = weights.astype(jnp.float32)
    return (least <= weights) & (weights <= most)
