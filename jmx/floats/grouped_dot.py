"""Products of sorted rows with their experts' float weights, differentiable in both, by the engine chosen here."""

import jax.numpy as jnp

from jmx import meshes
from jmx.floats.kernels import divided_by_xla, rejection
from jmx.selection.environment import Environment
from jmx.util.typing import Array, Float, Float32, Int32
from jmx.xla import grouped_dot as xla


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
    if rejection(weights.dtype, weights.shape[1:], environment) or divided_by_xla(rows, weights):
        return xla.grouped_dot(rows, weights, sizes)
    # Importing Pallas takes a second.
    from jmx.pallas.float_sm90 import grouped

    return grouped.grouped_dot(rows, weights, sizes.astype(jnp.int32), environment.core_count or 1)
