"""The form in which a module holds its experts on a mesh: whole, in shards, in the slots of a placement, or in both."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jmx.experts import Axes, Experts, ShardedExperts, partition_names
from jmx.experts.arrays import check_arrays
from jmx.experts.conversion import place_like
from jmx.experts.stacking import check_arrays_alike
from jmx.meshes import MeshAxes, names_of
from jmx.parallel.hidden_axis import along_hidden
from jmx.parallel.placed_experts import PLACEMENT_ARRAYS, PlacedExperts, by_slot, slot_axis
from jmx.parallel.placement import Placement
from jmx.parallel.split import AnyMesh
from jmx.qat import MasterExperts
from jmx.util.checks import check_instance

QuantizedExperts = Experts | ShardedExperts | PlacedExperts
AnyExperts = QuantizedExperts | MasterExperts
KINDS = "jmx.Experts, jmx.ShardedExperts, jmx.parallel.PlacedExperts or jmx.training.MasterExperts"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Form:
    """What the arrays of a module hold, static.

    Args:
        num_shards: the shards of the intermediate axis; 1: it is whole.
        spare_experts: slots beside one an expert; 0: experts have no placement.
        num_ranks: those of the placement.
        input_format: that of the calls, whose blocks divide a shard, or None.
    """

    num_shards: int = 1
    spare_experts: int = 0
    num_ranks: int = 1
    input_format: str | None = None

    @classmethod
    def of(cls, axes: Axes | None, spare_experts: int, mesh: AnyMesh | None = None) -> "Form":
        """The form for a mesh, by default the one in scope: a shard, and a rank, a device along a module's axes."""
        sizes = (jax.sharding.get_abstract_mesh() if mesh is None else mesh).shape

        def ways(logical: str) -> int:
            return prod(sizes.get(name, 1) for name in names_of((axes or {}).get(logical)))

        return cls(ways("intermediate"), spare_experts, ways("expert") if spare_experts else 1)

    def apply(self, experts: Experts, placement: Placement | None = None) -> QuantizedExperts:
        """Experts in this form; in shards their layout is "packed".

        `placement`: which slots hold them; None: each expert is in its own slot, and spare ones are empty.
        """
        if self.num_shards > 1 or self.spare_experts:
            experts = _whole_on_each(experts)
        found: Experts | ShardedExperts = experts
        if self.spare_experts:
            if placement is None:
                placement = Placement.identity(experts.num_experts, self.num_ranks, self.spare_experts)
            slots = PlacedExperts.of(experts, placement).experts
            assert isinstance(slots, Experts)
            found = experts = slots
        if self.num_shards > 1:
            found = ShardedExperts.of(experts, self.num_shards, self.input_format)
        return found if placement is None else PlacedExperts(found, jax.tree.map(jnp.asarray, placement))


def _whole_on_each(experts: Experts) -> Experts:
    """Experts on the devices of a mesh, whole on each, and of the mesh in scope; others as they are."""

    def put(array: Any) -> Any:
        if (
            isinstance(array, Tracer)
            or not isinstance(array, jax.Array)
            or not isinstance(array.sharding, NamedSharding)
        ):
            return array
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError:  # there is only an abstract one while tracing
            return array
        return jax.device_put(array, NamedSharding(array.sharding.mesh if mesh.empty else mesh, PartitionSpec()))

    return jax.tree.map(put, experts)


def inner(held: AnyExperts) -> Experts:
    """The `Experts` inside of any form: slots, shards with a leading axis, or both; it has their static fields.

    Of master weights they are those that they are rounded to, without their arrays.
    """
    if isinstance(held, MasterExperts):
        return held.skeleton()
    experts = held.experts if isinstance(held, PlacedExperts) else held
    return experts.shards if isinstance(experts, ShardedExperts) else experts


def whole_experts(held: AnyExperts) -> Experts:
    """The experts that a module holds in any form, in the same layout: each from its first slot, and its shards joined.

    Arrays may be traced, abstract (in `jax.eval_shape`), or on devices of a mesh, of which the result is then.
    """
    if isinstance(held, Experts):
        return held
    mesh = _auto_mesh(held)
    if mesh is None or isinstance(held, MasterExperts):
        return _whole(held)
    own = inner(held).gate_up.values.sharding.mesh
    held = jax.tree.map(lambda its: jax.device_put(its, NamedSharding(mesh, its.sharding.spec)), held)
    with jax.set_mesh(mesh):
        whole = jax.jit(_whole)(held)
    return jax.tree.map(lambda its: jax.device_put(its, NamedSharding(own, its.sharding.spec)), whole)


def _whole(held: AnyExperts) -> Experts:
    if isinstance(held, MasterExperts):
        return held.quantize()
    layout = inner(held).layout
    if isinstance(held, Experts):
        return held
    held = held.prepare("packed")  # XLA's CPU compiler moves float4 between devices wrongly
    if isinstance(held, PlacedExperts):
        first, inside = held.placement.slots_of_expert[:, 0], held.experts
        taken = {n: jnp.take(a, first, axis=slot_axis(inside, n), mode="clip") for n, a in by_slot(inside).items()}
        held = inside.with_arrays(inside.arrays() | taken)
    whole = held.whole() if isinstance(held, ShardedExperts) else held
    return whole.prepare(layout)


def updated(held: AnyExperts, new: Experts, form: Form) -> AnyExperts:
    """`new` experts in the place of those that are held: in their form, layout and placement, and on their devices.

    Raises:
        ValueError, TypeError: as `Experts.update`.
    """
    held = _quantized(held, "new")
    if isinstance(held, Experts):
        return held.update(new)
    like = whole_shapes(held)
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), check_instance("new", new, Experts, "jmx.Experts")
    )
    jax.eval_shape(like.update, shapes)  # checks them
    placement = held.placement if isinstance(held, PlacedExperts) else None
    mesh = _auto_mesh(held)
    if mesh is None:
        made = form.apply(new, placement).prepare(like.layout)
    else:
        everywhere = NamedSharding(mesh, PartitionSpec())
        with jax.set_mesh(mesh):
            made = form.apply(jax.device_put(new, everywhere), placement).prepare(like.layout)
    return jax.tree.map(place_like, held, made)


def prepared(held: AnyExperts, layout: str, axes: Axes) -> AnyExperts:
    """What a module holds in another layout, divided as its `axes` divide it, if there are any.

    Deletes the old arrays, see `Experts.prepare`.
    """
    held = _quantized(held, "layout")
    values = inner(held).gate_up.values
    auto = _auto_mesh(held)
    if auto is None or not axes:
        return held.prepare(layout, donate=True)
    mesh = values.sharding.mesh
    with jax.set_mesh(auto):
        there = jax.tree.map(lambda its: jax.device_put(its, NamedSharding(auto, its.sharding.spec)), held)
        new = there.prepare(layout, donate=True)
    names = form_names(new, axes, mesh.shape)
    put = {n: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*names[n]))) for n, a in new.arrays().items()}
    return new.with_arrays(put)


def _quantized(held: AnyExperts, argument: str) -> QuantizedExperts:
    """What is held. Raises ValueError, naming the argument, for master weights, which are not quantized."""
    if isinstance(held, MasterExperts):
        raise ValueError(
            f"`{argument}` must not be given to a layer of master weights, which has no layout: see `hold`"
        )
    return held


def whole_shapes(held: AnyExperts) -> Experts:
    """The shapes of `whole_experts`, without shardings."""
    return jax.eval_shape(_whole, jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), held))


def one_device(held: AnyExperts) -> Experts:
    """Experts like those of one device, for checks; of shards and of master weights abstract ones."""
    if isinstance(held, PlacedExperts):
        return one_device(held.experts)
    if isinstance(held, MasterExperts):
        return whole_shapes(held)
    if isinstance(held, ShardedExperts):  # without shardings, as no device may have the first shard alone
        shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), held)
        return jax.eval_shape(lambda sharded: sharded.shard(0), shapes)
    return held


def check_held(held: AnyExperts) -> None:
    """Raises ValueError or TypeError, naming the array, unless the arrays that a module holds fit their sizes."""
    if isinstance(held, PlacedExperts | MasterExperts):
        held.check()
    check_arrays(one_device(held))


def check_alike(name: str, held: AnyExperts, other: AnyExperts) -> None:
    """Raises TypeError or ValueError, naming what differs, unless two differ in the values of arrays only."""
    check_instance(name, held, type(other), f"a {type(other).__name__}, as the layer holds")
    if held.with_arrays({}) != other.with_arrays({}):
        raise ValueError(f"`{name}` must have the sizes, format, layout and ranks of what the layer holds")
    check_arrays_alike(name, held.arrays(), other.arrays(), ", as the layer holds")


def _auto_mesh(held: AnyExperts) -> Mesh | None:
    """The mesh of arrays, none of whose axes is Explicit: those would have to be in the type of each step."""
    for array in held.arrays().values():
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            mesh = getattr(array.sharding, "mesh", None)
            if isinstance(mesh, Mesh):
                return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return None


def form_names(held: AnyExperts, axes: Axes, sizes: Mapping[str, int] | None = None) -> dict[str, tuple[MeshAxes, ...]]:
    """The mesh axes that divide each axis of each array, by the names of `held.arrays()`.

    Args:
        axes: mesh axes by the logical axes of weights.
        sizes: of the mesh's axes; None: not known. They decide which axis of an array "hidden" divides.
    """
    if isinstance(held, PlacedExperts):
        placement = {name: (None,) * getattr(held.placement, name).ndim for name in PLACEMENT_ARRAYS}
        return form_names(held.experts, axes, sizes) | placement
    if isinstance(held, MasterExperts):
        names = {n: (axes.get("expert"), *(None,) * (a.ndim - 1)) for n, a in held.arrays().items()}
        if sizes is not None:
            _check_even(held, names, axes, sizes)
        return names
    if isinstance(held, Experts):
        names = partition_names(held, {**axes, "hidden": None})
    else:
        names = partition_names(held.shards, {"expert": axes.get("expert")})
        names = {name: (axes.get("intermediate"), *entry[1:]) for name, entry in names.items()}
        if held.down_bias is not None:
            names["down_bias"] = (axes.get("expert"), None)
    names = along_hidden(held, names, axes.get("hidden"), sizes)
    if sizes is not None:
        _check_even(held, names, axes, sizes)
    return names


def _check_even(
    held: Experts | ShardedExperts | MasterExperts,
    names: Mapping[str, tuple[MeshAxes, ...]],
    axes: Axes,
    sizes: Mapping[str, int],
) -> None:
    for name, array in held.arrays().items():
        for size, given in zip(array.shape, names[name], strict=False):
            ways = prod(sizes.get(axis, 1) for axis in names_of(given))
            if size % ways:
                raise ValueError(
                    f"`axes` (={dict(axes)}) must divide `{name}` (shape {tuple(array.shape)}) evenly, over {ways} "
                    "devices: experts that a mesh does not divide need slots, `spare_experts` of a module"
                )
