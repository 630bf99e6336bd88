"""One dynamic scale for all tokens (`fp8_tensor`), as a static scale of the same bits, from the rows that have it.

Rows of no assignment do not count, whatever they hold.
"""

import jax.numpy as jnp

from jmx.numerics import input_formats
from jmx.numerics.input_formats import FP8_STATIC, FP8_TENSOR
from jmx.util.typing import Array, Bool, Float, Float32


def largest_of_rows(rows: Float[Array, "R K"], valid: Bool[Array, " R"]) -> Float32[Array, ""]:
    """The largest magnitude in valid rows; NaN if one is NaN."""
    return jnp.max(jnp.where(valid[:, None], jnp.abs(rows.astype(jnp.float32)), 0), initial=0)


def static_scale(largest: Float32[Array, ""]) -> Float32[Array, ""]:
    """The scale for a largest magnitude; NaN if that is not finite."""
    scale = input_formats.quantize(largest[None], FP8_TENSOR).scales
    most = input_formats.static_limits(FP8_STATIC)[1]
    return jnp.minimum(scale, most)  # of float32's largest number one unit less, under which it saturates


def scale_of_rows(rows: Float[Array, "R K"], valid: Bool[Array, " R"]) -> Float32[Array, ""]:
    """The scale of valid rows."""
    return static_scale(largest_of_rows(rows, valid))
