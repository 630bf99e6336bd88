"""Which products the kernels of this package take, and by which tiles."""

import jax
import jax.numpy as jnp

from jmx.pallas.few_rows.config import Tile
from jmx.selection.environment import Environment

CAPABILITY = (9, 0)  # of the GPUs on which they were measured
MOST_TOKENS = 8
MOST_COLUMNS = 4096  # of a weight: a token of so many is in registers, beside two tiles
MOST_BYTES = 1 << 28  # of a weight: with more, what a kernel saves around its product is nothing beside it
ALIGNMENT = 16  # elements of a row of the weight
ROWS_ALONE = 1024  # a weight with fewer rows has a CTA for each, or its tiles are too few for a GPU


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
    if columns % ALIGNMENT or columns > MOST_COLUMNS:
        return f"columns of the weights (={columns}) must be a multiple of {ALIGNMENT} and at most {MOST_COLUMNS}"
    if rows * columns * jnp.dtype(dtype).itemsize > MOST_BYTES:
        return f"weights (of {rows} x {columns}) must have at most {MOST_BYTES} bytes"
    return None


def linear_tile(num_tokens: int, rows: int) -> Tile | None:
    """For a weight of so many rows; None if XLA's kernels take no longer."""
    if rows < ROWS_ALONE:
        return Tile(1, 1024, 4)
    return _ONE_TOKEN if num_tokens == 1 else None


def heads_tile(num_tokens: int, dim: int) -> Tile | None:
    """For heads of `dim` channels, all of them rotated; None if half of them are not a multiple of half a tile."""
    tile = _ONE_TOKEN if num_tokens == 1 else Tile(16, 128, 1, 6)
    return None if dim % tile.rows else tile


_ONE_TOKEN = Tile(2, 1024, 4, most_ctas=528)
