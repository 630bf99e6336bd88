"""Experts in the slots of a placement: the weights and the placement, which are replaced together."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx.experts import Experts, ShardedExperts, has_expert_axis
from jmx.experts.stacking import check_one_layer
from jmx.meshes import names_of
from jmx.parallel.placement import Placement, check_placement
from jmx.util import pytrees
from jmx.util.checks import check_instance
from jmx.util.typing import Shaped

PLACEMENT_ARRAYS = ("slots_of_expert", "copies", "expert_of_slot")


@pytrees.register(data=["experts", "placement"])
@dataclass(frozen=True)
class PlacedExperts:
    """The experts of one layer in the slots of a placement; a pytree.

    experts: `Experts`, or shards of them, whose expert axis is that of the S slots. An empty slot has weights that are
        not used.
    placement: the placement of one layer that the slots are filled by.
    """

    experts: Experts | ShardedExperts
    placement: Placement

    @classmethod
    def of(cls, experts: Experts, placement: Placement) -> "PlacedExperts":
        """The E `experts` of one layer in the slots of `placement`: copies of their weights, in the same layout.

        Empty slots get the weights of expert 0. The arrays must not be split; those of the result are on the same
        devices.

        Raises:
            ValueError, TypeError: a stack of layers, another number of experts, or arrays that are split.
        """
        check_instance("experts", experts, Experts, "a jmx.Experts")
        check_one_layer(experts)
        check_placement("placement", placement, layers=())
        if experts.num_experts != placement.num_experts:
            raise ValueError(
                f"`placement` (of {placement.num_experts} experts) must be of {experts.num_experts}, those of `experts`"
            )
        arrays = by_slot(experts)
        for name, array in arrays.items():
            if isinstance(array, jax.Array) and not isinstance(array, Tracer) and not array.is_fully_replicated:
                raise ValueError(f"`experts.{name}` ({array.sharding}) must be whole on each of its devices")
        chosen = np.maximum(np.asarray(placement.expert_of_slot), 0)
        filled = {name: jnp.take(array, chosen, axis=0, mode="clip") for name, array in arrays.items()}
        return cls(experts.with_arrays(experts.arrays() | filled), placement)

    def split(self, mesh: Mesh, axes: str | tuple[str, ...]) -> "PlacedExperts":
        """The same with its slots split over mesh axes, one device along them a rank, and the rest on every device.

        Raises:
            ValueError, TypeError: no such axes, or not as many devices along them as the placement has ranks.
        """
        check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
        names = names_of(axes)
        if not names or not {*names} <= {*mesh.axis_names}:
            raise ValueError(f"`axes` (={axes!r}) must be axes of the mesh, which has {mesh.axis_names}")
        if (ranks := prod(mesh.shape[name] for name in names)) != self.placement.num_ranks:
            raise ValueError(
                f"`axes` (={axes!r}, of {ranks} devices) must be of {self.placement.num_ranks}, one a rank"
            )
        slots = by_slot(self.experts)
        arrays = {
            name: jax.device_put(
                array, NamedSharding(mesh, P(*(None,) * slot_axis(self.experts, name), names) if name in slots else P())
            )
            for name, array in self.experts.arrays().items()
        }
        return PlacedExperts(self.experts.with_arrays(arrays), self.placement.on(mesh))

    def arrays(self) -> dict[str, Shaped[Any, "..."]]:
        """The arrays by name: those of the experts, and those of the placement."""
        return self.experts.arrays() | {name: getattr(self.placement, name) for name in PLACEMENT_ARRAYS}

    def with_arrays(self, arrays: Mapping[str, Any]) -> "PlacedExperts":
        """The same with other arrays, by the names of `arrays`; see `Experts.with_arrays`."""
        check_instance("arrays", arrays, Mapping, "a mapping of names to arrays")
        of_experts = {name: array for name, array in arrays.items() if name not in PLACEMENT_ARRAYS}
        placement = dataclasses.replace(self.placement, **{name: arrays.get(name) for name in PLACEMENT_ARRAYS})
        return PlacedExperts(self.experts.with_arrays(of_experts), placement)

    def prepare(self, layout: str, *, donate: bool = False) -> "PlacedExperts":
        """The same weights in another layout; see `Experts.prepare`."""
        return PlacedExperts(self.experts.prepare(layout, donate=donate), self.placement)

    def check(self) -> None:
        """Raises ValueError or TypeError unless there are as many experts, of one layer, as the placement has slots."""
        if not isinstance(self.experts, ShardedExperts):
            check_instance("experts", self.experts, Experts, "a jmx.Experts")
            check_one_layer(self.experts)
        check_placement("placement", self.placement, layers=())
        num_slots = self.experts.num_experts
        if num_slots != self.placement.num_slots:
            raise ValueError(
                f"`experts` (of {num_slots} slots) must have {self.placement.num_slots}, those of the "
                "placement: PlacedExperts.of fills them"
            )

    def mesh_axes(self) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh, and its axes that split the slots: one device along them is a rank.

        Raises:
            ValueError: arrays that are not split alike over as many devices as the placement has ranks.
        """
        slots = by_slot(self.experts)
        found = {name: _axis_split(array, slot_axis(self.experts, name)) for name, array in slots.items()}
        for name, split in found.items():
            ranks = None if split is None else prod(split[0].shape[axis] for axis in split[1])
            if ranks != self.placement.num_ranks:
                array, axis = slots[name], slot_axis(self.experts, name)
                raise ValueError(
                    f"`experts.{name}` ({getattr(array, 'sharding', type(array).__name__)}) must be split along its "
                    f"{'second' if axis else 'first'} axis over {self.placement.num_ranks} devices, one a rank, by a "
                    "NamedSharding"
                )
        first = next(iter(found))
        for name, split in found.items():
            if split != found[first]:
                raise ValueError(f"`experts.{name}` (over {split}) must be split as `{first}` is, over {found[first]}")
        split = found[first]
        assert split is not None
        return split


def _axis_split(array: Any, axis: int) -> tuple[Mesh, tuple[str, ...]] | None:
    """The mesh, and its axes of several devices that split an axis of an array; None if it is on no mesh.

    Axes of one device are left out, as jax may leave them out of an array's type.
    """
    sharding = array.sharding if isinstance(array, jax.Array) else None
    if not isinstance(sharding, NamedSharding):
        return None
    assert isinstance(sharding.mesh, Mesh)
    names = names_of(sharding.spec[axis]) if axis < len(sharding.spec) else ()
    return sharding.mesh, tuple(name for name in names if sharding.mesh.shape[name] > 1)


def by_slot(experts: Experts | ShardedExperts) -> dict[str, Shaped[Any, "..."]]:
    """The arrays with an axis of experts, or slots, by name."""
    return {name: array for name, array in experts.arrays().items() if has_expert_axis(name)}


def slot_axis(experts: Experts | ShardedExperts, name: str) -> int:
    """The axis of experts, or slots, of an array: that of shards is in front of it."""
    return int(isinstance(experts, ShardedExperts) and name != "down_bias")
