"""Exchange `gather`: every device gets all tokens, computes what its experts add to each, and results are summed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jmx.meshes import Names
from jmx.parallel.chunks import fault, in_chunks
from jmx.parallel.exchange import Call, Here
from jmx.parallel.packed_rows import together
from jmx.parallel.wire import Coded, Collective
from jmx.routing import Logits, Routing
from jmx.routing.leading import arrays_of, with_arrays
from jmx.util.typing import Array, Float, Shaped


class Gather:
    """One all-gather of tokens and routing, and one reduce-scatter of results, by whatever XLA has for these.

    It needs no other memory than the tokens of all devices and their results, and has the fewest collectives.
    """

    name = "gather"
    summary = "all-gather tokens and routing, reduce-scatter results"

    def supports(self, call: Call) -> str | None:
        """It drops no row, and a chunk has at least one token."""
        return (
            fault(call.num_tokens, call.chunks) if call.capacity is None else "it drops no rows: leave `capacity` out"
        )

    def bytes_sent(self, call: Call) -> tuple[int, int]:
        """Bytes that a device sends: tokens with their routing, and results."""
        others = call.num_ranks - 1
        return others * call.num_tokens * call.token_bytes, others * call.num_tokens * call.result_bytes

    def apply(self, call: Call, x: Float[Array, "T H"], routing: Any, here: Here) -> Float[Array, "T H"]:
        """See `jmx.parallel.exchange.Exchange`."""

        def send(x: Float[Array, "t H"], routing: Any) -> tuple[Float[Array, "nt H"], Any]:
            return gathered(Coded(call.wire, _by_xla), call.axes, x, routing)

        def give_back(results: Float[Array, "nt H"]) -> Float[Array, "t H"]:
            return lax.psum_scatter(results, call.axes, scatter_dimension=0, tiled=True)

        return in_chunks(call.chunks, send, partial(here.local, here.arrays), give_back, x, routing)


def gathered(
    collective: Collective, axes: Names, x: Float[Array, "T H"], routing: Routing | Logits
) -> tuple[Float[Array, "nT H"], Routing | Logits]:
    """Tokens and routing of all devices along `axes`, in the order of the devices; gradients are summed over them.

    Gradients pass the wire format straight through, as they pass the rounding of the experts' inputs.
    """
    arrays = arrays_of(routing)
    x, *others = _gathered(collective, axes, x, *arrays.values())
    return x, with_arrays(routing, dict(zip(arrays, others, strict=True)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(collective: Collective, axes: Names, *arrays: Shaped[Array, "T _"]) -> list[Shaped[Array, "nT _"]]:
    return collective(arrays, axes)


def _gathered_fwd(collective: Collective, axes: Names, *arrays: Any) -> tuple[Any, None]:
    return _gathered(collective, axes, *arrays), None


def _gathered_bwd(collective: Collective, axes: Names, _: None, cotangents: Any) -> tuple[Any, ...]:
    return scattered_back(axes, cotangents)


def scattered_back(axes: Names, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """Cotangents of a device's rows, from those of all devices' rows (nT, ...); None of ids, which have no gradient."""

    def scatter(cotangent: Any) -> Any:
        if cotangent.dtype == jax.dtypes.float0:
            return None
        return lax.psum_scatter(cotangent, axes, scatter_dimension=0, tiled=True)

    return tuple(map(scatter, cotangents))


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _by_xla(arrays: tuple[Shaped[Array, "T _"], ...], axes: Names) -> list[Shaped[Array, "nT _"]]:
    return together(partial(lax.all_gather, axis_name=axes, tiled=True), arrays)
