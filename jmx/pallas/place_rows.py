"""Sorted rows of tokens: each token is read once and written to the rows of all its assignments, in one Triton kernel.

XLA gathers instead: for each row the token's row of x is looked up and read again, from memory if x is larger than what
the L2 cache keeps.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jmx.engines import grouped
from jmx.pallas import defined
from jmx.util.typing import Array, Float, Int32, Shaped

ROWS, COLUMNS, WARPS = 4, 512, 4  # of a tile
_MOST_ELEMENTS = 1 << 31  # of an array, in which Triton's indices are of 32 bits


def place(x: Float[Array, "T H"], row_of: Int32[Array, "T k"], token_of_row: Int32[Array, " R"]) -> Float[Array, "R H"]:
    """Rows (R, H) of x, 16 bits an element and H even, by a routing's `Work`; rows of no assignment hold anything."""
    if token_of_row.size * x.shape[1] >= _MOST_ELEMENTS:
        return grouped.take_pairs(x, token_of_row)
    return _place(x, row_of, token_of_row, call=Place())[0]


@dataclass(frozen=True)
class Place:
    """What is static of a call. `interpret`: as in `defined.Call`."""

    interpret: bool = False

    def shapes(self, x: Any, row_of: Any, token_of_row: Any) -> list[jax.ShapeDtypeStruct]:
        del row_of
        return [jax.ShapeDtypeStruct((*token_of_row.shape, x.shape[1]), x.dtype)]

    def define(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "R H"]]:
        x, _, token_of_row = given
        return [grouped.take_pairs(x, token_of_row)]

    def launch(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "R H"]]:
        # Importing Pallas takes a second.
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton as plgpu

        x, row_of, _ = given
        return pl.pallas_call(
            _tile,
            out_shape=self.shapes(*given),
            grid=(pl.cdiv(x.shape[0], ROWS), pl.cdiv(x.shape[1], COLUMNS)),
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=self.interpret,
            name="jmx_place_rows",
        )(x, row_of)


def _tile(x: Any, row_of: Any, out: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    tokens = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    columns = (pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32))[None, :]
    real = tokens < x.shape[0]
    inside = real[:, None] & (columns < x.shape[1])
    values = plgpu.load(x.at[tokens[:, None], columns], mask=inside, other=0)
    for slot in range(row_of.shape[1]):
        rows = plgpu.load(row_of.at[tokens, slot], mask=real, other=-1)
        index = jnp.where(rows >= 0, rows, out.shape[0])  # interpreted, all are written: the others out of range
        plgpu.store(out.at[index[:, None], columns], values, mask=inside & (rows >= 0)[:, None])


_place = defined.primitive("jmx_place_rows")
