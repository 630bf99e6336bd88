"""Padding of a weight's rows and columns with weights of value 0, and slicing back."""

import jax
import jax.numpy as jnp
from jax import lax

from jmx.numerics import formats
from jmx.numerics.formats import MXFP4, WHOLE_ROW, BlockScaled, Format, is_packed, logical_shape, one
from jmx.util.checks import check_shape
from jmx.util.typing import AnyArray, Array, Shaped


def pad(q: BlockScaled, shape: tuple[int, int], format: Format | str = MXFP4) -> BlockScaled:
    """Extends the last two axes (N, K) to `shape` with zero values and scales of 1.0, canonical or packed.

    Raises:
        ValueError: `shape` smaller than that of `q`, or its K not a whole number of blocks.
    """
    format = formats.get(format)
    (rows, columns), target = _resized(q, shape, format)
    if shape[0] < rows or shape[1] < columns:
        raise ValueError(f"`shape` (={tuple(shape)}) must be at least {(rows, columns)}, the weight's own")
    # e8m0 has no zero: a scale filled with zeros would be NaN.
    fills = {} if q.scales is None else {"scales": one(format, q.scales.dtype), "global_scales": 1.0}
    extended = {
        name: _extend(array, getattr(target, name).shape, fills.get(name, 0))
        for name, array in q._asdict().items()
        if array is not None
    }
    padded = q._replace(**extended)
    if padded.zero_points is not None:  # weights of value 0 are their block's zero point
        padded = padded._replace(values=_with_zeros(padded, columns, shape[1], format))
    if padded.order is not None:
        padded = padded._replace(order=jnp.where(jnp.arange(shape[1]) < columns, padded.order, jnp.arange(shape[1])))
    return padded


def _with_zeros(q: BlockScaled, first: int, columns: int, format: Format) -> Shaped[Array, "..."]:
    """The values of `q`, (..., N, `columns`), in which weights from column `first` on have the value 0."""
    assert q.zero_points is not None
    size = columns if format.block_size == WHOLE_ROW else format.block_size
    zeros = jnp.take(q.zero_points, jnp.arange(columns) // max(size, 1), axis=-1)
    inside = jnp.arange(columns) < first
    if is_packed(q) and format.element_bits == 4:
        low, high = zeros[..., ::2].astype(jnp.uint8) & 15, zeros[..., 1::2].astype(jnp.uint8) & 15
        return jnp.where(inside[::2], q.values, low | high << 4)
    return jnp.where(inside, q.values, zeros.astype(q.values.dtype))


def _resized(q: BlockScaled, shape: tuple[int, int], format: Format) -> tuple[tuple[int, int], BlockScaled]:
    """N and K of `q`, and its arrays (`jax.ShapeDtypeStruct`) if these become `shape`.

    Raises:
        ValueError: `q` has no axis N, or the K of `shape` is not a whole number of blocks.
    """
    present = logical_shape(q, format)
    if len(present) < 2:
        raise ValueError(f"`q.values` (shape {q.values.shape}) must be (..., N, K)")
    check_shape("shape", shape, 2)
    scale_dtype = format.scale_dtype if q.scales is None or q.scales.dtype == jnp.uint8 else q.scales.dtype
    target = format.abstract((*present[:-2], *shape), packed=is_packed(q), scale_dtype=scale_dtype)
    return (present[-2], present[-1]), target


def _extend(array: Shaped[AnyArray, "..."], shape: tuple[int, ...], fill: float) -> Shaped[Array, "..."]:
    widths = [(0, new - old, 0) for old, new in zip(array.shape, shape, strict=True)]
    return lax.pad(array, jnp.array(fill, array.dtype), widths)


def unpad(q: BlockScaled, shape: tuple[int, int], format: Format | str = MXFP4) -> BlockScaled:
    """Slices the last two axes to `shape` (N, K), the inverse of `pad`.

    Raises:
        ValueError: `shape` larger than that of `q`, or its K not a whole number of blocks.
    """
    format = formats.get(format)
    (rows, columns), target = _resized(q, shape, format)
    if shape[0] > rows or shape[1] > columns:
        raise ValueError(f"`shape` (={tuple(shape)}) must be at most {(rows, columns)}, the weight's own")
    return jax.tree.map(lambda array, t: lax.slice(array, [0] * array.ndim, t.shape), q, target)
