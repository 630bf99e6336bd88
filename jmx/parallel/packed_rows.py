"""Rows of several arrays in one collective: few bytes take less time packed than in a collective an array."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from jmx.util.typing import Array, Shaped, UInt

# Bytes of the first array up to which the others are sent with it, in one collective: above, packing them takes longer
# than starting another two.
PACKED_BYTES = 1 << 20


def together(
    collective: Callable[[Shaped[Array, "n m"]], Shaped[Array, "N m"]], arrays: Sequence[Shaped[Array, "n _"]]
) -> list[Shaped[Array, "N _"]]:
    """`collective` of each array, whose rows it moves unchanged: one call with all of them if they are small.

    Args:
        collective: of rows of any unsigned integers or floats.
        arrays: rows (n, ...) of n tokens; the first is the largest.
    """
    lane = min(array.dtype.itemsize for array in arrays)
    if arrays[0].size * arrays[0].dtype.itemsize > PACKED_BYTES or lane < 2:
        return [collective(array) for array in arrays]
    packed = [_lanes(array, lane) for array in arrays]
    moved = collective(jnp.concatenate(packed, axis=1))
    ends = [sum(part.shape[1] for part in packed[: i + 1]) for i in range(len(packed) - 1)]
    parts = jnp.split(moved, ends, axis=1)
    return [_from_lanes(part, array) for part, array in zip(parts, arrays, strict=True)]


def _lanes(array: Shaped[Array, "T n"], size: int) -> UInt[Array, "T m"]:
    """The bits of each row, as unsigned integers of `size` bytes."""
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * size}")).reshape(array.shape[0], -1)


def _from_lanes(lanes: UInt[Array, "T m"], like: Shaped[Array, "t n"]) -> Shaped[Array, "T n"]:
    """Rows of the dtype of `like` from their bits."""
    each = like.dtype.itemsize // lanes.dtype.itemsize
    rows = lanes if each == 1 else lanes.reshape(lanes.shape[0], -1, each)
    return lax.bitcast_convert_type(rows, like.dtype)
