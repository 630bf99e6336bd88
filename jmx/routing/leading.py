"""The tokens of a call, with any leading axes: the arrays of their routing, checks, and the same as (T, k)."""

import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from jmx.routing.logits import Logits, route
from jmx.routing.routing import NOWHERE, Routing, as_int32, check_mask, validate
from jmx.util.checks import check_array, is_array
from jmx.util.typing import AnyArray, Bool, Shaped


def flat_routing(
    routing: Routing | Logits,
    leading: tuple[Any, ...],
    mask: Bool[AnyArray, "*tokens"] | None = None,
    route: Callable[[Logits, Any], Routing] = route,
) -> Routing:
    """The routing (T, k) of routing or logits with `leading` axes, checked by `check_routing`.

    Masked tokens route nowhere. `route`: how logits (T, E) are routed.

    Raises:
        ValueError, TypeError: those of `jmx.route` and `routing.validate`.
    """
    mask = None if mask is None else mask.reshape(-1)
    flat = _flat(routing, leading)
    if isinstance(flat, Logits):
        return route(flat, mask)
    validate(flat, prod(leading))
    ids = as_int32(flat.expert_ids)
    return flat._replace(expert_ids=ids if mask is None else jnp.where(mask[:, None], ids, NOWHERE))


def flat_logits(logits: Logits, leading: tuple[Any, ...], mask: Bool[AnyArray, "*tokens"] | None = None) -> Logits:
    """Logits (T, E) of logits with `leading` axes; those of masked tokens are -inf, by which they route nowhere."""
    flat = _flat(logits, leading)
    assert isinstance(flat, Logits)
    if mask is None:
        return flat
    return dataclasses.replace(flat, values=jnp.where(mask.reshape(-1, 1), flat.values, -jnp.inf))


def _flat(routing: Routing | Logits, leading: tuple[Any, ...]) -> Routing | Logits:
    arrays = arrays_of(routing)
    return with_arrays(routing, {name: a.reshape(prod(leading), a.shape[-1]) for name, a in arrays.items()})


def check_routing(routing: Routing | Logits, leading: tuple[Any, ...], mask: Bool[Any, "..."] | None) -> None:
    """Raises ValueError or TypeError, naming the array, unless routing and mask are those of tokens (*leading)."""
    for name, array in arrays_of(routing).items():
        check_array(name, array)
        if not array.shape or tuple(array.shape[:-1]) != tuple(leading):
            raise ValueError(
                f"`{name}` (shape {array.shape}) must be {tuple(leading)}, the leading axes of x, and one more axis"
            )
    check_mask(mask, leading, "x")


def slots_of(routing: Routing | Logits) -> int:
    """k, the number of experts that each token is routed to."""
    return routing.method.top_k if isinstance(routing, Logits) else routing.expert_ids.shape[-1]


def arrays_of(routing: Routing | Logits) -> dict[str, Shaped[Any, "..."]]:
    """Arrays with axes of tokens, by name."""
    return {"values": routing.values} if isinstance(routing, Logits) else routing._asdict()


def with_arrays(routing: Routing | Logits, arrays: dict[str, Any]) -> Routing | Logits:
    """The same with other arrays, by name."""
    return dataclasses.replace(routing, **arrays) if isinstance(routing, Logits) else Routing(**arrays)


class Tokens(NamedTuple):
    """What a call has of each token: x (..., H), its routing, and the mask; see `jmx.moe`."""

    x: Any
    routing: Any
    mask: Any

    def arrays(self) -> dict[str, Shaped[Any, "..."]]:
        """The arrays, by name; without those that are no arrays, which are rejected later."""
        arrays = arrays_of(self.routing) if isinstance(self.routing, Routing | Logits) else {}
        return {name: array for name, array in {"x": self.x, **arrays, "mask": self.mask}.items() if is_array(array)}

    def for_jit(self) -> "Tokens":
        """With expert ids in 32 bits: jit narrows numpy's 64 bits."""
        if isinstance(self.routing, Logits):
            return self
        return self._replace(routing=self.routing._replace(expert_ids=as_int32(self.routing.expert_ids)))

    def divided(self) -> tuple[Any, Any]:
        """The arrays with axes of tokens, and the routing without them, as `of_parts` takes them."""
        arrays = arrays_of(self.routing)
        return (self.x, arrays, self.mask), with_arrays(self.routing, dict.fromkeys(arrays))

    @classmethod
    def of_parts(cls, by_token: Any, rest: Any) -> "Tokens":
        x, arrays, mask = by_token
        return cls(x, with_arrays(rest, arrays), mask)
