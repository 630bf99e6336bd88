"""Sorted rows of tokens: each token is read once and written to the rows of all its assignments, in one Triton kernel.

XLA gathers instead: for each row the token's row of x is looked up and read again, from memory if x is larger than what
the L2 cache keeps. It does so for rows of no assignment, too: half of them where half of the experts are another
device's.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jmx.engines import grouped
from jmx.pallas import defined, row_tiles
from jmx.util.typing import Array, Float, Int32, Shaped


def place(x: Float[Array, "T H"], row_of: Int32[Array, "T k"], token_of_row: Int32[Array, " R"]) -> Float[Array, "R H"]:
    """Rows (R, H) of x, 16 or 32 bits an element, by a routing's `Work`; those of no assignment hold anything."""
    if token_of_row.size * x.shape[1] >= row_tiles.MOST_ELEMENTS:
        return grouped.take_rows(x, token_of_row)
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
        return [grouped.take_rows(x, token_of_row)]

    def launch(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "R H"]]:
        (out,), (x, row_of, _) = self.shapes(*given), given
        grid = row_tiles.num_tiles(x.shape)
        return row_tiles.launch(_place_tile, out, grid, (x, row_of), "jmx_place_rows", interpret=self.interpret)


def _place_tile(x: Any, row_of: Any, out: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    tokens, columns, inside = row_tiles.tile(x.shape, pl.program_id(0), pl.program_id(1))
    values = plgpu.load(x.at[tokens[:, None], columns], mask=inside, other=0)
    for slot in range(row_of.shape[1]):
        rows = plgpu.load(row_of.at[tokens, slot], mask=tokens < x.shape[0], other=-1)
        index = jnp.where(rows >= 0, rows, out.shape[0])  # interpreted, all are written: the others out of range
        plgpu.store(out.at[index[:, None], columns], values, mask=inside & (rows >= 0)[:, None])


_place = defined.primitive("jmx_place_rows")
