"""The layer as a function of rows that are with their experts already."""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmx.activations import Activation
from jmx.experts import Experts
from jmx.layer import moe
from jmx.routing import NOWHERE, Routing
from jmx.selection.problem import check_x
from jmx.util.checks import check_array, check_instance
from jmx.util.typing import AnyArray, Array, Float, Integer


def batched_moe(
    x: Float[AnyArray, "E M H"],
    counts: Integer[AnyArray, " E"],
    experts: Experts,
    *,
    activation: Activation | str,
    weights: Float[AnyArray, "E M"] | None = None,
    weights_on: str = "output",
    input_format: str | None = None,
    backend: str | None = None,
) -> Float[Array, "E M H"]:
    """`y[e, i] = weights[e, i] * expert[e](x[e, i])` for i < counts[e], and 0 for the rows after those.

    For tokens that were sent to the device of their expert already, in a buffer of fixed size for each of its experts,
    as DeepEP's low-latency dispatch and vLLM's `BatchedExperts` have them. It is `moe` with one slot a row, on the same
    backends, and differentiable as that is. Rows past the counts may hold anything, also NaN. With mesh axes, call it
    inside `jax.shard_map`, with the experts of one device.

    Args:
        x: (E, M, H) bfloat16, float16 or float32; the rows of expert e are the first counts[e] of x[e].
        counts: integer (E,), each 0 to M. Traced ones are not checked; above M they count as M, below 0 as 0.
        experts: the weights of these E experts.
        activation, weights_on, input_format, backend: as of `moe`.
        weights: floating (E, M), routing weights of the rows; None: 1.

    Returns:
        (E, M, H) of x's dtype.

    Raises:
        ValueError, TypeError, NoBackendError: as `moe`, and for shapes, dtypes or counts that are not as above.
    """
    check_instance("experts", experts, Experts, "jmx.Experts")
    check_x(x, experts.hidden_size)
    if len(x.shape) != 3 or x.shape[0] != experts.num_experts:
        raise ValueError(f"`x` (shape {x.shape}) must be (E, M, H) with E = {experts.num_experts} experts")
    num_experts, rows, hidden = x.shape
    check_array("counts", counts, jnp.integer)
    if tuple(counts.shape) != (num_experts,):
        raise ValueError(f"`counts` (shape {counts.shape}) must be {(num_experts,)}, one an expert")
    if not isinstance(counts, Tracer) and not ((np.asarray(counts) >= 0) & (np.asarray(counts) <= rows)).all():
        raise ValueError(f"`counts` (={np.asarray(counts)}) must be 0 to {rows}, the rows of an expert in `x`")
    if weights is not None:
        check_array("weights", weights, jnp.floating)
        if tuple(weights.shape) != (num_experts, rows):
            raise ValueError(f"`weights` (shape {weights.shape}) must be {(num_experts, rows)}, one a row")
    filled = jnp.arange(rows)[None] < jnp.asarray(counts)[:, None]
    ids = jnp.where(filled, jnp.arange(num_experts, dtype=jnp.int32)[:, None], NOWHERE)
    weights = jnp.ones(filled.shape, jnp.float32) if weights is None else weights
    y = moe(
        x.reshape(-1, hidden),
        Routing(ids.reshape(-1, 1), weights.reshape(-1, 1)),
        experts,
        activation=activation,
        weights_on=weights_on,
        input_format=input_format,
        backend=backend,
    )
    return y.reshape(x.shape)
