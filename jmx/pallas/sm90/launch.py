"""How the Hopper kernels are called, and how one kernel serves blocks of different numbers of rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl


def launch(kernel: Callable[..., Any], *operands: Any) -> Any:
    """What `kernel` gives of `operands`, none of which has 64 bits."""
    assert all(operand.dtype.itemsize <= 4 for operand in operands)
    with jax.enable_x64(False):
        return kernel(*operands)


def for_width(widths: tuple[int, ...], count: jax.Array, function: Callable[[int], None]) -> None:
    """Calls `function` with the width that holds `count` rows: once, whatever `count` is."""
    *below, last = widths
    for lower, width in zip([-1, *below], below, strict=False):
        pl.when((count > lower) & (count <= width))(partial(function, width))
    pl.when(count > (below[-1] if below else -1))(partial(function, last))
