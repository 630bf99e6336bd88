"""One product of the layer, as the host describes it to the kernel: static configuration, and operands by name."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jmx.activations import Activation
from jmx.grouping import Blocks
from jmx.numerics.formats import Format
from jmx.pallas.triton.config import Config
from jmx.pallas.triton.decode import CHUNK
from jmx.pallas.triton.scale_codes import ScaleCodes
from jmx.util.typing import Float, Int8, Int16, Int32, Shaped


@dataclass(frozen=True)
class Product:
    """One of the layer's two products; static.

    Args:
        config: tile sizes.
        format: of the weight, with 4-bit elements.
        num_rows: rows of the result.
        activation: applied to the product plus bias; None: nothing, and K is split into `config.split_k` parts.
        num_experts: E of the layer: at most so many blocks have fewer rows than `config.block_m`, where some have a
            narrower tile.
        gate_up_order: one of `GATE_UP_ORDERS`, the order of gate and up in the weight's rows; None: no gate.
        interpret: whether Pallas interprets the kernel, on any platform, rather than compile it.
    """

    config: Config
    format: Format
    num_rows: int
    activation: Activation | None = None
    num_experts: int = 0
    gate_up_order: str | None = None
    interpret: bool = False

    @property
    def halves(self) -> int:
        """2 for gate and up, otherwise 1."""
        return 1 if self.gate_up_order is None else 2

    @property
    def num_parts(self) -> int:
        """Parts of K that are summed separately."""
        return 1 if self.permutes_columns else self.config.split_k

    @property
    def tiles(self) -> list["Product"]:
        """The same for blocks of ever fewer rows, itself first."""
        return [replace(self, config=config) for config in self.config.tiles]

    @property
    def permutes_columns(self) -> bool:
        """Whether the result's columns are in the permuted order of `decode`, which the second product reads."""
        return self.activation is not None

    @property
    def kernel_name(self) -> str:
        """The name in a profile: block_m x block_n x block_k, warps, stages, products and split_k."""
        c = self.config
        sizes = f"{c.block_m}x{c.block_n}x{c.block_k}"
        return f"jmx_grouped_product_{sizes}_warps{c.num_warps}_stages{c.num_stages}_products{c.products}_k{c.split_k}"

    def out(self, num_weight_rows: int) -> jax.ShapeDtypeStruct:
        """(num_parts, rows, columns), to be summed over parts; permuted columns are padded with zeros to a CHUNK."""
        columns, dtype = num_weight_rows // self.halves, jnp.float32
        if self.permutes_columns:
            columns, dtype = pl.cdiv(columns, CHUNK) * CHUNK, jnp.bfloat16
        return jax.ShapeDtypeStruct((self.num_parts, self.num_rows, columns), dtype)


class Operands(NamedTuple):
    """Operands of the kernel: arrays, or in the kernel references to them. None: not in this call.

    `row_of`: the row of x for each row of blocks; None: that row itself.
    `ids`, `block_ids`: the routing's ids of tokens, and the id of each block: only tokens with that id are computed.
    `num_whole`: how many blocks, the first ones, have `block_m` rows; None where all tiles are alike.
    `codes`: `scales` as words.
    `params_of`: for each block, the index of its expert in `scales` and `zero_points`; None: the expert.
    """

    blocks: Blocks
    x: Float[Any, "R K"]
    row_of: Int32[Any, " R"] | None
    ids: Int32[Any, "T k"] | None
    block_ids: Int32[Any, " B"] | None
    num_whole: Int32[Any, " 1"] | None
    values: Int16[Any, "E N words"]
    codes: ScaleCodes | None
    scales: Shaped[Any, "E N g"] | None
    zero_points: Int8[Any, "E N g"] | None
    params_of: Int32[Any, " B"] | None
    row_scales: Float[Any, "E N"] | None
    bias: Float[Any, "E N"] | None
