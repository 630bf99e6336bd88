"""What a launch of `kernel` computes: products, one after the other, and the arrays that they take."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx.numerics.formats import MXFP4
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.layout import value_rows
from jmx.pallas.mosaic_sm90_fp8.rows import QuantizedRows, UnquantizedRows
from jmx.pallas.sm90.gemm import BaseProduct
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE


@dataclass(frozen=True)
class Product(BaseProduct):
    """One of a launch's products, in this layout; see `BaseProduct`.

    Args:
        inputs: what is multiplied. Where they are still to be quantized, that is done in the same launch; where these
            are a shape, they are what the product before gave.
        inputs_are_results: whether they lie where results do, in blocks by `out_rows`, not by `x_rows`.
        split_k: parts of the weight's columns that are computed apart, where there is no activation.
    """

    inputs: QuantizedRows | UnquantizedRows | None = None
    inputs_are_results: bool = False
    split_k: int = 1

    def times(
        self, inputs: QuantizedRows | UnquantizedRows, *, inputs_are_results: bool = False, split_k: int = 1
    ) -> "Product":
        return replace(self, inputs=inputs, inputs_are_results=inputs_are_results, split_k=split_k)

    @property
    def by_block(self) -> bool:
        """Whether scales of inputs belong to 128 columns."""
        assert self.inputs is not None
        return self.inputs.by_block

    @property
    def decoded(self) -> bool:
        """Whether its elements become e5m2 in registers."""
        return self.format == MXFP4

    @property
    def m_tiles(self) -> int:
        """Tiles along the weight's rows."""
        return self.weight.values.shape[1]

    @property
    def units(self) -> int:
        """Units of 128 columns."""
        return self.weight.values.shape[2] // value_rows(self.format)

    @property
    def tile_columns(self) -> int:
        """Columns of the result that 64 rows of the weight give."""
        return TILE if self.rows.gate_up_order is None else GATED_ROWS

    def staged(self, config: Config) -> int:
        """Rows of a tile's results that a warpgroup holds in shared memory on their way."""
        return min(config.block_n, config.staged_bytes // (self.tile_columns * jnp.dtype(self.dtype).itemsize))


class Operands(NamedTuple):
    """A product's arrays as the kernel takes them, or refs of them; None for what there is not."""

    unquantized: Any
    row_of: Any
    static_scale: Any
    x: Any
    x_row_scales: Any
    x_block_scales: Any
    values: Any
    scales: Any  # that come with the units
    by_row: Any  # scales (E, N) or (E, N, 1), which the epilogue multiplies by
    bias: Any

    @classmethod
    def of(cls, product: Product) -> "Operands":
        rows, q, of_blocks = product.inputs, product.weight, product.format.block_size > 0
        scales, by_row = (q.scales, None) if of_blocks else (None, q.scales)
        weight = (q.values, scales, by_row, product.bias)
        if isinstance(rows, UnquantizedRows):
            x = None if isinstance(rows.x, jax.ShapeDtypeStruct) else rows.x
            return cls(x, rows.row_of, rows.static_scale, None, None, None, *weight)
        assert rows is not None
        return cls(None, None, None, None, None, None, *weight).with_quantized(*rows)

    def with_quantized(self, values: Any, scales: Any) -> "Operands":
        of_rows, of_blocks = (scales, None) if len(scales.shape) == 1 else (None, scales)
        return self._replace(x=values, x_row_scales=of_rows, x_block_scales=of_blocks)
