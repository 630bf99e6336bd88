"""Products of sorted rows with their experts' float weights, differentiable in both, and the engine for them.

Kernels for Hopper multiply them where they run, else XLA.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jmx import meshes
from jmx.guard import has_auto_axes
from jmx.pallas.sm90.tiles import TILE
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.util.typing import Array, Float, Float32, Int32
from jmx.xla import grouped_dot as xla

NAME = "float_sm90"
_REMEDY = "XLA's ragged_dot multiplies them"
_DTYPES = ("bfloat16", "float16")


def grouped_dot(
    rows: Float[Array, "R K"], weights: Float[Array, "E N K"], sizes: Int32[Array, " E"]
) -> Float32[Array, "R N"]:
    """rows (R, K) times the weights (E, N, K) of their experts, transposed -> float32 (R, N).

    On a Hopper GPU by kernels, where these support the weights (`rejection`); else by XLA.

    Args:
        rows: sorted by expert, of the weights' dtype.
        sizes: (E,), rows of each expert. Results of the rows after those of all experts are undefined.
    """
    rows, weights, sizes = meshes.varying_alike(*map(jnp.asarray, (rows, weights, sizes)))
    environment = Environment.probe(rows, weights)
    if rejection(weights.dtype, weights.shape[1:], environment) or _divided_by_xla(rows, weights):
        return xla.grouped_dot(rows, weights, sizes)
    # Importing Pallas takes a second.
    from jmx.pallas.float_sm90 import grouped

    return grouped.grouped_dot(rows, weights, sizes.astype(jnp.int32), environment.core_count or 1)


def rejection(dtype: Any, sizes: tuple[int, ...], environment: Environment) -> Rejection | None:
    """Why the kernels cannot multiply weights (E, N, K) of `dtype` and sizes (N, K); None if they can."""
    if environment.platform != "gpu":
        return Rejection(Reason.PLATFORM, f"this is {environment.platform!r}, not 'gpu'", "XLA multiplies them")
    if environment.compute_capability != (9, 0):
        detail = f"this device has {environment.compute_capability}, not (9, 0)"
        return Rejection(Reason.COMPUTE_CAPABILITY, detail, _REMEDY)
    name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        return Rejection(Reason.DTYPE, f"{name!r} is none of {', '.join(_DTYPES)}", _REMEDY)
    if any(size % TILE for size in sizes):
        return Rejection(Reason.SHAPE, f"weights of {sizes} are no multiples of {TILE}", _REMEDY)
    return None


def _divided_by_xla(*arrays: jax.Array) -> bool:
    """Whether XLA may divide arrays between devices, along Auto axes of a mesh: it would gather them for a kernel."""
    found = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return any(map(has_auto_axes, found))
