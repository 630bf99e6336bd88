"""Tokens and results of `peer` for the devices that have an expert of the token, where many devices have none."""

from functools import partial
from typing import Any

import jax
from jax import lax

from jmx.ffi.peer import collectives, needed
from jmx.ffi.peer.needed import Chosen
from jmx.meshes import Names
from jmx.pallas.routing.choice import Choice
from jmx.parallel.chunks import bounds_with_small_ends
from jmx.parallel.exchange import Call
from jmx.parallel.gather import scattered_back
from jmx.parallel.row_plan import average_rows
from jmx.routing import Logits, Method, Routing
from jmx.routing.leading import arrays_of, with_arrays
from jmx.util.typing import Array, Float, Int32, UInt32

# Of a device's tokens, the share that another one needs with even routing, up to which the others are left out: two
# devices need 94% of those of gpt-oss-120b, four 69%.
MOST_SHARE = 0.85
# Of a device's tokens and routing. On four H100s fewer are sent faster to all, by slots.
LEAST_BYTES = 4 << 20


def names_ranks(routing: Routing | Logits) -> bool:
    """Whether the routing of a token, as it is sent, tells without rounding which experts it may have."""
    if isinstance(routing, Routing):
        return True
    values = routing.values
    biased = routing.correction_bias is not None
    return logits_name_ranks(routing.method, biased, values.shape[1], values.dtype.itemsize)


def logits_name_ranks(method: Method, biased: bool, num_experts: int, itemsize: int) -> bool:
    """`names_ranks`, of logits of `itemsize` bytes. `biased`: whether the choice has a correction bias."""
    choice = Choice.of(method, biased, num_experts)
    if choice is None or choice.biased or choice.num_groups > 1:
        return False
    return itemsize == 4 and num_experts <= needed.MOST_LOGITS


def applies(call: Call, num_rows: int | None = None) -> bool:
    """Whether rows are left out where they are not needed. `num_rows`: of a device's tokens, of a chunk; None: all."""
    num_rows = call.num_tokens if num_rows is None else num_rows
    row_bytes = call.token_bytes - sum(call.routing_bytes)
    sizes = [num_rows * row_bytes, *(call.num_tokens * size for size in call.routing_bytes)]
    if row_bytes % needed.UNIT_BYTES or call.result_bytes % needed.UNIT_BYTES or not call.ranks_known:
        return False
    if average_rows(call) > MOST_SHARE * call.num_tokens:
        return False
    return sum(sizes) >= LEAST_BYTES and collectives.arrays_fault() is None


def bytes_left_out(call: Call) -> tuple[int, int]:
    """Bytes that a device does not send, on average with even routing: of tokens, and of results."""
    first = last = call.num_tokens
    if call.chunks > 1:
        bounds = bounds_with_small_ends(call.num_tokens, call.chunks)
        first, last = (end - begin for begin, end in (bounds[0], bounds[-1]))
    if not applies(call, first):
        return 0, 0
    share = (call.num_ranks - 1) * (1 - average_rows(call) / call.num_tokens)
    return round(first * share * (call.token_bytes - sum(call.routing_bytes))), round(last * share * call.result_bytes)


def chosen_of(call: Call) -> Chosen:
    """What tells which ranks need a token of a call."""
    return Chosen(call.top_k, call.experts_per_rank)


def gathered(
    call: Call, firsts: Int32[Array, " R"], x: Float[Array, "T H"], routing: Routing | Logits
) -> tuple[Float[Array, "nT H"], Routing | Logits, UInt32[Array, " nT"]]:
    """As `gather.gathered`, with zeros for rows that this device does not need; and the ranks that need each token."""
    arrays = arrays_of(routing)
    x, *others, ranks = _gathered(call, firsts, x, *arrays.values())
    return x, with_arrays(routing, dict(zip(arrays, others, strict=True))), ranks


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(call: Call, firsts: Any, x: Any, *routing: Any) -> list[Any]:
    wire = call.wire
    sent = x if wire is None else wire.encode(x)
    (rows, *others), ranks = needed.all_gather((sent, *routing), firsts, call.axes, chosen_of(call))
    return [rows if wire is None else wire.decode(rows, x.dtype), *others, ranks]


def _gathered_fwd(call: Call, firsts: Any, x: Any, *routing: Any) -> tuple[list[Any], None]:
    return _gathered(call, firsts, x, *routing), None


def _gathered_bwd(call: Call, _: None, cotangents: Any) -> tuple[Any, ...]:
    return None, *scattered_back(call.axes, cotangents[:-1])


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scattered(axes: Names, rows: Float[Array, "nT H"], ranks: UInt32[Array, " nT"]) -> Float[Array, "T H"]:
    """As `scatter.scattered`, of rows that are zeros on devices other than `ranks`."""
    return needed.reduce_scatter(rows, ranks, axes)


def _scattered_fwd(axes: Names, rows: Any, ranks: Any) -> tuple[Any, None]:
    return scattered(axes, rows, ranks), None


def _scattered_bwd(axes: Names, _: None, cotangent: Any) -> tuple[Any, None]:
    return lax.all_gather(cotangent, axes, tiled=True), None


scattered.defvjp(_scattered_fwd, _scattered_bwd)
