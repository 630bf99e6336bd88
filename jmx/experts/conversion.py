"""Conversion of one weight between layouts; the old arrays are kept or deleted."""

import warnings
from functools import partial
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmx import meshes
from jmx.numerics import layouts
from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import Layout, WeightSpec
from jmx.util.typing import Int32


def convert(
    q: BlockScaled, order: Int32[Any, "*lead I"] | None, source: Layout, target: Layout, spec: WeightSpec
) -> BlockScaled:
    """The weight `q`, converted from the layout `source` to the layout `target`.

    Where a mesh divides experts, each device converts its own, and no array moves: layouts loop over experts, for which
    XLA would gather all of them.

    `order`: the order of the columns of "down", if they have one and `q` is a "gate_up" weight; else None.
    """
    divided = _divided((q, order), q.values.ndim - (layouts.abstract(source.name, spec).values.ndim - 1))
    if divided is None:
        return meshes.on_auto_axes(lambda q, order: _convert(q, order, source, target, spec), q, order)
    mesh, parts = divided
    with jax.set_mesh(mesh):
        return _convert_parts(q, order, source, target, spec, mesh, parts)


def _divided(arrays: Any, num_leading: int) -> tuple[Mesh, PartitionSpec] | None:
    """The mesh and the split of arrays that it divides alike along some of their leading axes, and along no other."""
    mesh = meshes.concrete_mesh(arrays)
    if mesh is None or not all(isinstance(array.sharding, NamedSharding) for array in jax.tree.leaves(arrays)):
        return None
    splits = {(*array.sharding.spec, *(None,) * array.ndim)[: array.ndim] for array in jax.tree.leaves(arrays)}
    leading = {split[:num_leading] for split in splits}
    others = any(entry is not None for split in splits for entry in split[num_leading:])
    if len(leading) > 1 or others or not any(parts := leading.pop()):
        return None
    return mesh, PartitionSpec(*parts)


@partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _convert_parts(
    q: BlockScaled,
    order: Int32[Any, "*lead I"] | None,
    source: Layout,
    target: Layout,
    spec: WeightSpec,
    mesh: Mesh,
    parts: PartitionSpec,
) -> BlockScaled:
    each = jax.shard_map(
        lambda q, order: _convert(q, order, source, target, spec), mesh=mesh, in_specs=parts, out_specs=parts
    )
    return each(q, order)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _convert(
    q: BlockScaled, order: Int32[Any, "*lead I"] | None, source: Layout, target: Layout, spec: WeightSpec
) -> BlockScaled:
    canonical = source.inverse(q, spec, *source.rows(order, spec))
    return target.forward(canonical, spec, *target.rows(order, spec))


def convert_donating(
    q: BlockScaled, order: Int32[Any, "*lead I"] | None, source: Layout, target: Layout, spec: WeightSpec
) -> BlockScaled:
    """`convert`; outside a trace it then deletes the arrays of `q`."""
    converted = convert(q, order, source, target, spec)
    if not isinstance(q.values, Tracer):
        # XLA aliases donated buffers only to outputs of the same dtype; deleting them works for every layout.
        jax.block_until_ready(converted)
        kept = {place for array in jax.tree.leaves(converted) for place in _memory(array)}
        for old in jax.tree.leaves(q):
            if isinstance(old, jax.Array) and not kept & _memory(old):
                old.delete()
    return converted


def _memory(array: jax.Array) -> set[int]:
    """Where the parts of an array are in the memory of this process's devices: arrays may share them."""
    return {part.data.unsafe_buffer_pointer() for part in array.addressable_shards}


def warn_of_rounding(q: BlockScaled, spec: WeightSpec, layout: Layout) -> None:
    """UserWarning if the kernels that read `layout` round blocks of `q`; traced or abstract ones are not checked."""
    if layout.rounds is None or isinstance(q.values, Tracer | jax.ShapeDtypeStruct):
        return
    count_rounded = jax.jit(layout.rounds, static_argnums=1)
    if count := int(meshes.on_auto_axes(lambda q: count_rounded(q, spec), q)):
        warnings.warn(
            f"kernels that read {layout.name!r} round {count} blocks of {spec.role}, whose scales are too far below "
            "the largest of their rows; see docs/internals/mosaic_sm90_fp8.md",
            UserWarning,
            stacklevel=3,
        )


def place_like(old: Any, new: Any) -> Any:
    """The array `new` on the devices of `old`, if neither is traced."""
    if isinstance(old, Tracer) or isinstance(new, Tracer) or not isinstance(old, jax.Array):
        return new
    return jax.device_put(new, old.sharding)
