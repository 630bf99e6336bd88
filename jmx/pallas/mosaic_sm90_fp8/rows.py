"""The rows that products take: quantized to 8 bits, or not yet."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmx.numerics.input_formats import InputFormat
from jmx.pallas.mosaic_sm90_fp8.layout import UNIT_COLUMNS
from jmx.pallas.sm90.operation import Ref
from jmx.util.typing import Array, Float, Float32, Int32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "row_of", "static_scale", "scales"],
    meta_fields=["columns", "format", "num_rows", "weight_columns"],
)
@dataclass(frozen=True)
class InputRows:
    """Rows of inputs, of 8 bits if they have scales, and how they are quantized; a pytree, in a kernel of references.

    Args:
        values: bfloat16, float16 or float32 (T, C), C a multiple of 8; None if the same launch computes them. With
            `scales` of the format's element type (R, `padded_columns`).
        row_of: the rows of the result that each row of values is written to; negative ones are skipped. None: its own.
        static_scale: if `format` is static and rows are not quantized yet, else None.
        columns: K, the number of columns that are read, a multiple of 8.
        format: an input format with e4m3 or int8 elements.
        num_rows: R, of the result. Rows that are not written have undefined contents.
        weight_columns: columns of the weight; the result has at least as many.
        scales: float32 (R,) of rows, or (K / 128, R) of 128 columns of a row; None: not quantized yet.
    """

    values: Float[Any, "T C"]
    row_of: Int32[Array, "T k"] | None
    static_scale: Float32[Array, "1"] | None
    columns: int
    format: InputFormat
    num_rows: int
    weight_columns: int = 0
    scales: Float32[Any, " R"] | Float32[Any, "b R"] = None

    @property
    def quantized(self) -> bool:
        """Whether they have scales."""
        return self.scales is not None

    def with_quantized(self, values: Ref, scales: Ref) -> "InputRows":
        """The same rows quantized: arrays, or references to where a kernel stores them."""
        return replace(self, values=values, row_of=None, static_scale=None, scales=scales)

    @property
    def padded_columns(self) -> int:
        """Columns of the result: whole units."""
        return -(-max(self.columns, self.weight_columns) // UNIT_COLUMNS) * UNIT_COLUMNS

    @property
    def by_block(self) -> bool:
        """Whether scales belong to 128 columns."""
        return isinstance(self.format.block_size, int)

    @property
    def quantized_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes of values and scales once they are quantized."""
        scale_rows = -(-self.num_rows // 4) * 4  # whole 16 bytes, for TMA
        scales = (self.padded_columns // UNIT_COLUMNS, scale_rows) if self.by_block else (self.num_rows,)
        return [
            jax.ShapeDtypeStruct((self.num_rows, self.padded_columns), self.format.element_dtype),
            jax.ShapeDtypeStruct(scales, jnp.float32),
        ]
