"""Products of activations with block-scaled weights, in forms that XLA compiles well.

`dequantized_dot` dequantizes the weights and calls an ordinary product: for many rows. `fused_dot` decodes, multiplies
and sums in one pass over the bytes, which for one row or a few is several times as fast.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jmx.numerics import element_codes, quantization
from jmx.numerics.formats import BlockScaled, Format, precision
from jmx.util.typing import Array, Float, Float32

_ROWS = 4  # weight rows that share one pass over the activations


def dequantized_dot(
    a: Float[Array, "C M in"], q: BlockScaled, format: Format, dtype: Any, *, transposed: bool = False
) -> Float32[Array, "C M out"]:
    """a (C, M, K) times the packed weights q (C, N, K), or if `transposed` a (C, M, N) -> float32 (C, M, N or K).

    Weights are expanded to `dtype` (see `quantization.expand`) and `a` is cast to it; float32 products are at
    `Precision.HIGHEST`.
    """
    weights, factors = quantization.expand(q, dtype, format)
    if transposed and factors is not None:
        a = a.astype(jnp.float32) * factors[:, None]
    if not transposed and q.order is not None:
        # XLA on CPUs has no product of bfloat16 with a fused gather of several matrices, hence the barrier.
        a = lax.optimization_barrier(jnp.take_along_axis(a, q.order[:, None], axis=-1))
    out = lax.dot_general(
        a.astype(dtype),
        weights,
        (((2,), (1 if transposed else 2,)), ((0,), (0,))),
        precision=precision(dtype),
        preferred_element_type=jnp.float32,
    )
    if transposed and q.order is not None:
        return jnp.take_along_axis(out, jnp.argsort(q.order)[:, None], axis=-1)
    return out if transposed or factors is None else out * factors[:, None]


def outer(dout: Float[Array, "C M N"], a: Float[Array, "C M K"], dtype: Any) -> Float32[Array, "C N K"]:
    """The gradient of the weights (C, N, K) of products, by those of their results and their inputs, cast to `dtype`.

    Sums are float32; float32 products are at `Precision.HIGHEST`.
    """
    return lax.dot_general(
        dout.astype(dtype),
        a.astype(dtype),
        (((1,), (1,)), ((0,), (0,))),
        precision=precision(dtype),
        preferred_element_type=jnp.float32,
    )


def as_words(q: BlockScaled) -> BlockScaled:
    """Packed weights with their values as 16-bit words (..., K / 4). On a GPU, a bitcast of arrays in memory."""
    pairs = q.values.reshape(*q.values.shape[:-1], -1, 2)
    return BlockScaled(lax.bitcast_convert_type(pairs, jnp.uint16), q.scales)


def fused_dot(a: Float[Array, "C K"], q: BlockScaled) -> Float32[Array, "C N"]:
    """a (C, K) times MXFP4 weights q (values (C, N, bytes or words), scales (C, N, blocks)) -> float32 (C, N).

    N must be a multiple of 4. Products and sums are float32. One variadic reduction sums several weight rows, so that
    each activation is loaded once for all of them; XLA's GPU compiler fuses everything before it, gathers included.
    """
    count, rows, blocks = q.scales.shape
    codes_per_word = 2 * q.values.dtype.itemsize
    block_words = q.values.shape[-1] // blocks
    values = q.values.reshape(count, _ROWS, rows // _ROWS, blocks, block_words)
    scales = q.scales.reshape(count, _ROWS, rows // _ROWS, blocks, 1)
    a = a.astype(jnp.float32).reshape(count, 1, blocks, block_words, codes_per_word)
    a, unit = lax.optimization_barrier(a), element_codes.unit()  # converted once, not for each weight row
    sums = []
    for row in range(_ROWS):
        products = [element_codes.element(values[:, row], i, unit) * a[..., i] for i in range(codes_per_word)]
        sums.append(element_codes.scaled(sum(products[1:], products[0]), scales[:, row]))
    zeros = (jnp.float32(0),) * _ROWS
    totals = lax.reduce(tuple(sums), zeros, lambda x, y: tuple(i + j for i, j in zip(x, y, strict=True)), (2, 3))
    return jnp.stack(totals, axis=1).reshape(count, rows)
