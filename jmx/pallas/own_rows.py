"""Moving rows of a device's own experts, where most assignments of its tokens are those of other devices' experts.

Sorted rows have the size that any routing may need. XLA gathers all of them, and for a token's sum reads a row for each
of its slots, also those of other devices. These kernels touch only the rows that are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx import grouping
from jmx.grouping import Blocks, Work
from jmx.pallas import defined
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Float32, Int32, Shaped

ROWS, COLUMNS, WARPS = 8, 512, 4  # of a tile
_MOST_ELEMENTS = 1 << 31  # of an array, in which Triton's indices are of 32 bits


def take(x: Shaped[Array, "T H"], index: Int32[Array, " R"], blocks: Blocks) -> Shaped[Array, "R H"]:
    """Rows of x; those after the last block's hold anything. `blocks`: sorted ones, of which rows are `index`'s."""
    if index.size * x.shape[1] >= _MOST_ELEMENTS:
        return _taken(x, index)
    number = jnp.broadcast_to(jnp.asarray(blocks.num_blocks), blocks.experts.shape)
    return _take(x, index, blocks.x_rows, blocks.counts, number, call=Take())[0]


def combine(
    parts: Float[Array, "P R H"], work: Work, weights: Float[Array, "T k"] | None, dtype: Any
) -> Float[Array, "T H"]:
    """`grouping.combine`, of `dtype`."""
    if parts.size >= _MOST_ELEMENTS:
        return grouping.combine(parts, work, weights).astype(dtype)
    rest = () if weights is None else (weights,)
    return _combine(parts, work.row_of, *rest, call=Combine(jnp.dtype(dtype)))[0]


def combine_of(problem: Problem, dtype: Any) -> Callable[..., Float[Array, "T H"]]:
    """What combines the rows of a problem: `combine`, or plain jnp if no expert is elsewhere."""
    return grouping.combine if problem.num_routed is None else partial(combine, dtype=dtype)


@dataclass(frozen=True)
class Take:
    """What is static of `take`. `interpret`: as in `defined.Call`."""

    interpret: bool = False

    def shapes(self, x: Any, index: Any, *_: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((*index.shape, x.shape[1]), x.dtype)]

    def define(self, x: Shaped[Array, "T H"], index: Int32[Array, " R"], *_: Any) -> list[Shaped[Array, "R H"]]:
        return [_taken(x, index)]

    def launch(self, *given: Shaped[Array, "..."]) -> list[Shaped[Array, "R H"]]:
        return _launch(_take_tile, self, given, given[1].size, "jmx_take_own_rows")


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
        return _launch(_combine_tile, self, given, given[1].shape[0], "jmx_combine_own_rows")


_take = defined.primitive("jmx_take_own_rows")
_combine = defined.primitive("jmx_combine_own_rows")


def _taken(x: Shaped[Array, "T H"], index: Int32[Array, " R"]) -> Shaped[Array, "R H"]:
    return x.at[index].get(mode="promise_in_bounds")


def _launch(tile: Any, call: Any, given: Any, num_rows: int, name: str) -> list[Shaped[Array, "R H"]]:
    # Importing Pallas takes a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    return pl.pallas_call(
        partial(_by_tiles, tile=tile),
        out_shape=call.shapes(*given),
        grid=(pl.cdiv(num_rows, ROWS),),
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=call.interpret,
        name=name,
    )(*given)


def _by_tiles(*refs: Any, tile: Any) -> None:
    """Computes this CTA's rows of the last of `refs`, by tiles of columns."""
    from jax.experimental import pallas as pl

    first = pl.program_id(0) * ROWS
    rows = first + jnp.arange(ROWS, dtype=jnp.int32)
    end, step = tile(*refs, rows)

    def columns(i: Any, _: Any) -> None:
        at = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        step(at, (rows < end)[:, None] & (at < refs[-1].shape[1])[None, :])

    number = jnp.where(first < end, jnp.int32(pl.cdiv(refs[-1].shape[1], COLUMNS)), jnp.int32(0))
    lax.fori_loop(jnp.int32(0), number, columns, None)


def _take_tile(x: Any, index: Any, x_rows: Any, counts: Any, number: Any, out: Any, rows: Int32[Array, " r"]) -> Any:
    """The number of rows that are used, and what writes a tile of columns of `rows`."""
    from jax.experimental.pallas import triton as plgpu

    last = jnp.maximum(number[0] - 1, 0)
    end = x_rows[last] + counts[last]
    tokens = plgpu.load(index.at[rows], mask=rows < end, other=0)

    def step(at: Int32[Array, " c"], inside: Any) -> None:
        values = plgpu.load(x.at[tokens[:, None], at[None, :]], mask=inside, other=0)
        plgpu.store(out.at[rows[:, None], at[None, :]], values, mask=inside)

    return end, step


def _combine_tile(parts: Any, row_of: Any, *rest: Any) -> Any:
    """The number of tokens, and what writes a tile of columns of sums."""
    from jax.experimental.pallas import triton as plgpu

    *weights, out, tokens = rest
    num_tokens, top_k = row_of.shape
    slots = []
    for slot in range(top_k):
        row = plgpu.load(row_of.at[tokens, slot], mask=tokens < num_tokens, other=-1)
        factor: Any = 1.0
        if weights:
            factor = plgpu.load(weights[0].at[tokens, slot], mask=row >= 0, other=0).astype(jnp.float32)[:, None]
        slots.append((row, factor))

    def step(at: Int32[Array, " c"], inside: Any) -> None:
        total = jnp.zeros((ROWS, COLUMNS), jnp.float32)
        for row, factor in slots:
            term: Float32[Array, "r c"] | float = 0.0
            for part in range(parts.shape[0]):
                place = parts.at[part, row[:, None], at[None, :]]
                term += plgpu.load(place, mask=inside & (row >= 0)[:, None], other=0).astype(jnp.float32)
            total += term * factor
        plgpu.store(out.at[tokens[:, None], at[None, :]], total.astype(out.dtype), mask=inside)

    return num_tokens, step
