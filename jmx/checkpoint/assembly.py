"""The last step of every loader: from packed arrays to `jmx.Experts` in the layout of this machine."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from jmx.backends import resolve_layout
from jmx.checkpoint.placement import ShardingLike, sharding_of
from jmx.experts import ROLES, Experts, padding
from jmx.numerics.formats import BlockScaled, Format
from jmx.selection.environment import Environment
from jmx.util.typing import Array, Shaped


def experts_of(
    read: Callable[[], Mapping[str, Shaped[Array, "..."]]],
    format: Format,
    gate_up_order: str | None,
    layout: str,
    sharding: ShardingLike,
    input_format: str | None = None,
    *,
    pad: bool = False,
) -> Experts:
    """Experts made of arrays that a loader reads.

    Args:
        read: returns the packed arrays by their names in `Experts.arrays`. It is called after all other checks.
        format: of the weights.
        gate_up_order: as in `Experts`.
        layout: a name in `jmx.numerics.layouts.LAYOUTS`; "auto" is chosen for this machine.
        sharding: of the arrays, before and after they are converted to the layout; see `sharding_of`.
        input_format: the inputs' format that the checkpoint declares, on which "auto" depends; None: 16 bits.
        pad: whether sizes are padded to whole blocks of weights and inputs; see `Experts.pad`.

    Raises:
        ValueError: an unknown `layout`, or one that does not support `format`.
    """
    resolve_layout(layout, Environment.probe(), format)  # rejects an unknown one before anything is read
    arrays = dict(read())
    gate_up, down = (BlockScaled(**{n: arrays[f"{role}_{n}"] for n in format.arrays}) for role in ROLES)
    experts = Experts.of(
        gate_up,
        down,
        arrays.get("gate_up_bias"),
        arrays.get("down_bias"),
        gate_up_order=gate_up_order,
        format=format,
    )
    if pad:
        unit = padding.unit_of(format, input_format)
        experts = experts.pad(*(-(-size // unit) * unit for size in experts.array_sizes))
    wanted = {name: sharding_of(name, sharding) for name in arrays}
    del arrays, gate_up, down  # the layout's arrays replace them one by one
    layout = resolve_layout(layout, Environment.probe(experts), format, input_format)
    return put(experts.prepare(layout, donate=True), wanted)


class ExpertMesh(NamedTuple):
    """The devices that have parts of a layer's experts: a mesh, and its axes that divide them."""

    mesh: Mesh
    axes: Any


def mesh_of_experts(shardings: Iterable[Sharding | None]) -> ExpertMesh | None:
    """Those of arrays with these shardings; None unless the first axis of each, and no other, is divided alike."""
    found = [*dict.fromkeys(shardings)]
    if len(found) != 1 or not isinstance(found[0], NamedSharding) or not isinstance(found[0].mesh, Mesh):
        return None
    mesh, (first, *others) = found[0].mesh, (*found[0].spec, None)
    return None if first is None or any(others) else ExpertMesh(mesh, first)


def prepared_over(its: ExpertMesh, experts: Experts, layout: str) -> Experts:
    """Experts in another layout, while tracing: each device makes it of its own, and no array moves.

    Of arrays, `Experts.prepare` does so.
    """
    mesh = Mesh(its.mesh.devices, its.mesh.axis_names, axis_types=(AxisType.Auto,) * len(its.mesh.axis_names))
    spec = PartitionSpec(its.axes)
    return jax.shard_map(lambda experts: experts.prepare(layout), mesh=mesh, in_specs=spec, out_specs=spec)(experts)


def per_device[Tree](floats: Tree, sharding: Sharding, make: Callable[[Tree], Experts]) -> Experts:
    """What `make` returns of each device's slice of arrays, as experts with that sharding of their first axis."""
    leaves, treedef = jax.tree.flatten(floats)
    by_device = [{shard.device: shard.data for shard in leaf.addressable_shards} for leaf in leaves]
    parts = [make(jax.tree.unflatten(treedef, [its[device] for its in by_device])) for device in by_device[0]]
    num_experts = leaves[0].shape[0]

    def joined(*arrays: Shaped[Array, "e ..."]) -> Shaped[Array, "E ..."]:
        shape = (num_experts, *arrays[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, [*arrays])

    return jax.tree.map(joined, *parts)


def put(experts: Experts, sharding: ShardingLike) -> Experts:
    """`experts` with each array placed by `sharding`; see `sharding_of`. ValueError if one cannot split its array."""
    arrays = experts.arrays()
    wanted = {name: sharding_of(name, sharding) for name in arrays}
    return experts.with_arrays(arrays | {n: jax.device_put(arrays[n], s) for n, s in wanted.items() if s is not None})
