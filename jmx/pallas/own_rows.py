"""Moving rows of a device's own experts, where most assignments of its tokens are those of other devices' experts.

Sorted rows have the size that any routing may need. XLA gathers all of them, and for a token's sum reads a row for each
of its slots, also those of other devices. These kernels touch only the rows that are used; of fewer slots `place_rows`
writes each token to those of its rows that are this device's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx import grouping
from jmx.engines import grouped
from jmx.grouping import Blocks, Work
from jmx.pallas import defined, place_rows, row_tiles
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Int32, Shaped

MOST_CTAS = 1 << 11  # which take turns at the rows that are used: each that finds none takes time, too
# Slots of all tokens, below which these kernels were no faster than `place_rows` and XLA's sum: where a quarter of the
# experts, or fewer, are the device's own, and where more are.
LEAST_SLOTS_OF_A_QUARTER, LEAST_SLOTS = 1 << 12, 1 << 15


def applies(problem: Problem, num_slots: int) -> bool:
    """Whether the kernels run for so many slots of all tokens."""
    if problem.num_routed is None:
        return False
    a_quarter = 4 * problem.num_experts <= problem.num_routed
    return num_slots >= (LEAST_SLOTS_OF_A_QUARTER if a_quarter else LEAST_SLOTS)


def take(problem: Problem, x: Shaped[Array, "T H"], work: Work) -> Shaped[Array, "R H"]:
    """The rows of x that sorted work reads; those of no assignment hold anything."""
    index = work.token_of_row
    assert index is not None
    if not applies(problem, work.row_of.size) or index.size * x.shape[1] >= row_tiles.MOST_ELEMENTS:
        return place_rows.place(x, work.row_of, index)
    return _take(x, index, last_row(work.blocks), call=Take())[0]


def last_row(blocks: Blocks) -> Int32[Array, "1"]:
    """The number of rows up to the last one of any block."""
    return jnp.max(jnp.where(blocks.counts > 0, blocks.x_rows + blocks.counts, 0), keepdims=True)


def combine(
    problem: Problem, dtype: Any, parts: Float[Array, "P R H"], work: Work, weights: Float[Array, "T k"] | None
) -> Float[Array, "T H"]:
    """`grouping.combine`, of `dtype`."""
    if not applies(problem, work.row_of.size) or parts.size >= row_tiles.MOST_ELEMENTS:
        return grouping.combine(parts, work, weights).astype(dtype)
    rest = () if weights is None else (weights,)
    return _combine(parts, work.row_of, *rest, call=Combine(jnp.dtype(dtype)))[0]


def combine_of(problem: Problem, dtype: Any) -> Callable[..., Float[Array, "T H"]]:
    """What combines the rows of a problem: `combine`, or plain jnp if no expert is elsewhere."""
    return grouping.combine if problem.num_routed is None else partial(combine, problem, dtype)


@dataclass(frozen=True)
class Take:
    """What is static of `take`. `interpret`: as in `defined.Call`."""

    interpret: bool = False

    def shapes(self, x: Any, index: Any, *_: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((*index.shape, x.shape[1]), x.dtype)]

    def define(self, x: Shaped[Array, "T H"], index: Int32[Array, " R"], *_: Any) -> list[Shaped[Array, "R H"]]:
        return [grouped.take_rows(x, index)]

    def launch(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "R H"]]:
        (out,) = self.shapes(*given)
        rows, columns = row_tiles.num_tiles(out.shape)
        grid = min(rows, max(1, MOST_CTAS // columns)), columns
        return row_tiles.launch(_take_tiles, out, grid, given, "jmx_take_own_rows", interpret=self.interpret)


@dataclass(frozen=True)
class Combine:
    """What is static of `combine`.

    Args:
        dtype: of the sums.
        interpret: as in `defined.Call`.
    """

    dtype: Any
    interpret: bool = False

    def shapes(self, parts: Any, row_of: Any, *_: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((row_of.shape[0], parts.shape[-1]), self.dtype)]

    def define(
        self, parts: Float[Array, "P R H"], row_of: Int32[Array, "T k"], *weights: Float[Array, "T k"]
    ) -> list[Float[Array, "T H"]]:
        work = Work(Blocks(None, 0, 0, 0, 0), row_of, None)
        return [grouping.combine(parts, work, *(weights or (None,))).astype(self.dtype)]

    def launch(self, *given: Shaped[Array, "..."]) -> list[Float[Array, "T H"]]:
        (out,) = self.shapes(*given)
        grid = row_tiles.num_tiles(out.shape)
        return row_tiles.launch(_combine_tile, out, grid, given, "jmx_combine_own_rows", interpret=self.interpret)


_take = defined.primitive("jmx_take_own_rows")
_combine = defined.primitive("jmx_combine_own_rows")


def _take_tiles(x: Any, index: Any, end: Any, out: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    first, column, step, last = pl.program_id(0), pl.program_id(1), pl.num_programs(0), end[0]

    def take(turn: Int32[Array, ""], carry: None) -> None:
        rows, columns, inside = row_tiles.tile(out.shape, first + turn * step, column)
        used = rows < last
        tokens = plgpu.load(index.at[rows], mask=used, other=0)
        inside &= used[:, None]
        values = plgpu.load(x.at[tokens[:, None], columns], mask=inside, other=0)
        plgpu.store(out.at[rows[:, None], columns], values, mask=inside)

    tiles = lax.div(last + (row_tiles.ROWS - 1), row_tiles.ROWS)
    lax.fori_loop(0, lax.div(jnp.maximum(tiles - first + (step - 1), 0), step), take, None)


def _combine_tile(parts: Any, row_of: Any, *rest: Any) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    *weights, out = rest
    tokens, columns, inside = row_tiles.tile(out.shape, pl.program_id(0), pl.program_id(1))
    total = jnp.zeros(inside.shape, jnp.float32)
    for slot in range(row_of.shape[1]):
        row = plgpu.load(row_of.at[tokens, slot], mask=tokens < out.shape[0], other=-1)
        read = inside & (row >= 0)[:, None]
        term: Any = 0.0
        for part in range(parts.shape[0]):
            term += plgpu.load(parts.at[part, row[:, None], columns], mask=read, other=0).astype(jnp.float32)
        if weights:
            factor = plgpu.load(weights[0].at[tokens, slot], mask=row >= 0, other=0)
            term *= factor.astype(jnp.float32)[:, None]
        total += term
    plgpu.store(out.at[tokens[:, None], columns], total.astype(out.dtype), mask=inside)
