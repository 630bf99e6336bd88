"""Values of weights: the definition of every format, in numpy and float64, which shares no code with jmx."""

import jax.numpy as jnp
import numpy as np

from jmx.numerics.formats import WHOLE_ROW, BlockScaled, Format

# Of the formats beyond MXFP4, one of each kind of arrays.
KINDS = [
    "nvfp4",
    "mxfp8",
    "mxint4",
    "int4_g128_order",
    "int4_g32_asym",
    "int8_channel_asym",
    "int8_g64_asym_order",
    "fp8_channel",
    "fp8_block",
    "bfloat16",
]


def by_column(blocks: np.ndarray, format: Format, columns: int) -> np.ndarray:
    """For each column, the value of its block."""
    size = columns if format.block_size == WHOLE_ROW else format.block_size
    return np.repeat(blocks, size, axis=-1)[..., :columns]


def dequantized(q: BlockScaled, format: Format) -> np.ndarray:
    """A canonical host weight, columns in the order of inputs."""
    values = q.values.astype(np.float64)
    if format.is_float:
        return values
    columns = values.shape[-1]
    if q.zero_points is not None:
        values -= by_column(q.zero_points.astype(np.float64), format, columns)
    values *= by_column(q.scales.astype(np.float64), format, columns)
    if q.global_scales is not None:
        values *= q.global_scales.astype(np.float64)[..., None]
    if q.order is not None:
        places = np.broadcast_to(np.asarray(q.order, np.int64)[..., None, :], values.shape)
        stored, values = values, np.empty_like(values)
        np.put_along_axis(values, places, stored, axis=-1)
    return values


def with_odd_scales(rng: np.random.Generator, q: BlockScaled) -> BlockScaled:
    """A packed weight with scales that are no powers of two, where its format has such."""
    if q.scales is not None and q.scales.dtype != jnp.uint8:
        odd = rng.uniform(0.5, 1, q.scales.shape)
        q = q._replace(scales=(q.scales.astype(jnp.float32) * odd).astype(q.scales.dtype))
    if q.global_scales is not None:
        odd = rng.uniform(0.5, 1, q.global_scales.shape)
        q = q._replace(global_scales=(q.global_scales * odd).astype(jnp.float32))
    return q
