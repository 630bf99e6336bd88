"""Chunks: the tokens of a device go through an exchange in parts, so that one is sent while another is multiplied.

Collectives of one part do not depend on products of another. Whether they overlap is up to XLA's scheduler.
"""

from collections.abc import Callable
from itertools import accumulate, pairwise

import jax.numpy as jnp
from jax import lax

from jmx.routing import Routing
from jmx.util.typing import Array, Float

INNER = 2

# Gathers a chunk's tokens and routing for all devices; what the experts add to them; results of this device's tokens.
Send = Callable[[Float[Array, "t H"], Routing], tuple[Float[Array, "nt H"], Routing]]
Compute = Callable[[Float[Array, "nt H"], Routing], Float[Array, "nt H"]]
Return = Callable[[Float[Array, "nt H"]], Float[Array, "t H"]]


def sizes(num_tokens: int, chunks: int) -> list[int]:
    """The numbers of tokens of the chunks, which differ by one at most, the larger ones first."""
    each, larger = divmod(num_tokens, chunks)
    return [each + (index < larger) for index in range(chunks)]


def bounds_with_small_ends(num_tokens: int, chunks: int) -> list[tuple[int, int]]:
    """The first token of each of some chunks, and the one after its last; inner ones are `INNER` times as large as the
    first and the last."""
    ends = INNER * (chunks - 2) + 2
    inner = [(INNER * index + 1) * num_tokens // ends for index in range(chunks - 1)]
    return [*pairwise([0, *inner, num_tokens])]


def fault(num_tokens: int, chunks: int) -> str | None:
    """Why a device's tokens cannot go in so many chunks, and the remedy; None if they can."""
    if chunks <= max(1, num_tokens):
        return None
    return f"{num_tokens} tokens of a device are not {chunks} chunks: pass a smaller `chunks`"


def in_chunks(
    chunks: int, send: Send, compute: Compute, give_back: Return, x: Float[Array, "T H"], routing: Routing
) -> Float[Array, "T H"]:
    """The results of all tokens, one chunk after the other through the three steps.

    A chunk is sent while the one before is multiplied, not earlier: XLA's scheduler would send all of them first, with
    nothing to multiply meanwhile. Nor do two collectives of one kind run at once, of which XLA would make one.
    """
    if chunks == 1:
        return give_back(compute(*send(x, routing)))
    bounds = pairwise(accumulate(sizes(len(x), chunks), initial=0))
    parts = [(x[begin:end], Routing(*(array[begin:end] for array in routing))) for begin, end in bounds]
    sent, computed, returned = [send(*parts[0])], [], []
    for index in range(chunks):
        if index + 1 < chunks:
            part, sent[-1], computed[-1:] = lax.optimization_barrier((parts[index + 1], sent[-1], computed[-1:]))
            sent.append(send(*part))
        computed.append(compute(*sent[index]))
        if returned:
            computed[-1], returned[-1] = lax.optimization_barrier((computed[-1], returned[-1]))
        returned.append(give_back(computed[-1]))
    return jnp.concatenate(returned)
