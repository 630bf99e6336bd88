"""Products of a tile of a weight's rows with all tokens, which every kernel of this package begins with.

One token is multiplied without tensor cores: a CTA loads its whole tile of the weight into registers, before the first
of it is needed, so that memory is never idle. Several tokens are columns of a tensor core's product, whose steps along
K Triton's pipeline loads ahead.

The norm's scale multiplies x, and its rate, which is known after the last column, multiplies the sums.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from jmx.util.typing import Array, Float32, Int32, Shaped

Ref = Any


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile, and how it is computed.

    Args:
        rows: of the weight, a power of two; 16 or more for several tokens.
        columns: of a step along K, a power of two.
        num_warps: of a CTA.
        num_stages: of Triton's pipeline, for several tokens.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1


class Operands(NamedTuple):
    """References to x (T, K), to a norm's scale, float32 (K,), or None, and to the weight (N, K)."""

    x: Ref
    scale: Ref | None
    weights: Ref


def padded_tokens(num_tokens: int) -> int:
    """Columns of the sums: a tensor core multiplies 8 at a time."""
    return 1 if num_tokens == 1 else -(-num_tokens // 8) * 8


def sums(
    operands: Operands, rows: list[Int32[Array, " r"]], columns: int, epsilon: float | None
) -> list[Float32[Array, "r t"]]:
    """The products of rows of the weight with the normed tokens, t = `padded_tokens`."""
    tokens, size = operands.x.shape[0], operands.weights.shape[1]
    found, squares = (_of_one if tokens == 1 else _of_several)(operands, rows, columns)
    if epsilon is None:
        return found
    rate = lax.rsqrt(squares / size + epsilon)
    return [its * rate for its in found]


def _of_one(
    operands: Operands, rows: list[Int32[Array, " r"]], columns: int
) -> tuple[list[Float32[Array, "r 1"]], Float32[Array, "1 1"]]:
    size = operands.weights.shape[1]
    steps = [start + jnp.arange(columns, dtype=jnp.int32)[None, :] for start in range(0, size, columns)]

    def load(ref: Ref, *index: Array) -> Shaped[Array, "r c"]:
        inside = index[-1] < size
        whole = steps[-1].shape[1] * len(steps) == size
        mask = None if whole else jnp.broadcast_to(inside, jnp.broadcast_shapes(*(its.shape for its in index)))
        return plgpu.load(ref.at[index], mask=mask, other=None if whole else 0)

    weights = [[load(operands.weights, its[:, None], step) for its in rows] for step in steps]
    token = jnp.zeros((1, 1), jnp.int32)
    xs = [load(operands.x, token, step).astype(jnp.float32) for step in steps]
    squares = reduce(jnp.add, (x * x for x in xs))
    if operands.scale is not None:
        xs = [x * load(operands.scale, step) for x, step in zip(xs, steps, strict=True)]
    total = partial(jnp.sum, axis=1, keepdims=True)
    found = [
        total(reduce(jnp.add, (its[part].astype(jnp.float32) * x for its, x in zip(weights, xs, strict=True))))
        for part in range(len(rows))
    ]
    return found, total(squares)


def _of_several(
    operands: Operands, rows: list[Int32[Array, " r"]], columns: int
) -> tuple[list[Float32[Array, "r t"]], Float32[Array, "1 t"]]:
    count, size = operands.x.shape[0], operands.weights.shape[1]
    padded = padded_tokens(count)
    tokens = jnp.arange(padded, dtype=jnp.int32)[None, :]

    def step(number: Int32[Array, ""], carry: Any) -> Any:
        found, squares = carry
        column = number * columns + jnp.arange(columns, dtype=jnp.int32)
        inside = column < size
        here = inside[:, None] & (tokens < count)
        x = plgpu.load(operands.x.at[tokens, column[:, None]], mask=here, other=0)
        if operands.scale is not None:
            wide = x.astype(jnp.float32)
            scale = plgpu.load(operands.scale.at[column], mask=inside, other=0)
            squares += wide * wide
            x = (wide * scale[:, None]).astype(x.dtype)
        parts = []
        for its, sofar in zip(rows, found, strict=True):
            mask = jnp.broadcast_to(inside[None, :], (its.size, columns))
            weight = plgpu.load(operands.weights.at[its[:, None], column[None, :]], mask=mask, other=0)
            parts.append(sofar + plgpu.dot(weight, x))
        return parts, squares

    none = [jnp.zeros((its.size, padded), jnp.float32) for its in rows], jnp.zeros((columns, padded), jnp.float32)
    found, squares = lax.fori_loop(0, -(-size // columns), step, none)
    return found, jnp.sum(squares, axis=0, keepdims=True)
