"""The exchanges in order of preference, and the choice of one for a call."""

from typing import NamedTuple

from jmx.parallel.exchange import Call, Exchange
from jmx.parallel.gather import Gather
from jmx.parallel.peer import Peer, PeerLines
from jmx.parallel.rows import Rows

EXCHANGES: dict[str, Exchange] = {exchange.name: exchange for exchange in (PeerLines(), Peer(), Gather(), Rows())}


class Choice(NamedTuple):
    """The exchange that runs a call, and of each one asked before it why it does not."""

    exchange: Exchange
    reasons: dict[str, str]


def choose(call: Call, requested: str | None = None) -> Choice:
    """The exchange for a call: the requested one, else the first that supports it.

    Raises:
        ValueError: the requested exchange cannot run the call, with the reason.
    """
    reasons: dict[str, str] = {}
    for name in EXCHANGES if requested is None else (requested,):
        reason = EXCHANGES[name].supports(call)
        if reason is None:
            return Choice(EXCHANGES[name], reasons)
        reasons[name] = reason
    listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"`exchange` (={requested!r}) cannot run this call: {listed}")
