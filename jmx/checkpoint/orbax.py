"""Saving a Flax NNX module with 4-bit experts to Orbax, and restoring it into any layout."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jmx.atomic_files import check_new, new_path
from jmx.checkpoint import orbax_arrays
from jmx.checkpoint.shards import CheckpointError
from jmx.experts import Experts
from jmx.nnx import MoE

_NOTE = "jmx_experts"


class _Layer(NamedTuple):
    """A MoE layer of a module: where its arrays stand in the flat state, and its experts."""

    prefix: str
    experts: Experts

    def named(self) -> dict[str, Any]:
        return {self.prefix + name: array for name, array in self.experts.arrays().items()}

    def note(self) -> dict[str, Any]:
        """What must be known of the experts, beside their arrays, to read them."""
        experts = self.experts
        return {"layout": experts.layout, "gate_up_order": experts.gate_up_order, "format": experts.format.name}


def save(path: str | os.PathLike[str], module: nnx.Module) -> None:
    """Saves all variables of `module` as an Orbax checkpoint, experts in the layout in which they lie.

    Arrays are named by their path in the module, such as "layers.0.moe.gate_up_values"; the checkpoint's custom
    metadata say each MoE layer's layout, order of gate and up, and format. `path` appears when it is complete.

    Raises:
        FileExistsError, FileNotFoundError: `path` exists, or the directory that should hold it does not.
    """
    check_new(path)
    arrays, layers = _flatten(module)
    # Orbax too writes beside and renames, but leaves its directory there on errors. Where several processes write one
    # checkpoint together, only Orbax can see to it.
    alone = jax.process_count() == 1
    with new_path(path) if alone else contextlib.nullcontext(Path(path)) as place:
        orbax_arrays.write(place, arrays, {_NOTE: {layer.prefix: layer.note() for layer in layers}})


def restore[M: nnx.Module](path: str | os.PathLike[str], module: M) -> M:
    """The module that `save` wrote, with the structure, the layouts and the shardings of `module`.

    Args:
        path: the checkpoint.
        module: of the same structure; its layouts may differ. Its values are not looked at, so
            `nnx.eval_shape(lambda: Model(...))` does, and then only the restored weights are held. Variables that say
            no place go to the whole mesh on which others lie, else to the default device.

    Returns:
        A new module; expert weights have the bits that were saved, in the layouts of `module`.

    Raises:
        CheckpointError: no checkpoint, or one whose arrays or experts are not those of `module`, naming the first one.
    """
    path = Path(path)
    graph, state = nnx.split(module)
    arrays, layers = _flatten(module)
    stored = orbax_arrays.describe(path)
    notes = (stored.note or {}).get(_NOTE)
    if notes is None:
        raise CheckpointError(path, f"must be a checkpoint that jmx saved: its custom metadata lack {_NOTE!r}")
    places = _places(arrays)
    wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=places[name]) for name, a in arrays.items()}
    as_saved = []
    for layer in layers:
        note = notes.get(layer.prefix, {})
        for key, value in layer.note().items():
            if key != "layout" and note.get(key) != value:
                raise CheckpointError(path, f"`{key}` of {layer.prefix!r} is {note.get(key)!r}, but must be {value!r}")
        layout = note["layout"]
        saved = _Layer(
            layer.prefix, jax.eval_shape(lambda experts, layout=layout: experts.prepare(layout), layer.experts)
        )
        as_saved.append(saved)
        wanted |= {n: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=places[n]) for n, a in saved.named().items()}
    orbax_arrays.check(path, stored.arrays, wanted)
    read = orbax_arrays.read(path, wanted)
    for layer, saved in zip(layers, as_saved, strict=True):
        experts = saved.experts.with_arrays(
            {name.removeprefix(layer.prefix): read.pop(name) for name in layer.named()}
        ).prepare(layer.experts.layout, donate=True)
        read |= _Layer(layer.prefix, experts).named()
    flat = [(key, variable.replace(read[_name(key)])) for key, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _name(key: tuple[Any, ...]) -> str:
    return ".".join(map(str, key))


def _flatten(module: nnx.Module) -> tuple[dict[str, Any], list[_Layer]]:
    """All arrays (or their shapes) by name, and the MoE layers."""
    arrays = {_name(key): variable.get_value() for key, variable in nnx.to_flat_state(nnx.state(module))}
    layers = []
    for key, node in nnx.iter_graph(module):
        if isinstance(node, MoE):
            prefix = "".join(f"{part}." for part in key)
            its_arrays = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            layers.append(_Layer(prefix, node.skeleton.with_arrays(its_arrays)))
    return arrays, layers


def _places(arrays: Mapping[str, Any]) -> dict[str, Sharding]:
    """Where each array (or shape) belongs: where it was put, else beside those that were put on a mesh."""
    put = {name: a.sharding for name, a in arrays.items() if a.sharding is not None and getattr(a, "committed", True)}
    meshes = [sharding.mesh for sharding in put.values() if isinstance(sharding, NamedSharding)]
    elsewhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else SingleDeviceSharding(jax.devices()[0])
    return {name: put.get(name, elsewhere) for name in arrays}
