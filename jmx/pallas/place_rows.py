"""Sorted rows of tokens: each token is read once and written to the rows of all its assignments, in one Triton kernel.

XLA gathers instead: for each row the token's row of x is looked up and read again, from memory if x is larger than what
the L2 cache keeps. It does so for rows of no assignment, too: half of them where half of the experts are another
device's.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmx.engines import grouped
from jmx.pallas import defined, row_tiles
from jmx.util.typing import Array, Float, Int32, Shaped


def place(x: Float[Array, "T H"], row_of: Int32[Array, "T k"], token_of_row: Int32[Array, " R"]) -> Float[Array, "R H"]:
    """Rows (R, H) of x, 16 or 32 bits an element, by a routing's `Work`; those of no assignment hold anything."""
    return _placed(Place(), x, row_of, token_of_row)


def place_some(
    x: Float[Array, "t H"], row_of: Int32[Array, "T k"], token_of_row: Int32[Array, " R"], first: Int32[Array, "1"]
) -> Float[Array, "R H"]:
    """As `place`, of the tokens from `first` on, which are x; rows of others hold anything."""
    return _placed(Place(), x, row_of, token_of_row, first)


def place_rest(
    rows: Float[Array, "R H"],
    x: Float[Array, "T H"],
    row_of: Int32[Array, "T k"],
    token_of_row: Int32[Array, " R"],
    first: Int32[Array, "1"],
    count: int,
) -> Float[Array, "R H"]:
    """`rows`, which has those of `count` tokens from `first` on, with those of the others; x is not read for these."""
    return _placed(Place(count=count), x, row_of, token_of_row, first, rows)


def _placed(call: "Place", *given: Shaped[Array, "..."]) -> Float[Array, "R H"]:
    (out,) = call.shapes(*given)
    return (call.define(*given) if out.size >= row_tiles.MOST_ELEMENTS else _place(*given, call=call))[0]


@dataclass(frozen=True)
class Place:
    """What is static of a call.

    Its arrays are x, `row_of`, `token_of_row`, then, for a part of the tokens, the first one's number, and the rows
    that are there.

    Args:
        interpret: as in `defined.Call`.
        count: of tokens whose rows are there.
    """

    interpret: bool = False
    count: int = 0

    def shapes(self, x: Any, row_of: Any, token_of_row: Any, *_: Any) -> list[jax.ShapeDtypeStruct]:
        del row_of
        return [jax.ShapeDtypeStruct((*token_of_row.shape, x.shape[1]), x.dtype)]

    def define(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "R H"]]:
        x, _, tokens, *part = given
        if not part:
            return [grouped.take_rows(x, tokens)]
        first, *there = part
        if not there:
            return [grouped.take_rows(x, jnp.clip(tokens - first, 0, x.shape[0] - 1))]
        is_there = (tokens >= first) & (tokens < first + self.count)
        return [jnp.where(is_there[:, None], there[0], grouped.take_rows(x, tokens))]

    def launch(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "R H"]]:
        (out,), (x, row_of, _, *part) = self.shapes(*given), given
        shape = x.shape[0] - self.count, x.shape[1]
        kernel, options = partial(_place_tile, shape), {"interpret": self.interpret, "into_last": len(part) == 2}
        return row_tiles.launch(
            kernel, out, row_tiles.num_tiles(shape), (x, row_of, *part), "jmx_place_rows", **options
        )


def _place_tile(shape: tuple[int, int], x: Any, row_of: Any, *rest: Any) -> None:
    """`shape`: of the tokens that are placed."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    *part, out = rest
    tokens, columns, inside = row_tiles.tile(shape, pl.program_id(0), pl.program_id(1))
    used, numbers, first = tokens < shape[0], tokens, part[0][0] if part else 0
    if len(part) == 1:
        numbers = first + tokens
    elif part:
        tokens = numbers = tokens + jnp.where(tokens < first, 0, x.shape[0] - shape[0])
    values = plgpu.load(x.at[tokens[:, None], columns], mask=inside, other=0)
    for slot in range(row_of.shape[1]):
        rows = plgpu.load(row_of.at[numbers, slot], mask=used, other=-1)
        index = jnp.where(rows >= 0, rows, out.shape[0])  # interpreted, all are written: the others out of range
        plgpu.store(out.at[index[:, None], columns], values, mask=inside & (rows >= 0)[:, None])


_place = defined.primitive("jmx_place_rows")
