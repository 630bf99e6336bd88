"""Saving a Flax NNX module with quantized experts to Orbax, and restoring it into any layout."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jmx.checkpoint import orbax_arrays
from jmx.checkpoint.orbax_metadata import KEY, Layer, Saved, note_of, saved_as
from jmx.experts import ROLES
from jmx.nnx import MoE
from jmx.parallel.experts_form import QuantizedExperts, inner, whole_experts
from jmx.parallel.placed_experts import PlacedExperts
from jmx.qat import MasterExperts
from jmx.util.atomic_files import check_new, new_path
from jmx.util.checks import check_instance, check_path


def save(path: str | os.PathLike[str], module: nnx.Module) -> None:
    """Saves all variables of `module` as an Orbax checkpoint, experts in their present layout.

    Arrays are named by their path in the module, such as "layers.0.moe.gate_up_values". The custom metadata of the
    checkpoint describe each MoE layer, see `jmx.checkpoint.orbax_metadata`. `path` appears when it is complete.

    Raises:
        FileExistsError, FileNotFoundError: `path` exists, or the directory that should hold it does not.
        TypeError, ValueError: `module` is not a module, a variable has no value, two have one name, or a MoE layer
            shares weights with another.
    """
    path = check_path("path", path)
    check_instance("module", module, nnx.Module, "a flax.nnx.Module")
    check_new(path)
    arrays, layers = _flatten(module)
    for name, array in arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise TypeError(f"variable {name!r} of `module` (a ShapeDtypeStruct) must have a value")
    note = note_of(layers)
    # Orbax also writes to a temporary directory and renames it, but leaves that behind on errors. If several processes
    # write one checkpoint together, only Orbax can coordinate them.
    alone = jax.process_count() == 1
    with new_path(path) if alone else contextlib.nullcontext(Path(path)) as place:
        orbax_arrays.write(place, arrays, note)


def restore[M: nnx.Module](path: str | os.PathLike[str], module: M) -> M:
    """The module that `save` wrote, with the structure, the layouts and the shardings of `module`.

    Args:
        path: the checkpoint.
        module: of the same structure; its layouts may differ. Its values are not read, so
            `nnx.eval_shape(lambda: Model(...))` suffices, and only the restored weights are in memory. A model that is
            split over a mesh is made under `jax.set_mesh`. Variables without a sharding are replicated over the mesh
            of the others, else put on the default device. Experts that were saved in another layout are read with the
            sharding of `module` if their shapes allow it, else split along the axis of experts alone, and resharded
            after the conversion. So are experts in other shards or slots than those of `module`; spare slots are then
            empty, unless both have the same slots.

    Returns:
        A new module; expert weights have the bits that were saved, in the layouts of `module`.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one whose arrays or experts differ from those of `module` in
            more than the layout. It names the file and the first array or key.
        TypeError, ValueError: as `save`, and for a module that is split over a mesh without devices.
    """
    path = check_path("path", path)
    check_instance("module", module, nnx.Module, "a flax.nnx.Module")
    arrays, layers = _flatten(module)
    graph, state = nnx.split(module)
    stored = orbax_arrays.describe(path)
    found = saved_as(orbax_arrays.note(path, stored, KEY), layers)
    places = _places(arrays)
    wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=places[name]) for name, a in arrays.items()}
    as_saved = [_in_form(layer, saved) for layer, saved in zip(layers, found, strict=True)]
    for layer, saved in zip(layers, as_saved, strict=True):
        if _kind(saved) != _kind(layer):
            for name in layer.named():
                wanted.pop(name)
            wanted |= {
                name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_reading_place(layer, name, a.shape, places))
                for name, a in saved.named().items()
            }
    orbax_arrays.check(path, stored.arrays, wanted)
    read = orbax_arrays.read(path, wanted)
    for layer, saved in zip(layers, as_saved, strict=True):
        held = saved.experts.with_arrays({n.removeprefix(layer.prefix): read.pop(n) for n in saved.named()})
        moved = Layer(layer.path, _moved(held, saved, layer)).named()
        read |= {name: jax.device_put(array, places[name]) for name, array in moved.items()}
    flat = [(key, variable.replace(read[_name(key)])) for key, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def saved_layers(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The entries that describe each MoE layer of a checkpoint, by the layer's path in the module, unchecked.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
    """
    path = check_path("path", path)
    layers = orbax_arrays.note(path, orbax_arrays.describe(path), KEY).object("layers")
    return {name: layers.object(name).entries for name in layers.entries}


def _name(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))


def _flatten(module: nnx.Module) -> tuple[dict[str, Any], list[Layer]]:
    """All arrays (or their shapes) by name, and the MoE layers. TypeError, ValueError as in `save`."""
    arrays: dict[str, Any] = {}
    for key, variable in nnx.to_flat_state(nnx.state(module)):
        name, array = _name(key), variable.get_value()
        if not isinstance(array, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
            raise TypeError(f"variable {name!r} of `module` (a {type(array).__name__}) must be an array")
        if name in arrays:
            raise ValueError(f"`module` must not have two variables that are called {name!r}")
        arrays[name] = array
    layers = [(_name(key), node) for key, node in nnx.iter_graph(module) if isinstance(node, MoE)]
    # Master weights are arrays like all others.
    return arrays, [_layer(name, its, arrays) for name, its in layers if not isinstance(its.skeleton, MasterExperts)]


def _layer(path: str, moe: MoE, arrays: Mapping[str, Any]) -> Layer:
    """The layer at `path`, with shapes in place of arrays and without shardings."""
    skeleton = moe.skeleton
    assert not isinstance(skeleton, MasterExperts), "left out by `_flatten`"
    prefix = Layer(path, skeleton).prefix
    shapes = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
    for name in (f"{role}_{name}" for role in ROLES for name in inner(skeleton).format.arrays):
        if name not in shapes:
            raise ValueError(f"`module` must have {prefix + name!r} in one place only, but shares it with another")
    shapes = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in shapes.items()}
    return Layer(path, skeleton.with_arrays(shapes), moe.form)


def _in_form(layer: Layer, saved: Saved) -> Layer:
    """The shapes of a layer in another layout and form."""
    if saved.form == layer.form:
        return Layer(layer.path, jax.eval_shape(lambda its: its.prepare(saved.layout), layer.experts), saved.form)
    experts = jax.eval_shape(whole_experts, layer.experts)
    return Layer(
        layer.path, jax.eval_shape(lambda its: saved.form.apply(its).prepare(saved.layout), experts), saved.form
    )


def _kind(layer: Layer) -> tuple[Any, ...]:
    """What decides on the names and shapes of a layer's arrays."""
    return inner(layer.experts).layout, layer.form


def _places(arrays: Mapping[str, Any]) -> dict[str, Sharding]:
    """The sharding of each array (or shape): its own if it was placed, else replicated over the mesh of the others."""
    put = {
        name: _of_devices(name, a.sharding)
        for name, a in arrays.items()
        if getattr(a, "sharding", None) is not None and getattr(a, "committed", True)
    }
    meshes = [sharding.mesh for sharding in put.values() if isinstance(sharding, NamedSharding)]
    elsewhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else SingleDeviceSharding(jax.devices()[0])
    return {name: put.get(name, elsewhere) for name in arrays}


def _of_devices(name: str, sharding: Sharding) -> Sharding:
    """`sharding` itself, or over the mesh in scope if it has a mesh without devices, as under `nnx.eval_shape`."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, AbstractMesh):
        return sharding
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.shape_tuple != sharding.mesh.shape_tuple:
        raise ValueError(
            f"`module` has {name!r} split over a mesh of {dict(sharding.mesh.shape)} and no devices: "
            "restore inside `jax.set_mesh` of one that has them"
        )
    return NamedSharding(mesh, sharding.spec)


def _reading_place(layer: Layer, name: str, shape: tuple[int, ...], places: Mapping[str, Sharding]) -> Sharding:
    """The sharding with which an array of `shape` is read, before it is converted and moved to those of `layer`.

    It is that of the layer's array of this name if the shape allows it, else split along the axis of experts alone,
    which every layout has. Mesh axes are not Explicit, since jax rejects most operations of a layout under those.
    """
    of_values = f"{layer.prefix}gate_up_values"
    place = places.get(name, places[of_values])
    if not isinstance(place, NamedSharding):
        return place
    mesh = Mesh(np.asarray(place.mesh.devices), place.mesh.axis_names)
    if name not in places or len(layer.named()[name].shape) != len(shape):  # in other shards, or no slots
        return NamedSharding(mesh, PartitionSpec())
    spec = [*place.spec]
    while spec and spec[-1] is None:
        spec.pop()
    kept = len(inner(layer.experts).canonical_shape()) - 2
    for entries in (spec, spec[:kept]):
        with contextlib.suppress(ValueError):
            if len(entries) <= len(shape):
                sharding = NamedSharding(mesh, PartitionSpec(*entries))
                sharding.shard_shape(shape)
                return sharding
    return NamedSharding(mesh, PartitionSpec())


def _moved(held: QuantizedExperts, saved: Layer, wanted: Layer) -> QuantizedExperts:
    """What was saved in the layout and the form of `wanted`, on its own mesh, whichever is in scope.

    Frees the old arrays.
    """
    layout, mesh = inner(wanted.experts).layout, getattr(inner(held).gate_up.values.sharding, "mesh", None)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        if saved.form == wanted.form:
            return held.prepare(layout, donate=True)
        same = ("spare_experts", "num_ranks")
        alike = all(getattr(saved.form, name) == getattr(wanted.form, name) for name in same)
        placement = held.placement if isinstance(held, PlacedExperts) and alike else None
        experts = whole_experts(held)
        if mesh is not None:
            experts = jax.device_put(experts, NamedSharding(mesh, PartitionSpec()))
        return wanted.form.apply(experts, placement).prepare(layout)
