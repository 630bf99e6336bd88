"""Routing: the experts that each token goes to, and the weights of their results."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmx import meshes
from jmx.util import html, pytrees
from jmx.util.checks import check_array, check_instance, check_int
from jmx.util.tables import numbers, words
from jmx.util.typing import AnyArray, Array, Bool, Float, Int32, Integer

NOWHERE = -1  # the expert id of a slot that routes nowhere
_SHOWN = 8  # tokens of a routing that a notebook shows


@pytrees.register_namedtuple
class Routing(NamedTuple):
    """Which experts each token goes to: `expert_ids` (T, k) int32, `weights` (T, k) float32; a pytree.

    Ids outside 0..E-1 are allowed and contribute nothing.
    """

    expert_ids: Integer[Any, "*tokens k"]
    weights: Float[Any, "*tokens k"]

    def _repr_html_(self) -> str:
        """The first tokens of a concrete routing as a table; of any other, what `repr` gives."""
        ids, weights = self
        if isinstance(ids, Tracer) or isinstance(weights, Tracer) or np.ndim(ids) != 2:
            return html.preformatted(repr(self))
        tokens, k = np.shape(ids)
        shown = zip(np.asarray(ids)[:_SHOWN].tolist(), np.asarray(weights, np.float32)[:_SHOWN].tolist(), strict=True)
        rows = (
            [str(token), ", ".join(map(str, its)), ", ".join(f"{weight:.3f}" for weight in their)]
            for token, (its, their) in enumerate(shown)
        )
        table = html.table([*numbers("token"), *words("experts", "weights")], rows)
        return f"<p>{tokens} tokens, {k} experts each{', of which the first' * (tokens > _SHOWN)}</p>{table}"


def validate(routing: Routing, num_tokens: int) -> None:
    """Checks a routing of `num_tokens` (T) tokens.

    Raises:
        TypeError: ids that are not integers, weights that are not floating.
        ValueError: shapes that are not (T, k) with the same k.
    """
    ids, weights = routing
    check_array("expert_ids", ids, jnp.integer)
    check_array("weights", weights, jnp.floating)
    if ids.ndim != 2 or ids.shape[0] != num_tokens:
        raise ValueError(f"`expert_ids` (shape {ids.shape}) must be (T, k) with T = {num_tokens} tokens")
    if weights.shape != ids.shape:
        raise ValueError(f"`weights` (shape {weights.shape}) must have the shape of `expert_ids` (={ids.shape})")


def check_mask(mask: Bool[Any, "..."] | None, leading: tuple[Any, ...], owner: str) -> None:
    """Raises ValueError or TypeError unless `mask` is None or bool (*leading), those of `owner`."""
    if mask is None:
        return
    check_array("mask", mask, jnp.bool_)
    if tuple(mask.shape) != tuple(leading):
        raise ValueError(f"`mask` (shape {mask.shape}) must be {tuple(leading)}, the leading axes of {owner}")


def token_counts(routing: Routing, num_experts: int) -> Int32[Array, " E"]:
    """How many slots of `routing` go to each expert: (E,) int32. Ids outside 0..E-1 are not counted.

    Raises:
        TypeError: not a routing, ids that are not integers, or `num_experts` that is not an integer.
        ValueError: `num_experts` below 1, or ids that Explicit mesh axes split.
    """
    check_instance("routing", routing, Routing, "a jmx.Routing")
    check_array("expert_ids", routing.expert_ids, jnp.integer)
    num_experts = check_int("num_experts", num_experts, least=1)
    meshes.check_whole({"expert_ids": routing.expert_ids})
    ids = jnp.asarray(as_int32(routing.expert_ids)).reshape(-1)
    ids = jnp.where(ids < 0, num_experts, ids)  # a negative index would count from the end
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")


def as_int32(ids: Integer[AnyArray, "*shape"]) -> Int32[AnyArray, "*shape"]:
    """Expert ids as int32; those that int32 cannot hold, which jax would wrap around, become `NOWHERE`."""
    if ids.dtype.itemsize < 4 or ids.dtype == jnp.int32:
        return ids.astype(jnp.int32)
    xp = np if isinstance(ids, np.ndarray) else jnp  # jnp narrows 64 bits before it compares
    inside = (ids >= 0) & (ids <= jnp.iinfo(jnp.int32).max)
    return xp.where(inside, ids.astype(jnp.int32), NOWHERE)
