"""Exchange `peer`: as `gather`, by kernels of GPUs that write into each other's memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.ffi.peer import collectives
from jmx.ffi.peer.library import library
from jmx.meshes import Names
from jmx.parallel import needed, overlapped, summed
from jmx.parallel.exchange import Call, Here
from jmx.parallel.gather import Gather, gathered
from jmx.parallel.scatter import scattered
from jmx.parallel.wire import Coded
from jmx.selection.environment import Environment
from jmx.util.typing import Array, Float, Shaped

# Of a device's tokens, where GPUs do not access each other's arrays: memory of their own is kept for so many.
MOST_BYTES = 8 << 20
MOST_SUM_BYTES = 1 << 20  # of a sum over more than two devices: each device reads those of all others
MOST_RANKS = 8  # as jmx/ffi/peer/src/region.h has it


class Peer:
    """One kernel before the experts and one after them, each of which starts when its GPU comes to it.

    Few rows lie in memory that the process keeps: twice those of all ranks, for each number of tokens. Many go from
    array to array, tokens of two ranks by copy engines (`jmx.parallel.arriving`). XLA's collectives run instead where a
    program does not know its devices, as in `jax.export`.
    """

    name = "peer"
    summary = "GPUs write tokens, routing and results into each other's memory"
    lines = False

    def supports(self, call: Call) -> str | None:
        """None: the GPUs are of one process, and access each other's memory, and arrays of more than `MOST_BYTES`."""
        if reason := Gather().supports(call) or fault(call.num_ranks, call.platform):
            return reason
        if call.chunks > 1 and (reason := self._fault_of_chunks(call)):
            return reason
        num_bytes = call.num_tokens * call.token_bytes
        if num_bytes > MOST_BYTES and (reason := collectives.arrays_fault()):
            return f"{num_bytes} bytes of a device's tokens are more than {MOST_BYTES}, and {reason}"
        return None

    def _fault_of_chunks(self, call: Call) -> str | None:
        """Why tokens do not go in chunks, and the remedy; None if they do."""
        if self.lines:
            return "it sends all tokens at once: use `peer`, or leave `chunks` out"
        if reason := collectives.arrays_fault():
            return f"copy engines send chunks, and {reason}"
        return overlapped.fault(call.num_tokens, call.chunks)

    def bytes_sent(self, call: Call) -> tuple[int, int]:
        """As `gather`, but for rows that other devices do not need."""
        (before, after), (less_before, less_after) = Gather().bytes_sent(call), needed.bytes_left_out(call)
        return before - less_before, after - less_after

    def apply(self, call: Call, x: Float[Array, "T H"], routing: Any, here: Here) -> Float[Array, "T H"]:
        """See `jmx.parallel.exchange.Exchange`."""
        if call.num_ranks == 1:  # whose chunks only save memory
            return Gather().apply(call, x, routing, here)
        if call.chunks > 1:
            return overlapped.overlapped(call, here.local, x, routing, here.arrays, here.first_experts)
        if not self.lines:
            return summed.summed(call, here.local, x, routing, here.arrays, here.first_experts)
        rows, everyones = gathered(Coded(call.wire, _with_lines), call.axes, x, routing)
        return scattered(call.axes, True, here.local(here.arrays, rows, everyones))


class PeerLines(Peer):
    """As `peer`, but with rows of at most 256 KiB as lines that say themselves when they have arrived.

    On two and on four GPUs that is 2 to 9 us less a layer up to 16 tokens of 2880 columns.
    """

    name = "peer_lines"
    summary = "as peer, without a flag after few rows"
    lines = True

    def supports(self, call: Call) -> str | None:
        """None: as `peer`, and tokens and results of a device can be lines."""
        if reason := super().supports(call):
            return reason
        sizes = [call.num_tokens * size for size in (call.hidden_size * call.itemsize, *call.routing_bytes)]
        if collectives.can_be_lines(sizes):
            return None
        tokens, *routing = sizes
        twice = "twice " if len(routing) > 1 else ""
        return (
            f"{tokens} bytes of a device's tokens and {twice}{routing[0]} of their routing must be multiples of "
            f"{collectives.LINE_BYTES}, and at most {collectives.MOST_LINE_BYTES} together: use `peer`"
        )


def _with_lines(arrays: tuple[Shaped[Array, "T _"], ...], axes: Names) -> list[Shaped[Array, "nT _"]]:
    return collectives.all_gather(arrays, axes, True)


def fault(num_ranks: int, platform: str | None = None) -> str | None:
    """Why GPUs do not write into each other's memory, and the remedy; None if they do.

    `platform`: of devices that are not here. Such GPUs are taken for those of one process and one host.
    """
    here = platform is None
    platform = Environment.probe().platform if platform is None else platform
    if platform != "gpu":
        return f"the platform is {platform}, not gpu"
    if here and jax.process_count() > 1:
        return f"GPUs are of {jax.process_count()} processes: use one for all GPUs of a host"
    if num_ranks > MOST_RANKS:
        return f"{num_ranks} GPUs are more than {MOST_RANKS}"
    return library().fault if here else None


def all_sum(array: Float[Array, "*shape"], axes: Names) -> Float[Array, "*shape"]:
    """The sum over devices along mesh axes, inside `jax.shard_map`: by the kernels of `peer`, if few or small."""
    num_ranks, num_bytes = collectives.num_ranks(axes), array.size * array.dtype.itemsize
    most = MOST_SUM_BYTES if num_ranks > 2 or collectives.arrays_fault() else num_bytes
    if num_ranks == 1 or num_bytes > most or fault(num_ranks):
        return lax.psum(array, axes)
    return _summed(axes, array)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(axes: Names, array: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return collectives.all_reduce(array, axes, True)  # as lines, where they can be


def _summed_fwd(axes: Names, array: Any) -> tuple[Any, None]:
    return _summed(axes, array), None


def _summed_bwd(axes: Names, _: None, cotangent: Any) -> tuple[Any]:
    # The transpose of a psum differs between jax.shard_map with check_vma and without.
    array = lax.pcast(jnp.zeros_like(cotangent), axes, to="varying")
    _, transpose = jax.vjp(partial(lax.psum, axis_name=axes), array)
    return transpose(cotangent)


_summed.defvjp(_summed_fwd, _summed_bwd)
