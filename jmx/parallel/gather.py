"""Exchange `gather`: every device gets all tokens, computes what its experts add to each, and results are summed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.parallel.exchange import Call, Local, Names
from jmx.routing import Routing
from jmx.util.typing import Array, Float, Shaped, UInt

_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
# Bytes of a device's tokens up to which they are sent with their routing, in one collective: above, packing them takes
# longer than starting another two.
PACKED_BYTES = 1 << 20


class Gather:
    """One all-gather of tokens and routing, and one reduce-scatter of results, by whatever XLA has for these.

    It needs no other memory than the tokens of all devices and their results, and has the fewest collectives.
    """

    name = "gather"
    summary = "all-gather tokens and routing, reduce-scatter results"

    def supports(self, call: Call) -> str | None:
        """None: it runs every call."""
        del call

    def bytes_sent(self, call: Call) -> tuple[int, int]:
        """Bytes that a device sends: tokens with their routing, and results."""
        others = call.num_ranks - 1
        return others * call.num_tokens * call.token_bytes, others * call.num_tokens * call.result_bytes

    def apply(self, x: Float[Array, "T H"], routing: Routing, axes: Names, local: Local) -> Float[Array, "T H"]:
        """See `jmx.parallel.exchange.Exchange`."""
        rows, everyones = _gather(axes, x, routing)
        return lax.psum_scatter(local(rows, everyones), axes, scatter_dimension=0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(axes: Names, x: Float[Array, "T H"], routing: Routing) -> tuple[Float[Array, "nT H"], Routing]:
    """Tokens and routing of all devices along `axes`, in the order of the devices; gradients are summed over them."""
    gather = partial(lax.all_gather, axis_name=axes, tiled=True)
    arrays = (x, routing.expert_ids, routing.weights)
    if x.size * x.dtype.itemsize > PACKED_BYTES or min(a.dtype.itemsize for a in arrays) < 2:
        x, ids, weights = map(gather, arrays)
        return x, Routing(ids, weights)
    lane = min(array.dtype.itemsize for array in arrays)
    packed = [_lanes(array, lane) for array in arrays]
    together = gather(jnp.concatenate(packed, axis=1))
    ends = [packed[0].shape[1], packed[0].shape[1] + packed[1].shape[1]]
    parts = jnp.split(together, ends, axis=1)
    x, ids, weights = (_from_lanes(part, array) for part, array in zip(parts, arrays, strict=True))
    return x, Routing(ids, weights)


def _gather_fwd(axes: Names, x: Any, routing: Routing) -> tuple[Any, None]:
    return _gather(axes, x, routing), None


def _gather_bwd(axes: Names, _: None, cotangents: Any) -> tuple[Any, Routing]:
    dx, drouting = cotangents
    scatter = partial(lax.psum_scatter, axis_name=axes, scatter_dimension=0, tiled=True)
    return scatter(dx), Routing(None, scatter(drouting.weights))  # None: ids have no gradient


_gather.defvjp(_gather_fwd, _gather_bwd)


def _lanes(array: Shaped[Array, "T n"], size: int) -> UInt[Array, "T m"]:
    """The bits of each row, as unsigned integers of `size` bytes."""
    return lax.bitcast_convert_type(array, _UNSIGNED[size]).reshape(array.shape[0], -1)


def _from_lanes(lanes: UInt[Array, "T m"], like: Shaped[Array, "t n"]) -> Shaped[Array, "T n"]:
    """Rows of the dtype of `like` from their bits."""
    each = like.dtype.itemsize // lanes.dtype.itemsize
    rows = lanes if each == 1 else lanes.reshape(lanes.shape[0], -1, each)
    return lax.bitcast_convert_type(rows, like.dtype)
