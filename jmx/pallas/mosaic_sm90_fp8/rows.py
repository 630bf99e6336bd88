"""Rows that products take: in FP8, or still to be quantized."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmx.numerics.input_formats import InputFormat
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS


class QuantizedRows(NamedTuple):
    """Rows in FP8.

    Args:
        values: float8_e4m3fn (R, K), K a multiple of 128.
        scales: float32 (R,) of rows, or (K / 128, R) of 128 columns of a row.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def by_block(self) -> bool:
        return self.scales.ndim == 2


class UnquantizedRows(NamedTuple):
    """Rows that are still to be quantized, each to every place that it has; inside a kernel with refs of its arrays.

    Args:
        x: bfloat16, float16 or float32 (T, C), C a multiple of 8; a shape where a launch has made it by then.
        columns: K, how many columns count, a multiple of 8; of those behind nothing is read.
        format: of e4m3.
        static_scale: float32 (1,), where `format` is static; None elsewhere.
        row_of: int32 (T, k), the rows of the result that each row of x goes to, of which negative ones are none; None:
            its own.
        num_rows: R, of the result. Rows that nothing goes to may hold anything.
    """

    x: jax.Array | jax.ShapeDtypeStruct
    columns: int
    format: InputFormat
    static_scale: jax.Array | None
    row_of: jax.Array | None
    num_rows: int

    @property
    def padded(self) -> int:
        return -(-self.columns // UNIT_COLUMNS) * UNIT_COLUMNS

    @property
    def by_block(self) -> bool:
        return isinstance(self.format.block_size, int)

    @property
    def quantized(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what becomes of them, as `QuantizedRows` has it."""
        scale_rows = -(-self.num_rows // 4) * 4  # whole 16 bytes, for TMA
        scales = (self.columns // UNIT_COLUMNS, scale_rows) if self.by_block else (self.num_rows,)
        return [
            jax.ShapeDtypeStruct((self.num_rows, self.padded), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct(scales, jnp.float32),
        ]
