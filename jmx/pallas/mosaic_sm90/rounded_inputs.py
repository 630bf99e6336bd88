"""Inputs rounded to a format, as bfloat16: elements times the scales of their blocks, and one more scale for each row.

bfloat16 has 8 significant bits, and so holds every e4m3, e2m1 and int8 element exactly, and such an element times a
scale of its block that is a power of two or, for e2m1, an e4m3 number. Scales of whole rows and of the tensor are
arbitrary float32 numbers: these multiply the sums, in the epilogue. So products are those of the represented values,
accumulated in float32. Only `fp8_block` does not fit: its scales are float32 and change within a row. And the one scale
of `fp8_tensor` is not known until all rows are.
"""

from typing import NamedTuple

import jax.numpy as jnp

from jmx.numerics import input_formats
from jmx.numerics.input_formats import INPUT_FORMATS, InputFormat, dequantize, quantize
from jmx.util.typing import AnyArray, Array, Float, Float32, Int32

INPUTS = tuple(name for name, format in INPUT_FORMATS.items() if format.by_token and format != input_formats.FP8_BLOCK)


class RoundedRows(NamedTuple):
    """Rows of inputs: what they represent is values * scales[:, None].

    Args:
        values: the rows, bfloat16.
        scales: of each row; None: 1.
    """

    values: Float[Array, "R K"]
    scales: Float32[Array, " R"] | None

    def take(self, rows: Int32[AnyArray, " r"]) -> Float32[Array, " r"] | None:
        """The scales of chosen rows, whose indices must be in range."""
        return None if self.scales is None else self.scales.at[rows].get(mode="promise_in_bounds")


def round_rows(x: Float[AnyArray, "R K"], format: InputFormat, static_scale: Float32[Array, ""] | None) -> RoundedRows:
    """Rows rounded to `format`, one of `INPUTS`, to the bits of `input_formats.quantize`."""
    q = quantize(x, format, static_scale)
    if isinstance(format.block_size, int):
        values = dequantize(q._replace(global_scale=None), format).astype(jnp.bfloat16)
        return RoundedRows(values, None if q.global_scale is None else jnp.broadcast_to(q.global_scale, x.shape[:1]))
    scales = q.scales[:, 0] if format.block_size == "row" else jnp.broadcast_to(q.scales, x.shape[:1])
    return RoundedRows(q.values.astype(jnp.bfloat16), scales)
