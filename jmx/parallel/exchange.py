"""The protocol of an exchange: how tokens get to the devices of their experts, and results back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jmx.meshes import Names
from jmx.parallel.wire import Wire
from jmx.util.typing import Array, Float, Int32

# Results of tokens (T, H) and their routing (T, k), or logits (T, E), which a device computes with its own experts,
# whose arrays are the first argument: those of other devices contribute nothing. Ids are those of all experts. A fourth
# argument, if not None, is a `grouped.Unsummed`, which states what is returned then.
Local = Callable[..., Any]


class Here(NamedTuple):
    """What a device computes, and which experts each device has.

    local: the function. An exchange that differentiates by itself does so with respect to `arrays`, too: it closes over
        no traced array.
    arrays: a pytree, the first argument of `local`.
    first_experts: (R,) int32, the first expert of each device along the axes of the exchange; each has as many.
    """

    local: Local
    arrays: Any
    first_experts: Int32[Array, " R"]


@dataclass(frozen=True)
class Call:
    """What is static of an exchange.

    Args:
        axes: mesh axes along which devices exchange tokens, the major one first.
        num_ranks: devices that exchange tokens with each other.
        num_tokens: T, those of one device.
        top_k: experts of a token.
        hidden_size: H.
        itemsize: bytes of an element of x, and of a result.
        whole_experts: whether an expert is on one device; False: its intermediate axis is divided over some of them.
        num_experts: E, those of all devices, or their slots.
        experts_per_rank: those of one device.
        capacity: rows that a device accepts from each, in units of the average with even routing; None: all.
        chunks: into how many parts a device's tokens are split, of which one is exchanged while another is multiplied.
        input_format: what the experts' first product rounds tokens to; None: nothing, or not the tokens themselves.
        platform: of the devices, if they are not here, and are taken for those of one process; None: they are here.
        logit_bytes: bytes of a token's logits, where these are sent instead of its ids and weights; else 0.
        ranks_known: whether a token's routing, as it is sent, tells which devices have its experts.
    """

    axes: Names
    num_ranks: int
    num_tokens: int
    top_k: int
    hidden_size: int
    itemsize: int
    whole_experts: bool
    num_experts: int
    experts_per_rank: int
    capacity: float | None = None
    chunks: int = 1
    input_format: str | None = None
    platform: str | None = None
    logit_bytes: int = 0
    ranks_known: bool = True

    @property
    def routing_bytes(self) -> tuple[int, ...]:
        """Bytes of a token's routing, by array: its logits, or its ids and weights, of 4 bytes each."""
        return (self.logit_bytes,) if self.logit_bytes else (4 * self.top_k,) * 2

    @property
    def wire(self) -> Wire | None:
        """The format in which tokens are sent; None: as they are."""
        return Wire.of(self.num_tokens, self.hidden_size, self.itemsize, self.input_format)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: x or its codes, and its routing."""
        wire = self.wire
        return (self.hidden_size * self.itemsize if wire is None else wire.token_bytes) + sum(self.routing_bytes)

    @property
    def result_bytes(self) -> int:
        """Bytes of a token's result."""
        return self.hidden_size * self.itemsize


class Exchange(Protocol):
    """A way to exchange tokens and results between devices that have different experts."""

    name: str
    summary: str

    def supports(self, call: Call) -> str | None:
        """Why it cannot run a call, and the remedy; None if it can."""
        ...

    def bytes_sent(self, call: Call) -> tuple[int, int]:
        """Bytes that a device sends to others, on average with even routing: before the experts, and after them."""
        ...

    def apply(self, call: Call, x: Float[Array, "T H"], routing: Any, here: Here) -> Float[Array, "T H"]:
        """The results of this device's tokens, inside `jax.shard_map`.

        Args:
            call: what is static.
            x: this device's tokens.
            routing: a `Routing` (T, k), theirs, ids outside 0..E-1 contributing nothing; or `Logits` (T, E), if the
                call has `logit_bytes`.
            here: what this device computes.
        """
        ...
