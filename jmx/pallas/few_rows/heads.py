"""Queries, keys and values of few tokens by one kernel: the norm, the product, the bias, the rotation, and the cache.

A CTA has some channels of one head, and those that they are rotated with. It writes queries to an array, keys and
values to their place in the cache.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmx.pallas.few_rows import linear
from jmx.pallas.few_rows.choice import Tile
from jmx.pallas.few_rows.primitive import run
from jmx.util.typing import Array, Float, Shaped


class Operands(NamedTuple):
    """Operands of the kernel, or references to them. None: not in this call.

    Args:
        x: (T, K), of tokens of T different rows.
        scale: of a norm of x, float32 (K,).
        weights: (kv_heads * (group + 2) * D, K) of x's dtype: of each key head its queries, the key, and the value.
        bias: (kv_heads * (group + 2) * D,).
        cos, sin: float32 (T or 1, D / 2), of the tokens' positions.
        cache: (2, rows or pages, kv_heads, C, D) of x's dtype, keys and values.
        numbers: int32 (T,), the page of each token; None: each has a row of the cache.
        places: int32 (T,), its place along C; beyond the last one it is the last.
    """

    x: Any
    scale: Any
    weights: Any
    bias: Any
    cos: Any
    sin: Any
    cache: Any
    numbers: Any
    places: Any


@dataclass(frozen=True)
class Heads:
    """What is static of a call.

    Args:
        tile: sizes of a CTA's part: half of its rows are channels of the first half of a head.
        epsilon: of the norm.
        interpret: whether Pallas interprets the kernel.
    """

    tile: Tile
    epsilon: float = 0.0
    interpret: bool = False

    name = "jmx_heads"

    def num_ctas(self, given: Operands) -> int:
        return self.tile.num_ctas(len(given.x), self._num_tiles(given))

    def _num_tiles(self, given: Operands) -> int:
        return given.weights.shape[0] // self.tile.rows

    def shapes(self, given: Operands) -> list[jax.ShapeDtypeStruct]:
        _, _, kv_heads, _, dim = given.cache.shape
        heads = given.weights.shape[0] // dim - 2 * kv_heads
        query = jax.ShapeDtypeStruct((given.x.shape[0], heads, dim), given.x.dtype)
        return [query, jax.ShapeDtypeStruct(given.cache.shape, given.cache.dtype)]

    def in_place(self, given: Operands) -> dict[str, int]:
        del given
        return {"cache": 1}

    def define(self, given: Operands) -> list[Shaped[Array, "..."]]:
        x, cache = given.x, given.cache
        _, _, kv_heads, _, dim = cache.shape
        product = linear.Linear(self.tile, self.epsilon)
        (out,) = product.define(linear.Operands(x, given.scale, given.weights, given.bias, None))
        groups = out.astype(x.dtype).reshape(len(x), kv_heads, -1, dim)
        first, second = jnp.split(groups.astype(jnp.float32), 2, axis=-1)
        cos, sin = given.cos[:, None, None], given.sin[:, None, None]
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
        query, key, value = rotated[:, :, :-2], rotated[:, :, -2], groups[:, :, -1]
        new = jnp.stack([key, value], axis=1)  # (T, 2, kv_heads, D): index arrays around a slice come first
        numbers = jnp.arange(len(x)) if given.numbers is None else given.numbers
        written = cache.at[:, numbers, :, jnp.minimum(given.places, cache.shape[3] - 1)].set(new.astype(cache.dtype))
        return [query.reshape(len(x), -1, dim), written]

    def kernel(self, given: Operands, *results: Any) -> None:
        from jax.experimental.pallas import triton as plgpu

        from jmx.pallas.few_rows.tile import Factors, Work, compute_tiles, padded_tokens

        query, cache = results
        count, (_, _, kv_heads, capacity, dim) = given.x.shape[0], cache.shape
        group = given.weights.shape[0] // dim // kv_heads - 2
        pairs, half = self.tile.rows // 2, dim // 2
        parts = half // pairs  # tiles of a head
        row = jnp.arange(self.tile.rows, dtype=jnp.int32)
        tokens = jnp.arange(padded_tokens(count), dtype=jnp.int32)[None, :]
        inside = jnp.broadcast_to(tokens < count, (pairs, tokens.size))
        of_angle = tokens if given.cos.shape[0] > 1 else jnp.zeros_like(tokens)
        number = tokens
        if given.numbers is not None:
            number = plgpu.load(given.numbers.at[tokens], mask=tokens < count, other=0)
        place = jnp.minimum(plgpu.load(given.places.at[tokens], mask=tokens < count, other=0), capacity - 1)

        def rows(nth: Array) -> Array:
            return nth // parts * dim + row // pairs * half + nth % parts * pairs + row % pairs

        def channels_of(nth: Array) -> Array:
            return nth % parts * pairs + jnp.arange(pairs, dtype=jnp.int32)[:, None]

        def load(nth: Array) -> tuple[Array, Array, Array | None]:
            at = of_angle, channels_of(nth)
            cos, sin = (plgpu.load(its.at[at], mask=inside, other=0) for its in (given.cos, given.sin))
            return cos, sin, None if given.bias is None else plgpu.load(given.bias.at[rows(nth)])

        def finish(nth: Array, loaded: tuple[Array, Array, Array | None], found: Array, rate: Array | None) -> None:
            del rate
            channels, (cos, sin, bias) = channels_of(nth), loaded
            head = nth // parts
            kv_head, kind = head // (group + 2), head % (group + 2)
            if bias is not None:
                found += bias.astype(jnp.float32)[:, None]
            found = found.astype(query.dtype).astype(jnp.float32).reshape(2, pairs, tokens.size)
            which = jnp.arange(2, dtype=jnp.int32)[:, None, None]
            first, second = (jnp.sum(jnp.where(which == its, found, 0), axis=0) for its in range(2))
            rotates = kind <= group  # values are not rotated
            cos, sin = jnp.where(rotates, cos, 1.0), jnp.where(rotates, sin, 0.0)
            turned = first * cos - second * sin, second * cos + first * sin
            for values, channel in zip(turned, (channels, half + channels), strict=True):
                target = query.at[tokens, kv_head * group + jnp.minimum(kind, group - 1), channel]
                plgpu.store(target, values.astype(query.dtype), mask=inside & (kind < group))
                target = cache.at[jnp.maximum(kind - group, 0), number, kv_head, place, channel]
                plgpu.store(target, values.astype(query.dtype), mask=inside & (kind >= group))

        factors = Factors(given.x, given.scale, given.weights)
        work = Work(self._num_tiles(given), rows, load, finish)
        compute_tiles(factors, self.tile, self.epsilon, work, interpret=self.interpret)


def heads(call: Heads, given: Operands) -> tuple[Float[Array, "T heads D"], Float[Array, "2 rows kv_heads C D"]]:
    """Queries, rotated, and the cache with keys, rotated, and values."""
    query, cache = run(call, given)
    return query, cache
