"""Many tokens of `peer`, which copy engines send while a device routes, groups, and places the rows of its own tokens.

A kernel sends their routing. The rows of the others' tokens are placed when these have arrived.
"""

from typing import Any

from jax import lax
from jax.tree_util import Partial

from jmx.engines.grouped import Unsummed
from jmx.ffi.peer import collectives, copies
from jmx.ffi.peer.copies import Sending
from jmx.grouping import Work
from jmx.pallas import place_rows
from jmx.parallel import needed
from jmx.parallel.exchange import Call, Local
from jmx.routing import Logits, Routing
from jmx.routing.leading import arrays_of, with_arrays
from jmx.selection.problem import Problem
from jmx.util.typing import Array, Float, Int32

# Of a device's tokens: a layer of 1024 with 2880 columns takes 8 us less so on two H200s, as long on two H100s, where
# one of 512 takes 3 more. Of more ranks that all need them nothing was measured.
LEAST_BYTES, MOST_RANKS = 5 << 20, 2


def applies(call: Call) -> bool:
    """Whether a call's tokens go so: to all devices, and as they are, as only these have rows of their own."""
    if call.num_ranks > MOST_RANKS or call.wire is not None or needed.applies(call):
        return False
    if collectives.arrays_fault() is not None:
        return False
    return call.num_tokens * call.hidden_size * call.itemsize >= LEAST_BYTES


def computed(call: Call, local: Local, arrays: Any, x: Float[Array, "T H"], routing: Routing | Logits) -> Any:
    """What this device's experts make of all devices' tokens: `Terms`, or results (nT, H)."""
    sending, everyones = _sent(call, x, routing)
    first = len(x) * lax.axis_index(call.axes)[None]
    found = local(arrays, sending.received, everyones, Unsummed(Partial(_rows, first, sending.sent)))
    return local(arrays, _whole(first, sending), everyones) if found is None else found


def _sent(call: Call, x: Float[Array, "T H"], routing: Routing | Logits) -> tuple[Sending, Routing | Logits]:
    """Tokens on their way, which begin it before the routing of all devices is sent, and this routing."""
    sending, mine = lax.optimization_barrier((copies.start(x, call.axes, (0, len(x)), own=False), arrays_of(routing)))
    everyones = collectives.all_gather(tuple(mine.values()), call.axes)
    return sending, with_arrays(routing, dict(zip(mine, everyones, strict=True)))


def _rows(
    first: Int32[Array, "1"], own: Float[Array, "t H"], problem: Problem, received: Float[Array, "T H"], work: Work
) -> Float[Array, "R H"]:
    """A `grouped.Take` of tokens on their way, of which the device has its `own`, from the token `first` on."""
    del problem
    assert work.token_of_row is not None
    where = work.row_of, work.token_of_row, first
    rows, sending = lax.optimization_barrier((place_rows.place_some(own, *where), Sending(own, received)))
    return place_rows.place_rest(rows, copies.finish(sending), *where, len(own))


def _whole(first: Int32[Array, "1"], sending: Sending) -> Float[Array, "T H"]:
    """The tokens of all devices."""
    return lax.dynamic_update_slice_in_dim(copies.finish(sending), sending.sent, first[0], axis=0)
