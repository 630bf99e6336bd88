"""Expert maps: for one rank, from an expert's id among all experts to its place among those that the rank holds."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmx.parallel.placement import EMPTY, Placement, check_placement
from jmx.routing import NOWHERE, Routing, as_int32
from jmx.util.checks import check_array, check_instance, check_int
from jmx.util.typing import Int32, Integer


def expert_map(placement: Placement, rank: int) -> Int32[np.ndarray, " E"]:
    """(E,) int32: the place of each expert among the slots of `rank`, from 0 on; -1 for experts that it does not hold.

    That is `expert_map` of vLLM's FusedMoE, and `Placement.identity` its "linear" placement where ranks divide experts.
    An expert with copies has a place on each of their ranks.

    Args:
        placement: of one layer.
        rank: one of its ranks.

    Raises:
        ValueError, TypeError: a placement of several layers, or no such rank.
    """
    check_placement("placement", placement, layers=())
    rank = check_int("rank", rank)
    if not 0 <= rank < placement.num_ranks:
        raise ValueError(f"`rank` (={rank}) must be in 0..{placement.num_ranks - 1}, the ranks of the placement")
    held = np.asarray(placement.expert_of_slot).reshape(placement.num_ranks, -1)[rank]
    places = np.full(placement.num_experts, NOWHERE, np.int32)
    places[held[held != EMPTY]] = np.flatnonzero(held != EMPTY)
    return places


def local_routing(routing: Routing, expert_map: Integer[Any, " E"]) -> Routing:
    """`routing` with ids among the experts of a rank, not among all: what `jmx.moe` takes with that rank's weights.

    Slots of experts that the rank does not hold, and ids outside 0..E-1, go to `NOWHERE`. The results of all ranks add
    up to those of the layer if each expert is on one rank.

    Args:
        routing: expert ids (..., k) among all E experts, and weights. Traced or not.
        expert_map: integer (E,), as `expert_map` returns it.

    Raises:
        TypeError: not a routing, or ids or a map that are not integers.
        ValueError: a map that is not (E,), E at least 1.
    """
    check_instance("routing", routing, Routing, "a jmx.Routing")
    check_array("expert_ids", routing.expert_ids, jnp.integer)
    check_array("expert_map", expert_map, jnp.integer)
    if len(expert_map.shape) != 1 or expert_map.shape[0] == 0:
        raise ValueError(f"`expert_map` (shape {tuple(expert_map.shape)}) must be (E,), one place an expert")
    ids, places = jnp.asarray(as_int32(routing.expert_ids)), jnp.asarray(as_int32(expert_map))
    inside = (ids >= 0) & (ids < places.size)
    local = places.at[jnp.where(inside, ids, 0)].get(mode="promise_in_bounds")
    return routing._replace(expert_ids=jnp.where(inside, local, NOWHERE))
