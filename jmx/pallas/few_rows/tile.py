"""Products of tiles of a weight's rows with all tokens, which the kernels of this package consist of.

One token: a CTA keeps it in registers, normed, and takes several tiles of the weight, the first of which is on its way
before the token is. No tensor core is needed. Several tokens are columns of a tensor core's product, whose steps along
K Triton's pipeline loads ahead; or, where a weight has so few rows that each can have a CTA, they are multiplied out of
registers, too.

A norm's scale multiplies x, and its rate, which is known after the last column, multiplies the sums.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jmx.pallas.few_rows.choice import ALIGNMENT, Tile
from jmx.util.typing import Array, Bool, Float32, Int32, Shaped

Ref = Any
Rate = Float32[Array, "1 t"] | None


class Factors(NamedTuple):
    """References to x (T, K), to a norm's scale, float32 (K,), or None for no norm, and to the weight (N, K)."""

    x: Ref
    scale: Ref | None
    weights: Ref


class Work(NamedTuple):
    """The tiles of a call.

    Args:
        num_tiles: their number.
        rows: of the weight, int32 (r,), of the n-th.
        load: what else the n-th tile needs, such as its bias; it is on its way while products are computed.
        finish: takes n, what `load` returned, the tile's products with the normed tokens (r, t), t = `padded_tokens`,
            and the norm's rate.
    """

    num_tiles: int
    rows: Callable[[Int32[Array, ""]], Int32[Array, " r"]]
    load: Callable[[Int32[Array, ""]], Any]
    finish: Callable[[Int32[Array, ""], Any, Float32[Array, "r t"], Rate], None]


def padded_tokens(num_tokens: int) -> int:
    """Columns of the products: a tensor core multiplies 8 at a time."""
    return 1 if num_tokens == 1 else -(-num_tokens // 8) * 8


def compute_tiles(factors: Factors, tile: Tile, epsilon: float, work: Work, *, interpret: bool) -> None:
    """Computes the tiles of this CTA. `interpret`: whether Pallas interprets the kernel."""
    size = factors.x.shape[1]

    def rate(squares: Float32[Array, "1 t"]) -> Rate:
        return None if factors.scale is None else lax.rsqrt(squares / size + epsilon)

    if factors.x.shape[0] == 1:
        return _one_token(factors, tile, rate, work, interpret)
    nth = pl.program_id(0)
    loaded = work.load(nth)
    if tile.rows > 1:
        sums, squares = _by_tensor_cores(factors, tile, work.rows(nth))
    else:
        sums, squares = _of_one_row(factors, tile, work.rows(nth), interpret)
    rates = rate(squares)
    return work.finish(nth, loaded, sums if rates is None else sums * rates, rates)


def _one_token(factors: Factors, tile: Tile, rate: Callable[[Array], Rate], work: Work, interpret: bool) -> None:
    """The tiles are written out: in a loop the registers of the next one would be those of the present one."""
    nth, stride = pl.program_id(0), tile.num_ctas(1, work.num_tiles)
    each = -(-work.num_tiles // stride)

    def load(step: int) -> tuple[Bool[Array, ""] | bool, Int32[Array, ""], list[Array], Any]:
        here = nth + step * stride
        there = True if (step + 1) * stride <= work.num_tiles else here < work.num_tiles
        number = jnp.where(there, here, nth)
        return there, number, _weights(factors, tile, work.rows(number), there), work.load(number)

    present = load(0)
    xs, squares = _tokens(factors, tile, interpret)
    rates = rate(squares)

    def multiply(number: Int32[Array, ""], weights: list[Array], loaded: Any) -> None:
        sums = _summed(weights, xs)
        work.finish(number, loaded, sums if rates is None else sums * rates, rates)

    for step in range(each):
        following = None
        if step + 1 < each:
            following = load(step + 1)
            _keep_order(interpret)
        there, number, weights, loaded = present
        if there is True:
            multiply(number, weights, loaded)
        else:
            pl.when(there)(partial(multiply, number, weights, loaded))
        if following is not None:
            present = following


def _of_one_row(factors: Factors, tile: Tile, row: Int32[Array, "1"], interpret: bool) -> tuple[Array, Array]:
    weights = _weights(factors, tile, row, True)
    xs, squares = _tokens(factors, tile, interpret)
    return _summed(weights, xs).reshape(1, -1), squares.reshape(1, -1)


def _keep_order(interpret: bool) -> None:
    """Loads before this are on their way before any after it.

    The threads of a CTA meet, which they need not, but ptxas moves no load over a barrier. Without one it moves a
    tile's loads behind the token's sum of squares, to use fewer registers.
    """
    if not interpret:
        plgpu.debug_barrier()


def _columns(factors: Factors, tile: Tile) -> list[Int32[Array, "1 c"]]:
    """The columns of each step along K."""
    size, each = factors.x.shape[1], tile.columns
    return [start + jnp.arange(each, dtype=jnp.int32)[None, :] for start in range(0, size, each)]


def _weights(
    factors: Factors, tile: Tile, rows: Int32[Array, " r"], where: Bool[Array, ""] | bool
) -> list[Shaped[Array, "r c"]]:
    """A tile of the weight; zeros if not `where`."""
    size = factors.x.shape[1]
    return [
        plgpu.load(
            factors.weights.at[rows[:, None], columns],
            mask=jnp.broadcast_to((columns < size) & where, (rows.size, tile.columns)),
            other=0,
        )
        for columns in _columns(factors, tile)
    ]


def _tokens(factors: Factors, tile: Tile, interpret: bool) -> tuple[list[Float32[Array, "t c"]], Float32[Array, "t 1"]]:
    """The tokens, times the norm's scale, and the sums of their squares. They are loaded after all that was before."""
    count, size = factors.x.shape
    token = jnp.arange(padded_tokens(count), dtype=jnp.int32)[:, None]
    steps, scales = _columns(factors, tile), None
    if factors.scale is not None:
        scales = [plgpu.load(factors.scale.at[its], mask=its < size, other=0) for its in steps]
    _keep_order(interpret)
    xs = [
        plgpu.load(factors.x.at[token, its], mask=(its < size) & (token < count), other=0).astype(jnp.float32)
        for its in steps
    ]
    squares = jnp.sum(reduce(jnp.add, (x * x for x in xs)), axis=1, keepdims=True)
    if scales is not None:
        xs = [x * scale for x, scale in zip(xs, scales, strict=True)]
    return xs, squares


def _summed(weights: list[Shaped[Array, "r c"]], xs: list[Float32[Array, "t c"]]) -> Float32[Array, "n 1"]:
    """The products of several rows with one token, or of one row with several tokens."""
    parts = (its.astype(jnp.float32) * x for its, x in zip(weights, xs, strict=True))
    return jnp.sum(reduce(jnp.add, parts), axis=1, keepdims=True)


def _by_tensor_cores(factors: Factors, tile: Tile, rows: Int32[Array, " r"]) -> tuple[Array, Array]:
    """Sums and squares of a tile, whose columns are in `tile.splits` parts that warps multiply side by side.

    The tensor cores' first operand has the weight's rows once for each part, the second one the tokens. Of their
    product only the blocks of a part with itself are used.
    """
    count, size = factors.x.shape
    padded, splits = padded_tokens(count), tile.splits
    share = -(-size // (splits * ALIGNMENT)) * ALIGNMENT
    number = jnp.arange(splits * rows.size, dtype=jnp.int32)[:, None]
    row = jnp.broadcast_to(rows[None, :], (splits, rows.size)).reshape(-1, 1)
    column = jnp.arange(splits * padded, dtype=jnp.int32)[None, :]
    token = column % padded
    parts = number // rows.size, column // padded

    def step(nth: Int32[Array, ""], sofar: tuple[Array, Array]) -> tuple[Array, Array]:
        sums, squares = sofar
        inner = nth * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
        of_row, of_token = (
            part * share + its for part, its in zip(parts, (inner[None, :], inner[:, None]), strict=True)
        )
        here = (inner < share)[:, None] & (of_token < size)
        x = plgpu.load(factors.x.at[token, of_token], mask=here & (token < count), other=0)
        if factors.scale is not None:
            wide = x.astype(jnp.float32)
            squares += wide * wide
            x = (wide * plgpu.load(factors.scale.at[of_token], mask=here, other=0)).astype(x.dtype)
        mask = (inner < share)[None, :] & (of_row < size)
        weights = plgpu.load(factors.weights.at[row, of_row], mask=mask, other=0)
        return sums + plgpu.dot(weights, x), squares

    none = jnp.zeros((number.size, token.size), jnp.float32), jnp.zeros((tile.columns, token.size), jnp.float32)
    sums, squares = lax.fori_loop(0, -(-share // tile.columns), step, none)
    if splits > 1:
        sums = jnp.where(parts[0] == parts[1], sums, 0).reshape(splits, rows.size, splits, padded)
        sums = jnp.sum(jnp.sum(sums, axis=2), axis=0)
        squares = jnp.sum(jnp.sum(squares, axis=0).reshape(splits, padded), axis=0)
        return sums, squares[None, :]
    return sums, jnp.sum(squares, axis=0, keepdims=True)
