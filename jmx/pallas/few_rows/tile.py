"""Products of a tile of a weight's rows with all tokens, which every kernel of this package begins with.

One token is multiplied without tensor cores: a CTA loads much of its tile into registers before the first element of it
is needed, so that memory is never idle. Several tokens are columns of a tensor core's product, whose steps along K
Triton's pipeline loads ahead.

A norm's scale multiplies x, and its rate, which is known after the last column, multiplies the sums.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jmx.util.typing import Array, Float32, Int32, Shaped

Ref = Any

Sums = tuple[Float32[Array, "r t"], Float32[Array, "1 t"]]  # products, and sums of squares of x


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile, and how it is computed.

    Args:
        rows: of the weight, a power of two; 16 or more for several tokens.
        columns: of a step along K, a power of two.
        num_warps: of a CTA.
        num_stages: of Triton's pipeline, for several tokens.
        ahead: for one token, steps that are loaded at once, all of K if it has no more.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1
    ahead: int = 4


class Factors(NamedTuple):
    """References to x (T, K), to a norm's scale, float32 (K,), or None for no norm, and to the weight (N, K)."""

    x: Ref
    scale: Ref | None
    weights: Ref


def padded_tokens(num_tokens: int) -> int:
    """Columns of the sums: a tensor core multiplies 8 at a time."""
    return 1 if num_tokens == 1 else -(-num_tokens // 8) * 8


def products(
    factors: Factors, rows: Int32[Array, " r"], tile: Tile, epsilon: float
) -> tuple[Float32[Array, "r t"], Float32[Array, "1 t"] | None]:
    """The products of rows of the weight with the normed tokens, t = `padded_tokens`, and the norm's rate."""
    tokens, size = factors.x.shape
    found, squares = (_of_one if tokens == 1 else _of_several)(factors, rows, tile)
    if factors.scale is None:
        return found, None
    rate = lax.rsqrt(squares / size + epsilon)
    return found * rate, rate


def _of_one(factors: Factors, rows: Int32[Array, " r"], tile: Tile) -> Sums:
    """In spans of `tile.ahead` steps."""
    steps = -(-factors.x.shape[1] // tile.columns)
    if steps <= tile.ahead:
        return _of_span(factors, rows, tile, 0, steps)

    def add(number: Int32[Array, ""], sofar: Sums) -> Sums:
        found, squares = _of_span(factors, rows, tile, number * tile.ahead, tile.ahead)
        return sofar[0] + found, sofar[1] + squares

    none = jnp.zeros((rows.size, 1), jnp.float32), jnp.zeros((1, 1), jnp.float32)
    return lax.fori_loop(0, -(-steps // tile.ahead), add, none)


def _of_span(
    factors: Factors, rows: Int32[Array, " r"], tile: Tile, first: Int32[Array, ""] | int, count: int
) -> Sums:
    """The sums over `count` steps from `first` on, of one token."""
    size = factors.x.shape[1]
    steps = [(first + nth) * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)[None, :] for nth in range(count)]
    whole = isinstance(first, int) and count * tile.columns == size

    def load(ref: Ref, *index: Array) -> Shaped[Array, "r c"]:
        if whole:
            return plgpu.load(ref.at[index])
        shape = jnp.broadcast_shapes(*(its.shape for its in index))
        return plgpu.load(ref.at[index], mask=jnp.broadcast_to(index[-1] < size, shape), other=0)

    weights = [load(factors.weights, rows[:, None], step) for step in steps]
    token = jnp.zeros((1, 1), jnp.int32)
    xs = [load(factors.x, token, step).astype(jnp.float32) for step in steps]
    squares = reduce(jnp.add, (x * x for x in xs))
    if factors.scale is not None:
        xs = [x * load(factors.scale, step) for x, step in zip(xs, steps, strict=True)]
    found = reduce(jnp.add, (its.astype(jnp.float32) * x for its, x in zip(weights, xs, strict=True)))
    return jnp.sum(found, axis=1, keepdims=True), jnp.sum(squares, axis=1, keepdims=True)


def _of_several(factors: Factors, rows: Int32[Array, " r"], tile: Tile) -> Sums:
    count, size = factors.x.shape
    padded = padded_tokens(count)
    tokens = jnp.arange(padded, dtype=jnp.int32)[None, :]

    def step(number: Int32[Array, ""], sofar: Sums) -> Sums:
        found, squares = sofar
        column = number * tile.columns + jnp.arange(tile.columns, dtype=jnp.int32)
        inside = column < size
        x = plgpu.load(factors.x.at[tokens, column[:, None]], mask=inside[:, None] & (tokens < count), other=0)
        if factors.scale is not None:
            wide = x.astype(jnp.float32)
            scale = plgpu.load(factors.scale.at[column], mask=inside, other=0)
            squares += wide * wide
            x = (wide * scale[:, None]).astype(x.dtype)
        mask = jnp.broadcast_to(inside[None, :], (rows.size, tile.columns))
        weights = plgpu.load(factors.weights.at[rows[:, None], column[None, :]], mask=mask, other=0)
        return found + plgpu.dot(weights, x), squares

    none = jnp.zeros((rows.size, padded), jnp.float32), jnp.zeros((tile.columns, padded), jnp.float32)
    found, squares = lax.fori_loop(0, -(-size // tile.columns), step, none)
    return found, jnp.sum(squares, axis=0, keepdims=True)
