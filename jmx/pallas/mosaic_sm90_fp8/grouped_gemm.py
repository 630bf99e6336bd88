"""The products that a launch computes, one after the other."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jmx.pallas.mosaic_sm90_fp8.config import Config
from jmx.pallas.mosaic_sm90_fp8.elements import Elements, elements_of
from jmx.pallas.mosaic_sm90_fp8.layout import value_rows
from jmx.pallas.mosaic_sm90_fp8.rows import InputRows
from jmx.pallas.sm90.gemm import BaseProduct
from jmx.pallas.sm90.tiles import GATED_ROWS, TILE


@dataclass(frozen=True)
class Product(BaseProduct):
    """One of a launch's products, with a weight in this layout; see `BaseProduct`.

    Args:
        inputs: the rows. If they are not quantized yet, the same launch does it; if they have no values, they are the
            results of the product before.
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
    def input_dtype(self) -> Any:
        """The dtype of quantized inputs."""
        assert self.inputs is not None
        return self.inputs.format.element_dtype

    @property
    def by_block(self) -> bool:
        """Whether scales of inputs belong to 128 columns."""
        assert self.inputs is not None
        return self.inputs.by_block

    @property
    def scales_units(self) -> bool:
        """Whether sums of each unit are multiplied by scales of their own: of the weight, or of inputs."""
        return self.by_block or self.elements.by_block

    @property
    def elements(self) -> Elements:
        """What is multiplied."""
        assert self.inputs is not None
        elements = elements_of(self.format, self.inputs.format)
        assert elements is not None
        return elements

    @property
    def m_tiles(self) -> int:
        """Tiles along the weight's rows that are computed."""
        computed = self.rows.computed
        return self.weight.values.shape[1] if computed is None else -(-computed // self.tile_columns)

    @property
    def units(self) -> int:
        """Units of 128 columns."""
        return -(-self.weight.values.shape[2] // value_rows(self.format))

    @property
    def ends_in_half(self) -> bool:
        """Whether only 64 columns of the last unit are stored."""
        return self.weight.values.shape[2] % value_rows(self.format) > 0

    @property
    def tile_columns(self) -> int:
        """Columns of the result from 64 rows of the weight."""
        return TILE if self.rows.gate_up_order is None else GATED_ROWS

    def staged(self, config: Config) -> int:
        """Rows of a tile's results that a warpgroup's buffer in shared memory holds."""
        return min(config.block_n, config.staged_bytes // (self.tile_columns * jnp.dtype(self.dtype).itemsize))
