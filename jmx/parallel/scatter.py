"""This device's rows of a sum over devices, by a kernel of `peer`, with its gradient."""

from functools import partial
from typing import Any

import jax
from jax import lax

from jmx.ffi.peer import collectives
from jmx.meshes import Names
from jmx.util.typing import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scattered(axes: Names, lines: bool, rows: Float[Array, "nT H"]) -> Float[Array, "T H"]:
    """The sum over devices along `axes`, in their order and in float32. `lines`: whether few rows are sent as lines."""
    return collectives.reduce_scatter(rows, axes, lines)


def _scattered_fwd(axes: Names, lines: bool, rows: Any) -> tuple[Any, None]:
    return scattered(axes, lines, rows), None


def _scattered_bwd(axes: Names, lines: bool, _: None, cotangent: Any) -> tuple[Any]:
    del lines
    return (lax.all_gather(cotangent, axes, tiled=True),)


scattered.defvjp(_scattered_fwd, _scattered_bwd)
