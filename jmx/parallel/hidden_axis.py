"""Weights divided along their hidden axis (FSDP): which axis of each array is divided, and gathering them.

The arrays of a layout do not all have a hidden axis, or one that a mesh divides: 90 scales of a row of gpt-oss are not
a multiple of 4. Gathered arrays are whole, so another axis of the same array serves as well.
"""

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from jmx import meshes
from jmx.experts import Experts, ShardedExperts, has_expert_axis
from jmx.experts.arrays import expected_shapes
from jmx.meshes import MeshAxes, names_of
from jmx.parallel.transfer import bits_of, from_bits
from jmx.util.typing import Array, Shaped

# The mesh axes that divide each axis of each array, by the array's name.
AxesOfArrays = dict[str, tuple[MeshAxes, ...]]


def along_hidden(
    experts: Experts | ShardedExperts, names: AxesOfArrays, hidden: MeshAxes, sizes: Mapping[str, int] | None
) -> AxesOfArrays:
    """`names` with the mesh axes of `hidden` added.

    They divide the logical hidden axis of an array, or the last axis (but that of experts, and those that others
    divide) that they divide evenly if that one is not there or uneven. Biases of "gate_up", and scales of inputs,
    have none: they are whole, as are arrays beside the codes none of whose axes is even, such as one scale an expert.

    Args:
        sizes: of the mesh's axes; None: not known, and the logical axis is taken.

    Raises:
        ValueError: codes none of whose axes the mesh divides.
    """
    if not names_of(hidden):
        return names
    ways = prod((sizes or {}).get(name, 1) for name in names_of(hidden))
    arrays, found = experts.arrays(), dict(names)
    for name, entry in names.items():
        if not has_expert_axis(name) or name == "gate_up_bias":
            continue
        lead = int(isinstance(experts, ShardedExperts) and name != "down_bias") + 1
        shape, entry = arrays[name].shape, (*entry, *(None,) * (len(arrays[name].shape) - len(entry)))
        logical = lead if name.startswith("down") and not name.endswith("_order") else min(lead + 1, len(shape) - 1)
        axes = [axis for axis in (logical, *reversed(range(lead, len(shape)))) if axis < len(shape)]
        axis = next((axis for axis in axes if entry[axis] is None and shape[axis] % ways == 0), None)
        if axis is None and not name.endswith("_values"):
            continue  # few numbers, such as one scale an expert
        if axis is None:
            raise ValueError(
                f"`axes['hidden']` (={hidden!r}) must divide an axis of `{name}` (shape {shape}) behind that of "
                f"experts evenly over {ways} devices"
            )
        found[name] = (*entry[:axis], hidden, *entry[axis + 1 :])
    return found


def gather_hidden(
    experts: Experts | ShardedExperts, axes: tuple[str, ...], varying: tuple[str, ...]
) -> Experts | ShardedExperts:
    """The experts of this device whole along `axes`, inside `jax.shard_map`: codes and scales as they are in memory.

    Cotangents of biases are summed over the devices, and each gets those of its part.

    Args:
        axes: mesh axes that divide an axis of each array, the major one first, as by `along_hidden`.
        varying: those along which tokens differ.
    """
    ways = prod(lax.axis_size(axis) for axis in axes)
    if ways == 1:
        return experts.with_arrays({name: _whole(array, axes, varying) for name, array in experts.arrays().items()})
    shards = experts.shards if isinstance(experts, ShardedExperts) else experts
    wanted = expected_shapes(shards)
    if isinstance(experts, ShardedExperts) and experts.down_bias is not None:
        wanted["down_bias"] = (*experts.down_bias.shape[:1], shards.hidden_size)
    arrays = experts.arrays()
    for name, array in arrays.items():
        sizes = zip(array.shape, wanted[name], strict=True)
        if parts := [axis for axis, (size, whole) in enumerate(sizes) if size * ways == whole]:
            arrays[name] = _gathered(array, axes, varying, parts[0])
    return experts.with_arrays(arrays)


def _whole(array: Shaped[Array, "..."], axes: tuple[str, ...], varying: tuple[str, ...]) -> Shaped[Array, "..."]:
    """An array that axes of one device each divide: the same, of a type that varies along those of `varying` only."""
    of_type = tuple(name for name in axes if name not in varying and name in meshes.varying_axes(array))
    return _gathered(array, of_type, (), 0) if of_type else array


def _gathered(
    array: Shaped[Array, "..."], axes: tuple[str, ...], varying: tuple[str, ...], axis: int
) -> Shaped[Array, "..."]:
    quantized = array.dtype.itemsize == 1 or jnp.issubdtype(array.dtype, jnp.integer)
    parts = bits_of(array) if quantized else array  # biases have gradients
    whole = parts
    for name in reversed(axes):
        whole = lax.all_gather(whole, name, axis=axis, tiled=True, to="varying" if name in varying else "invarying")
    shape = tuple(size * (whole.size // parts.size) if at == axis else size for at, size in enumerate(array.shape))
    return from_bits(whole, jax.ShapeDtypeStruct(shape, array.dtype)) if quantized else whole
