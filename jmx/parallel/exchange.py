"""The protocol of an exchange: how tokens get to the devices of their experts, and results back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from jmx.routing import Routing
from jmx.util.typing import Array, Float

Names = tuple[str, ...]

# Results of tokens (T, H) and their routing (T, k), which a device computes with its own experts: those of other
# devices contribute nothing. Ids are those of all experts.
Local = Callable[[Float[Array, "T H"], Routing], Float[Array, "T H"]]


@dataclass(frozen=True)
class Call:
    """What is static of an exchange.

    Args:
        num_ranks: devices that exchange tokens with each other.
        num_tokens: T, those of one device.
        top_k: experts of a token.
        hidden_size: H.
        itemsize: bytes of an element of x, and of a result.
        whole_experts: whether an expert is on one device; False: its intermediate axis is divided over some of them.
    """

    num_ranks: int
    num_tokens: int
    top_k: int
    hidden_size: int
    itemsize: int
    whole_experts: bool

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: x, and its ids and weights, of 4 bytes each."""
        return self.hidden_size * self.itemsize + 8 * self.top_k

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

    def apply(self, x: Float[Array, "T H"], routing: Routing, axes: Names, local: Local) -> Float[Array, "T H"]:
        """The results of this device's tokens, inside `jax.shard_map`.

        Args:
            x: this device's tokens.
            routing: (T, k) theirs; ids outside 0..E-1 contribute nothing.
            axes: mesh axes along which devices exchange tokens, the major one first.
            local: what this device computes.
        """
        ...
