"""The work of each rank of the experts, layer by layer, and logits with which all devices do that of the fullest one.

A divided layer has ended when the device with the most work has. In a chain of layers that may be another device each
time: then all take longer than any one of them has work for.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx.parallel import Split
from jmx.routing import Logits, Method, route
from jmx.util.typing import Array, Float


class Groups(NamedTuple):
    """Devices with the same tokens after the exchange are a group, in which each rank has other experts.

    Args:
        num_groups, num_ranks: how many there are.
        places: (group, rank) of each device, in the order of the mesh.
    """

    num_groups: int
    num_ranks: int
    places: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, split: Split, sizes: Mapping[str, int]) -> "Groups":
        """Those of a mesh of these sizes."""
        of_tokens, of_experts = kept(split), split.names("expert")
        indices = [dict(zip(sizes, index, strict=True)) for index in np.ndindex(*sizes.values())]
        places = [(_position(its, of_tokens, sizes), _position(its, of_experts, sizes)) for its in indices]
        num_groups, num_ranks = (prod(sizes[name] for name in names) for names in (of_tokens, of_experts))
        return cls(num_groups, num_ranks, places)


def kept(split: Split) -> tuple[str, ...]:
    """Mesh axes along which devices have other tokens after the exchange, too."""
    return tuple(name for name in split.names("tokens") if name not in split.exchanged)


class Shares(NamedTuple):
    """What each rank does in each layer, (layers, groups, ranks): its experts in use, and their rows."""

    used: np.ndarray
    rows: np.ndarray

    @classmethod
    def of_logits(cls, logits: Float[Array, "L T E"], method: Method, groups: Groups) -> "Shares":
        """Those of the experts that logits choose."""
        num_layers, _, num_experts = logits.shape
        ids = np.asarray(_chosen(logits, method)).reshape(num_layers, groups.num_groups, -1)
        counts = np.zeros((*ids.shape[:2], num_experts), np.int64)
        layer, group, _ = np.indices(ids.shape, sparse=True)
        np.add.at(counts, (layer, group, ids), 1)
        by_rank = counts.reshape(*ids.shape[:2], groups.num_ranks, -1)
        return cls((by_rank > 0).sum(-1), by_rank.sum(-1))

    def fullest(self) -> np.ndarray:
        """(layers, groups): the rank with the most experts in use, and of those the one with the most rows."""
        return (self.used * (self.rows.max() + 1) + self.rows).argmax(-1)


def of_devices(
    logits: Float[Array, "L T E"], groups: Groups, mesh: Mesh, fullest: np.ndarray | None = None
) -> list[Float[Array, "rows E"]]:
    """Of each layer the logits of each device's group, divided over all devices.

    With `fullest` (layers, groups), a device's experts have the columns of that rank's, and these have its own.
    """
    num_layers, num_tokens, num_experts = logits.shape
    tokens, on_host = num_tokens // groups.num_groups, np.asarray(logits)
    sharding = NamedSharding(mesh, P(mesh.axis_names))

    def of_one(layer: int, index: Any) -> np.ndarray:
        group, rank = groups.places[(index[0].start or 0) // tokens]
        its = on_host[layer, group * tokens : (group + 1) * tokens]
        return its if fullest is None else _exchanged(its, rank, fullest[layer, group], groups.num_ranks)

    shape = mesh.size * tokens, num_experts
    return [jax.make_array_from_callback(shape, sharding, partial(of_one, layer)) for layer in range(num_layers)]


@partial(jax.jit, static_argnums=1)
def _chosen(logits: Float[Array, "L T E"], method: Method) -> Any:
    """The experts of each token."""
    return lax.map(lambda its: route(Logits(its, method)).expert_ids, logits)


def _exchanged(logits: np.ndarray, one: int, other: int, num_ranks: int) -> np.ndarray:
    """Logits whose columns of two ranks have changed places."""
    order = np.arange(num_ranks)
    order[[one, other]] = other, one
    return logits.reshape(len(logits), num_ranks, -1)[:, order].reshape(logits.shape)


def _position(index: Mapping[str, int], names: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Of a device along several axes, the major one first."""
    place = 0
    for name in names:
        place = place * sizes[name] + index[name]
    return place
