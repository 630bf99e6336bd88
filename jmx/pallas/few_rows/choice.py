"""Which products the kernels of this package take, and by which tiles."""

import jax
import jax.numpy as jnp

from jmx.pallas.few_rows.tile import Tile
from jmx.selection.environment import Environment

CAPABILITY = (9, 0)  # of the GPUs on which they were measured
MOST_TOKENS = 8
MOST_BYTES = 1 << 28  # of a weight: with more, what a kernel saves around its product is nothing beside it
ALIGNMENT = 16  # elements of a row of the weight


def reject_reason(
    num_tokens: int, dtype: jax.typing.DTypeLike, weights: tuple[int, ...], environment: Environment
) -> str | None:
    """Why the kernels do not multiply tokens of `dtype` by weights of a shape (N, K) of that dtype; None if they do."""
    if environment.compute_capability != CAPABILITY:
        capability = environment.compute_capability
        this = environment.platform if capability is None else ".".join(map(str, capability))
        return f"needs a GPU of compute capability 9.0 (this is {this})"
    if dtype != jnp.bfloat16:
        return f"`dtype` (={jnp.dtype(dtype).name}) must be bfloat16"
    if not 1 <= num_tokens <= MOST_TOKENS:
        return f"the number of tokens (={num_tokens}) must be at most {MOST_TOKENS}"
    rows, columns = weights
    if columns % ALIGNMENT:
        return f"columns of the weights (={columns}) must be a multiple of {ALIGNMENT}"
    if rows * columns * jnp.dtype(dtype).itemsize > MOST_BYTES:
        return f"weights (of {rows} x {columns}) must have at most {MOST_BYTES} bytes"
    return None


def linear_tile(num_tokens: int, rows: int) -> Tile:
    """For a weight of so many rows."""
    if num_tokens == 1:
        return Tile(1, 1024, 4) if rows < 1024 else Tile(8, 1024, 8)
    return Tile(16, 256, 4, 4) if rows < 1024 else Tile(32, 128, 4, 4)


def heads_tile(num_tokens: int, dim: int) -> Tile | None:
    """For heads of `dim` channels, all of them rotated; None if half of them are not a multiple of half a tile."""
    tile = Tile(8, 1024, 8) if num_tokens == 1 else Tile(32, 128, 4, 4)
    return None if dim % tile.rows else tile
