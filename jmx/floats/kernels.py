"""Where the kernels for Hopper multiply float weights, and why they do not elsewhere."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jmx.pallas.sm90.tiles import TILE
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment

NAME = "float_sm90"
_REMEDY = "XLA's ragged_dot multiplies them"
_DTYPES = ("bfloat16", "float16")


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


def divided_by_xla(*arrays: jax.Array) -> bool:
    """Whether XLA may divide arrays between devices, along Auto axes of a mesh: it would gather them for a kernel."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(array).sharding.mesh for array in arrays)]
    return any(
        kind == AxisType.Auto and mesh.shape[name] > 1
        for mesh in meshes
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )
