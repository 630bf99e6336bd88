"""The products that a launch computes, one after the other, and the arrays that they take."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmx.numerics.formats import MXFP4
from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.layout import value_rows
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.sm90.gemm import BaseProduct
from jmx.pallas.sm90.operation import Ref
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE


@dataclass(frozen=True)
class Product(BaseProduct):
    """One of a launch's products, with a weight in this layout; see `BaseProduct`.

    Args:
        inputs: the rows. If they are not quantized yet, the same launch does it; if their values are a shape, they are
            the results of the product before.
        inputs_are_results: whether blocks begin at `out_rows` of the inputs, not at `x_rows`.
        split_k: parts of the weight's columns that are computed separately; 1 with an activation.
    """

    inputs: InputRows | None = None
    inputs_are_results: bool = False
    split_k: int = 1

    def times(self, inputs: InputRows, *, inputs_are_results: bool = False, split_k: int = 1) -> "Product":
        """The same with inputs."""
        return replace(self, inputs=inputs, inputs_are_results=inputs_are_results, split_k=split_k)

    @property
    def quantizes(self) -> bool:
        """Whether the launch quantizes its rows."""
        assert self.inputs is not None
        return not self.inputs.quantized

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
        """Columns of the result from 64 rows of the weight."""
        return TILE if self.rows.gate_up_order is None else GATED_ROWS

    def staged(self, config: Config) -> int:
        """Rows of a tile's results that a warpgroup's buffer in shared memory holds."""
        return min(config.block_n, config.staged_bytes // (self.tile_columns * jnp.dtype(self.dtype).itemsize))


class Operands(NamedTuple):
    """A product's arrays, which are the kernel's operands, or references to them. Those that it lacks are None.

    Args:
        unquantized, row_of, static_scale: as in `InputRows`, with values that are not quantized yet.
        x, x_row_scales, x_block_scales: quantized rows; either of the scales.
        values: of the weight.
        scales: of blocks, which are copied with the units.
        channel_scales: (E, N) or (E, N, 1), by which the epilogue multiplies.
        bias: as in `BaseProduct`.
    """

    unquantized: Ref
    row_of: Ref
    static_scale: Ref
    x: Ref
    x_row_scales: Ref
    x_block_scales: Ref
    values: Ref
    scales: Ref
    channel_scales: Ref
    bias: Ref

    @classmethod
    def of(cls, product: Product) -> "Operands":
        rows, q, of_blocks = product.inputs, product.weight, product.format.block_size > 0
        scales, channel_scales = (q.scales, None) if of_blocks else (None, q.scales)
        weight = (q.values, scales, channel_scales, product.bias)
        assert rows is not None
        if rows.scales is None:
            x = None if isinstance(rows.values, jax.ShapeDtypeStruct) else rows.values
            return cls(x, rows.row_of, rows.static_scale, None, None, None, *weight)
        return cls(None, None, None, None, None, None, *weight).with_quantized(rows.values, rows.scales)

    def with_quantized(self, values: Ref, scales: Ref) -> "Operands":
        """The same with quantized rows."""
        of_rows, of_blocks = (scales, None) if len(scales.shape) == 1 else (None, scales)
        return self._replace(x=values, x_row_scales=of_rows, x_block_scales=of_blocks)
