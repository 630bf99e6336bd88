"""Which products the kernels of this package take, and by which tiles of a weight."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jmx.selection.environment import Environment

CAPABILITY = (9, 0)  # of the GPUs on which they were measured
MOST_TOKENS = 8
MOST_COLUMNS = 4096  # of a weight: a token of so many is in registers, beside two tiles
MOST_BYTES = 1 << 28  # of a weight: with more, what a kernel saves around its product is nothing beside it
MOST_TILES = 8  # of a CTA that has one token: its program is written out for all of them
ALIGNMENT = 16  # elements of a row of the weight
ROWS_ALONE = 1024  # a weight with fewer rows has a CTA for each, or its tiles are too few for a GPU


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile, and how tiles are computed.

    Args:
        rows: of the weight, a power of two; for several tokens 16 or more, or 1, which needs no tensor cores.
        columns: of a step along K, a power of two.
        num_warps: of a CTA.
        num_stages: of Triton's pipeline, for tensor cores.
        most_ctas: for one token; each takes several tiles where there are more, up to `MOST_TILES`.
        splits: for tensor cores: parts of the columns, which warps multiply side by side; a power of two.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1
    most_ctas: int = 1 << 30
    splits: int = 1

    def num_ctas(self, num_tokens: int, num_tiles: int) -> int:
        """As many as have the same number of tiles, but for the last."""
        if num_tokens > 1:
            return num_tiles
        each = min(-(-num_tiles // self.most_ctas), MOST_TILES)
        return -(-num_tiles // each)


# Four CTAs an SM of 132, whose threads have 128 registers: they have the next tiles on their way.
_ONE_TOKEN = Tile(2, 1024, 4, most_ctas=528)
_SEVERAL_TOKENS = Tile(32, 64, 4, 3, splits=4)
_OF_SMALL_HEADS = Tile(16, 128, 1, 6)


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


def linear_tile(num_tokens: int, weights: tuple[int, ...]) -> Tile | None:
    """For weights of a shape (N, K); None if XLA's kernels take no longer."""
    rows, columns = weights
    if rows < ROWS_ALONE:  # several tokens are in registers, too: those of 4096 columns in twice as many threads
        return Tile(1, 1024, 8 if num_tokens > 1 and columns > 3 * 1024 else 4)
    return _ONE_TOKEN if num_tokens == 1 else None


def heads_tile(num_tokens: int, dim: int) -> Tile | None:
    """For heads of `dim` channels, all of them rotated; None if half of them are not a multiple of half a tile."""
    tiles = (_ONE_TOKEN,) if num_tokens == 1 else (_SEVERAL_TOKENS, _OF_SMALL_HEADS)
    return next((tile for tile in tiles if dim % tile.rows == 0), None)
