"""The widths that kernels for Hopper are compiled for: a block of rows takes the least that holds its own."""

from collections.abc import Callable
from functools import partial

import jax
from jax.experimental import pallas as pl


def widths(block_n: int, step: int) -> tuple[int, ...]:
    """The numbers of rows that a kernel is compiled for whose blocks have at most `block_n`.

    All that tensor cores offer, up to 64. Blocks that may be larger are mostly halves and more of `block_n`, since an
    expert's rows are cut into near-equal blocks. So there, what is smaller is stepped over, which saves compilation.

    Args:
        block_n: a multiple of `step`.
        step: from one width to the next, a multiple of 8.
    """
    if block_n <= 64:
        return tuple(range(step, block_n + 1, step))
    half = block_n // 2 // step * step
    return (*range(32, half - 8, 32), *range(half, block_n, step), block_n)


def for_width(widths: tuple[int, ...], count: jax.Array, function: Callable[[int], None]) -> None:
    """Calls `function` with the width that holds `count` rows: once, whatever `count` is."""
    *below, last = widths
    for lower, width in zip([-1, *below], below, strict=False):
        pl.when((count > lower) & (count <= width))(partial(function, width))
    pl.when(count > (below[-1] if below else -1))(partial(function, last))
