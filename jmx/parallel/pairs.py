"""`gather` over two devices with many tokens: they swap tokens, and then results, by collective-permutes.

One device has one other to send to, so an all-gather and a reduce-scatter are each one permute and what is its own. XLA
has copy engines do permutes within a process if `xla_gpu_collective_permute_mode` is `peer`, which send faster than
NCCL's kernels. A device's own tokens are its first ones, so that what is sent is in one piece.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jmx import meshes
from jmx.engines.grouped import Terms
from jmx.meshes import Names
from jmx.pallas import own_rows
from jmx.parallel.exchange import Call
from jmx.util.typing import Array, Float, Shaped

# Bytes of a device's tokens from which permutes are as fast as the other collectives, also by NCCL.
LEAST_BYTES = 16 << 20


def applies(call: Call) -> bool:
    """Whether two devices exchange so many tokens, at once."""
    bytes_of_tokens = call.num_tokens * call.hidden_size * call.itemsize
    return call.num_ranks == 2 and call.chunks == 1 and bytes_of_tokens >= LEAST_BYTES


def both(arrays: tuple[Shaped[Array, "T _"], ...], axes: Names) -> list[Shaped[Array, "nT _"]]:
    """Rows of this device, and those of the other one behind them; the first array is the largest."""
    x, *others = arrays
    # Without the barrier XLA would copy all tokens after the others arrived, not its own while they are sent.
    space = lax.optimization_barrier(jnp.pad(x, ((0, len(x)), (0, 0))))
    tokens = lax.dynamic_update_slice(space, _swapped(x, axes), (len(x), 0))
    return [tokens, *(jnp.concatenate([array, _swapped(array, axes)]) for array in others)]


def returned(call: Call, results: Float[Array, "nT H"] | Terms, dtype: Any) -> Float[Array, "T H"]:
    """The sums over both devices of this one's results, which are the first of `results`.

    The other device's are computed first, and this one's while those are sent.
    """
    theirs, results = lax.optimization_barrier((_part(call, results, 1, dtype), results))
    arrived = _swapped(theirs, call.axes)
    own, arrived = lax.optimization_barrier((_part(call, results, 0, dtype), arrived))
    return (own.astype(jnp.float32) + arrived.astype(jnp.float32)).astype(dtype)


def _swapped(array: Shaped[Array, "T n"], axes: Names) -> Shaped[Array, "T n"]:
    return lax.ppermute(array, axes, ((0, 1), (1, 0)))


def _part(call: Call, results: Float[Array, "nT H"] | Terms, rank: int, dtype: Any) -> Float[Array, "T H"]:
    """The results of one device's tokens."""
    tokens = slice(rank * call.num_tokens, (rank + 1) * call.num_tokens)
    if not isinstance(results, Terms):
        return results[tokens]
    rows, row_of, weights = results
    chosen = (row_of[tokens],) if weights is None else (row_of[tokens], weights[tokens])
    arrays = meshes.varying_alike(rows[..., : call.hidden_size], *chosen)
    return meshes.unchecked(partial(own_rows.sums, dtype))(*arrays)
