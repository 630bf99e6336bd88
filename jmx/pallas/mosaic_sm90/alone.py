"""The operands of one product without its activation, whose result has gate and up: for what adds in between.

A tile of 64 rows of a gated weight has 8 rows of gate, 8 of up, and so on. Multiplied as a weight without a gate, its
outputs come in that order, and the transposed weight takes them in it.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.experts import Experts
from jmx.numerics.formats import BlockScaled, Format
from jmx.numerics.gate_up import is_interleaved, is_up_first
from jmx.pallas.mosaic_sm90.added import Added
from jmx.pallas.mosaic_sm90.grouped_gemm import Product
from jmx.pallas.mosaic_sm90.layout import Tile, is_shifted
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.tiles import TILE, weights_alike
from jmx.util.typing import Array, Float32, Int32


def product_alone(role: str, experts: Experts, dtype: Any, row_scales: Float32[Array, " X"] | None) -> Product:
    """The product with the weight `role` of all layers of `experts`, without a bias; its result is of `dtype`.

    `row_scales`: as in `Product`.
    """
    gate_up, down = weights_alike(experts.merged())
    if role == "down":
        weight, rows = down, experts.hidden_size
    elif experts.gate_up_order is None:
        weight, rows = gate_up, experts.intermediate_size
    else:
        order = rows_of_tiles(experts.intermediate_size, experts.gate_up_order)
        weight, rows = _with_rows(gate_up, experts, order), order.size
    return Product(weight, experts.format, None, Rows(rows, None), dtype, row_scales=row_scales)


def activated(
    experts: Experts, activation: Callable[..., Array], row_scales: Float32[Array, " X"] | None, added: Added
) -> Product:
    """The first product with its bias, `added` and the activation, of bfloat16. `row_scales`: as in `Product`."""
    every = experts.merged()
    weight, _ = weights_alike(every)
    rows = Rows(experts.spec("gate_up").shape[0], experts.gate_up_order)
    return Product(
        weight,
        experts.format,
        every.gate_up_bias,
        rows,
        jnp.bfloat16,
        activation,
        row_scales=row_scales,
        added=added,
    )


def transposed(role: str, experts: Experts, users: Int32[Array, " B"]) -> Product:
    """The product with the transposed weight `role`, of float32, without its scales of whole rows (`row_scales`).

    `users`: the expert of each block of rows, of those of all layers.
    """
    gate_up, down = weights_alike(experts.merged())
    weight, shifts = gate_up if role == "gate_up" else down, None
    if is_shifted(experts.format):
        shifts = weight.scales.at[users, :, -1, 0].get(mode="promise_in_bounds")
        shifts = lax.bitcast_convert_type(shifts, jnp.uint8).max(axis=1).astype(jnp.int32)
    columns = Rows(experts.spec(role).shape[1], None)
    return Product(weight, experts.format, None, columns, jnp.float32, transposed=True, shifts=shifts)


def row_scales(q: BlockScaled, format: Format) -> Float32[Array, "every N"] | None:
    """The scales of whole rows of a weight, by expert of all layers; None if its format has none."""
    scales = getattr(q, _of_whole_rows(format))
    return None if scales is None else scales.astype(jnp.float32).reshape(len(scales), -1)


def rows_of_tiles(intermediate_size: int, gate_up_order: str) -> Int32[np.ndarray, " rows"]:
    """The row of a gated weight in each row of its tiles, of which there are whole ones for `down`; padding has 0."""
    row = np.arange(-(-intermediate_size // TILE) * 2 * TILE, dtype=np.int32)
    output, of_up = row // 16 * 8 + row % 8, row % 16 // 8
    first = 1 - of_up if is_up_first(gate_up_order) else of_up
    found = 2 * output + first if is_interleaved(gate_up_order) else output + first * intermediate_size
    return np.where(output < intermediate_size, found, 0)


def _with_rows(q: BlockScaled, experts: Experts, rows: Int32[np.ndarray, " rows"]) -> BlockScaled:
    """The weight with its scales of whole rows in the order of `rows`."""
    name = _of_whole_rows(experts.format)
    scales = getattr(q, name)
    return q if scales is None else q._replace(**{name: scales[:, rows]})


def _of_whole_rows(format: Format) -> str:
    """The name of the scales that the epilogue multiplies by."""
    return "global_scales" if Tile.of(format).scales > 0 else "scales"
