"""Triton kernels that move rows: their tiles, and how they are launched."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmx.util.typing import Array, Bool, Int32, Shaped

ROWS, COLUMNS = 4, 512  # of a tile
_WARPS = 4
MOST_ELEMENTS = 1 << 31  # of an array, in which Triton's indices are of 32 bits


def num_tiles(shape: tuple[int, ...]) -> tuple[int, int]:
    """Tiles of an array (R, H) along its rows and its columns."""
    rows, columns = shape
    return -(-rows // ROWS), -(-columns // COLUMNS)


def tile(
    shape: tuple[int, ...], row: Int32[Array, ""], column: Int32[Array, ""]
) -> tuple[Int32[Array, " r"], Int32[Array, "1 c"], Bool[Array, "r c"]]:
    """Rows and columns of a tile of an array (R, H), by its numbers, and which of them are inside."""
    rows = row * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    columns = (column * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32))[None, :]
    return rows, columns, (rows < shape[0])[:, None] & (columns < shape[1])


def launch(
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    grid: tuple[int, int],
    given: tuple[Shaped[Array, "..."], ...],
    name: str,
    *,
    interpret: bool,
    into_last: bool = False,
) -> list[Shaped[Array, "R H"]]:
    """The result of a kernel, whose CTAs take tiles.

    `interpret`: whether Pallas interprets it. `into_last`: whether the result is written into the last of the arrays.
    """
    # Importing Pallas takes a second.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    params: Any = plgpu.CompilerParams(num_warps=_WARPS, num_stages=1)
    call = pl.pallas_call(
        kernel,
        out_shape=[out],
        grid=grid,
        input_output_aliases={len(given) - 1: 0} if into_last else {},
        compiler_params=params,
        interpret=interpret,
        name=name,
    )
    return call(*given)
