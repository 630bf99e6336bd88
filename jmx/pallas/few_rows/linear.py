"""norm(x) W^T + b, and what is added to it, by one kernel: for few tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmx.pallas.few_rows.choice import Tile
from jmx.pallas.few_rows.primitive import run
from jmx.util.typing import Array, Float, Shaped


class Operands(NamedTuple):
    """Operands of the kernel, or references to them. None: not in this call.

    Args:
        x: (T, K).
        scale: of a norm of x, float32 (K,).
        weights: (N, K) of x's dtype.
        bias: (N,).
        residual: (T, N), added after the sum was rounded to its dtype.
    """

    x: Any
    scale: Any
    weights: Any
    bias: Any
    residual: Any


@dataclass(frozen=True)
class Linear:
    """What is static of a call.

    Args:
        tile: sizes of a CTA's part.
        epsilon: of the norm.
        normed: whether norm(x) is a result, too.
        interpret: whether Pallas interprets the kernel.
    """

    tile: Tile
    epsilon: float = 0.0
    normed: bool = False
    interpret: bool = False

    name = "jmx_linear"

    def num_ctas(self, given: Operands) -> int:
        return self.tile.num_ctas(len(given.x), self._num_tiles(given))

    def _num_tiles(self, given: Operands) -> int:
        return -(-given.weights.shape[0] // self.tile.rows)

    def shapes(self, given: Operands) -> list[jax.ShapeDtypeStruct]:
        dtype = jnp.float32 if given.residual is None else given.residual.dtype
        out = jax.ShapeDtypeStruct((given.x.shape[0], given.weights.shape[0]), dtype)
        return [out, jax.ShapeDtypeStruct(given.x.shape, given.x.dtype)] if self.normed else [out]

    def in_place(self, given: Operands) -> dict[str, int]:
        del given
        return {}

    def define(self, given: Operands) -> list[Shaped[Array, "..."]]:
        x = given.x
        if given.scale is not None:
            wide = x.astype(jnp.float32)
            rate = lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.epsilon)
            x = (wide * given.scale * rate).astype(x.dtype)
        out = jnp.einsum("ti,oi->to", x, given.weights, preferred_element_type=jnp.float32)
        if given.bias is not None:
            out += given.bias.astype(jnp.float32)
        if given.residual is not None:
            out = given.residual + out.astype(given.residual.dtype)
        return [out, x] if self.normed else [out]

    def kernel(self, given: Operands, *results: Any) -> None:
        from jax.experimental.pallas import triton as plgpu

        from jmx.pallas.few_rows.tile import Factors, Work, compute_tiles, padded_tokens

        count, num_rows = given.x.shape[0], given.weights.shape[0]
        tokens = jnp.arange(padded_tokens(count), dtype=jnp.int32)[None, :]

        def rows(nth: Array) -> Array:
            return jnp.minimum(nth * self.tile.rows + jnp.arange(self.tile.rows, dtype=jnp.int32), num_rows - 1)

        def place(nth: Array) -> tuple[Array, Array]:
            row = (nth * self.tile.rows + jnp.arange(self.tile.rows, dtype=jnp.int32))[:, None]
            return row, (tokens < count) & (row < num_rows)

        def load(nth: Array) -> tuple[Array | None, Array | None]:
            row, inside = place(nth)
            bias = None if given.bias is None else plgpu.load(given.bias.at[row], mask=row < num_rows, other=0)
            if given.residual is None:
                return bias, None
            return bias, plgpu.load(given.residual.at[tokens, row], mask=inside, other=0)

        def finish(nth: Array, loaded: tuple[Array | None, Array | None], out: Array, rate: Array | None) -> None:
            row, inside = place(nth)
            bias, before = loaded
            if bias is not None:
                out += bias.astype(jnp.float32)
            if before is not None:
                out = before.astype(jnp.float32) + out.astype(before.dtype).astype(jnp.float32)
            plgpu.store(results[0].at[tokens, row], out.astype(results[0].dtype), mask=inside)
            if self.normed:
                self._store_normed(given, results[1], nth, tokens, rate)

        factors = Factors(given.x, given.scale, given.weights)
        work = Work(self._num_tiles(given), rows, load, finish)
        compute_tiles(factors, self.tile, self.epsilon, work, interpret=self.interpret)

    def _store_normed(self, given: Operands, result: Any, nth: Array, tokens: Array, rate: Any) -> None:
        """The n-th tile's columns of norm(x)."""
        from jax.experimental.pallas import triton as plgpu

        count, size = given.x.shape
        share = -(-size // self._num_tiles(given))
        columns = nth * share + jnp.arange(1 << (share - 1).bit_length(), dtype=jnp.int32)
        inside = (columns < jnp.minimum((nth + 1) * share, size))[:, None]
        here = inside & (tokens < count)
        x = plgpu.load(given.x.at[tokens, columns[:, None]], mask=here, other=0).astype(jnp.float32)
        scale = plgpu.load(given.scale.at[columns[:, None]], mask=inside, other=0)
        plgpu.store(result.at[tokens, columns[:, None]], (x * scale * rate).astype(result.dtype), mask=here)


def linear(call: Linear, given: Operands) -> tuple[Float[Array, "T N"], Float[Array, "T K"] | None]:
    """norm(x) W^T + b: float32, or of the residual's dtype with that added; and norm(x), if the call has it."""
    out, *normed = run(call, given)
    return out, normed[0] if normed else None
