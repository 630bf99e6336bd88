"""Experts in the slots of a placement: the weights and the placement, which are replaced together."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx.experts import Experts
from jmx.parallel.placement import Placement, check_placement
from jmx.util.checks import check_instance
from jmx.util.typing import Shaped


@partial(jax.tree_util.register_dataclass, data_fields=["experts", "placement"], meta_fields=[])
@dataclass(frozen=True)
class PlacedExperts:
    """The experts of one layer in the slots of a placement; a pytree.

    experts: `Experts` whose expert axis is that of the S slots. An empty slot has weights that are not used.
    placement: the placement of one layer that the slots are filled by.
    """

    experts: Experts
    placement: Placement

    @classmethod
    def of(cls, experts: Experts, placement: Placement) -> "PlacedExperts":
        """The E `experts` of one layer in the slots of `placement`: copies of their weights, in the same layout.

        Empty slots get the weights of expert 0. The arrays must not be split; those of the result are on the same
        devices.

        Raises:
            ValueError, TypeError: a stack of layers, another number of experts, or arrays that are split.
        """
        check_one_layer(experts)
        check_placement("placement", placement, layers=())
        if experts.num_experts != placement.num_experts:
            raise ValueError(
                f"`placement` (of {placement.num_experts} experts) must be of {experts.num_experts}, those of `experts`"
            )
        arrays = by_slot(experts)
        for name, array in arrays.items():
            if isinstance(array, jax.Array) and not array.is_fully_replicated:
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
        names = axes if isinstance(axes, tuple) else (axes,)
        if not names or not {*names} <= {*mesh.axis_names}:
            raise ValueError(f"`axes` (={axes!r}) must be axes of the mesh, which has {mesh.axis_names}")
        if (ranks := prod(mesh.shape[name] for name in names)) != self.placement.num_ranks:
            raise ValueError(
                f"`axes` (={axes!r}, of {ranks} devices) must be of {self.placement.num_ranks}, one a rank"
            )
        slots = by_slot(self.experts)
        arrays = {
            name: jax.device_put(array, NamedSharding(mesh, P(names) if name in slots else P()))
            for name, array in self.experts.arrays().items()
        }
        return PlacedExperts(self.experts.with_arrays(arrays), self.placement.on(mesh))

    def check(self) -> None:
        """Raises ValueError or TypeError unless there are as many experts, of one layer, as the placement has slots."""
        check_one_layer(self.experts)
        check_placement("placement", self.placement, layers=())
        if self.experts.num_experts != self.placement.num_slots:
            raise ValueError(
                f"`experts` (of {self.experts.num_experts} slots) must have {self.placement.num_slots}, those of the "
                "placement: PlacedExperts.of fills them"
            )

    def mesh_axes(self) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh, and its axes that split the slots: one device along them is a rank.

        Raises:
            ValueError: arrays that are not split alike over as many devices as the placement has ranks.
        """
        found = {name: _first_axis_split(array) for name, array in by_slot(self.experts).items()}
        for name, split in found.items():
            ranks = None if split is None else prod(split[0].shape[axis] for axis in split[1])
            if ranks != self.placement.num_ranks:
                array = by_slot(self.experts)[name]
                raise ValueError(
                    f"`experts.{name}` ({getattr(array, 'sharding', type(array).__name__)}) must be split along its "
                    f"first axis over {self.placement.num_ranks} devices, one a rank, by a NamedSharding"
                )
        first = next(iter(found))
        for name, split in found.items():
            if split != found[first]:
                raise ValueError(f"`experts.{name}` (over {split}) must be split as `{first}` is, over {found[first]}")
        split = found[first]
        assert split is not None
        return split


def _first_axis_split(array: Any) -> tuple[Mesh, tuple[str, ...]] | None:
    """The mesh and its axes that split an array's first axis; None if none do."""
    sharding = array.sharding if isinstance(array, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        return None
    assert isinstance(sharding.mesh, Mesh)
    entry = sharding.spec[0]
    return sharding.mesh, entry if isinstance(entry, tuple) else (entry,)


def by_slot(experts: Experts) -> dict[str, Shaped[Any, "S ..."]]:
    """The arrays with an expert axis, by name: all but the scales of inputs, which are those of a whole layer."""
    return {name: array for name, array in experts.arrays().items() if not name.endswith("_input_scale")}


def check_one_layer(experts: Experts) -> None:
    check_instance("experts", experts, Experts, "a jmx.Experts")
    if experts.index is not None or len(experts.canonical_shape()) != 3:
        raise ValueError("`experts` must be those of one layer, not a stack or a `layer` of one")
