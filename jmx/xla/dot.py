"""Products of activations with block-scaled weights, as XLA compiles them well.

`expanded` makes floats of the weights and takes an ordinary product: for many rows. `fused` never does: it decodes,
multiplies and sums in one pass over the bytes, which for a row or a few is several times as fast.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.numerics import element_codes, quantization
from jmx.numerics.formats import BlockScaled, Format

Array = jax.Array

_ROWS = 4  # weight rows that share one pass over the activations


def expanded(a: Array, q: BlockScaled, format: Format, dtype: Any, *, transposed: bool = False) -> Array:
    """a (C, M, K) times the packed weights q (C, N, K), or for `transposed` a (C, M, N) -> float32 (C, M, N or K).

    Weights are expanded to `dtype` (see `quantization.expand`) and `a` is cast to it; float32 products are at
    `Precision.HIGHEST`.
    """
    weights, factors = quantization.expand(q, dtype, format)
    if transposed and factors is not None:
        a = a.astype(jnp.float32) * factors[:, None]
    if not transposed and q.order is not None:
        # Behind a barrier: XLA on CPUs has no product of bfloat16 where a gather of several matrices stands before it.
        a = lax.optimization_barrier(jnp.take_along_axis(a, q.order[:, None], axis=-1))
    out = lax.dot_general(
        a.astype(dtype),
        weights,
        (((2,), (1 if transposed else 2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if transposed and q.order is not None:
        return jnp.take_along_axis(out, jnp.argsort(q.order)[:, None], axis=-1)
    return out if transposed or factors is None else out * factors[:, None]


def words(q: BlockScaled) -> BlockScaled:
    """Packed weights with their values as 16-bit words (..., K / 4). On a GPU, a bitcast of arrays at rest."""
    pairs = q.values.reshape(*q.values.shape[:-1], -1, 2)
    return BlockScaled(lax.bitcast_convert_type(pairs, jnp.uint16), q.scales)


def fused(a: Array, q: BlockScaled) -> Array:
    """a (C, K) times the weights q (values (C, N, bytes or `words`), scales (C, N, blocks)) -> float32 (C, N).

    N must be a multiple of 4. Products and sums are float32. One variadic reduction sums several weight rows, so that
    each activation is loaded once for all of them; XLA's GPU compiler fuses all that precedes it, a gather included.
    """
    count, rows, blocks = q.scales.shape
    codes_per_word = 2 * q.values.dtype.itemsize
    block_words = q.values.shape[-1] // blocks
    values = q.values.reshape(count, _ROWS, rows // _ROWS, blocks, block_words)
    scales = q.scales.reshape(count, _ROWS, rows // _ROWS, blocks, 1)
    a = a.astype(jnp.float32).reshape(count, 1, blocks, block_words, codes_per_word)
    a, unit = lax.optimization_barrier(a), element_codes.unit()  # converted once, not once a weight row
    sums = []
    for row in range(_ROWS):
        products = [element_codes.element(values[:, row], i, unit) * a[..., i] for i in range(codes_per_word)]
        sums.append(element_codes.scaled(sum(products[1:], products[0]), scales[:, row]))
    zeros = (jnp.float32(0),) * _ROWS
    totals = lax.reduce(tuple(sums), zeros, lambda x, y: tuple(i + j for i, j in zip(x, y, strict=True)), (2, 3))
    return jnp.stack(totals, axis=1).reshape(count, rows)
