"""Chunks of `peer`: copy engines send one, and the results of another, while the experts compute a third.

Kernels send what nothing hides, the tokens of the first chunk and the results of the last one, which are half as large
as the others.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.ffi.peer import collectives, copies
from jmx.ffi.peer.needed import all_gather as all_gather_needed
from jmx.ffi.peer.needed import reduce_scatter as reduce_scatter_needed
from jmx.parallel import needed
from jmx.parallel.chunks import INNER, bounds_with_small_ends, in_chunks
from jmx.parallel.exchange import Call, Local
from jmx.parallel.gather import gathered
from jmx.parallel.scatter import scattered
from jmx.parallel.wire import Coded
from jmx.routing import Routing
from jmx.util.primals import differentiate_as
from jmx.util.typing import Array, Float, Int32, Shaped


def fault(num_tokens: int, chunks: int) -> str | None:
    """Why a device's tokens cannot go in so many chunks, and the remedy; None if they can."""
    if num_tokens >= INNER * (chunks - 2) + 2:
        return None
    return f"{num_tokens} tokens of a device are not {chunks} chunks, of which two are smaller: pass a smaller `chunks`"


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def overlapped(
    call: Call, local: Local, x: Float[Array, "T H"], routing: Routing, arrays: Any, firsts: Int32[Array, " R"]
) -> Float[Array, "T H"]:
    """The results of this device's tokens, inside `jax.shard_map`. `firsts`: the first expert of each device.

    Where it is differentiated nothing overlaps: a chunk is sent after another one was multiplied.
    """
    bounds = bounds_with_small_ends(len(x), call.chunks)
    encoded = x if call.wire is None else call.wire.encode(x)
    second, ranks = bounds[0][1], None
    if needed.applies(call, second):
        chosen = needed.chosen_of(call)
        (rows, ids, weights), ranks = all_gather_needed((encoded, *routing), firsts, call.axes, chosen, second)
    else:  # a slice in front of the kernel would be a part of its launch, which XLA then does twice
        first = lax.optimization_barrier(encoded[:second])
        rows, ids, weights = collectives.all_gather((first, *routing), call.axes)
    # Links send the first chunk, which is waited for, before the second.
    encoded, rows = lax.optimization_barrier((encoded, rows))
    everyones = _of_chunks(Routing(ids, weights), call.num_ranks, bounds)
    returning, returned = None, []
    for routing, after in zip(everyones, [*bounds[1:], None], strict=True):
        coming = None if after is None else copies.start(encoded, call.axes, after)
        # What is sent begins before the experts compute, and is not waited for before they have.
        rows, coming, returning = lax.optimization_barrier((rows, coming, returning))
        tokens = rows if call.wire is None else call.wire.decode(rows, x.dtype)
        results = local(arrays, tokens, routing)
        results, coming, returning = lax.optimization_barrier((results, coming, returning))
        if returning is not None:
            returned.append(_sum(copies.finish(returning), call.num_ranks))
        if coming is None and ranks is not None:
            returned.append(reduce_scatter_needed(results, ranks, call.axes))
        elif coming is None:
            returned.append(collectives.reduce_scatter(results, call.axes))
        else:
            rows = copies.finish(coming)
            returning = copies.start(results, call.axes, None)
    return jnp.concatenate(returned)


def _of_chunks(everyones: Routing, num_ranks: int, bounds: list[tuple[int, int]]) -> list[Routing]:
    """The routing of all ranks' tokens, by chunk."""

    def part(array: Shaped[Array, "nT k"], begin: int, end: int) -> Shaped[Array, "nt k"]:
        by_rank = array.reshape(num_ranks, -1, array.shape[1])
        return by_rank[:, begin:end].reshape(-1, array.shape[1])

    return [Routing(*(part(array, *its) for array in everyones)) for its in bounds]


def _sum(parts: Float[Array, "nt H"], num_ranks: int) -> Float[Array, "t H"]:
    """Of what the ranks return for each token, in float32 and in their order, as the kernel that adds results."""
    first, *others = jnp.split(parts, num_ranks)
    total = first.astype(jnp.float32)
    for part in others:
        total += part.astype(jnp.float32)
    return total.astype(parts.dtype)


def _in_steps(call: Call, local: Local, x: Any, routing: Routing, arrays: Any, _: Any) -> Float[Array, "T H"]:
    """`overlapped`, differentiable."""
    send: Any = partial(gathered, Coded(call.wire, collectives.all_gather), call.axes)
    return in_chunks(call.chunks, send, partial(local, arrays), partial(scattered, call.axes, False), x, routing)


differentiate_as(overlapped, _in_steps)
