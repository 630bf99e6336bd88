"""The guard: an error where mesh axes divide weights that a call needs whole, instead of a gather of all weights.

Along Auto axes it is XLA that decides how arrays are divided, and a kernel is opaque to it: weights that turn out
divided would be gathered on every device in front of the kernel, at each call. `jax.experimental.custom_partitioning`
sees what XLA decided, while a program for several devices is compiled. In one for a single device nothing is added.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
from jax.core import Tracer
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding

from jmx.util.typing import Array, Shaped

_REMEDY = (
    "XLA would gather the weights on every device at each call. Name the mesh axes that divide the layer, with "
    "`split=jmx.Split(...)` of jmx.moe or the `axes` of a module, or replicate the weights with jax.device_put"
)


def check_not_divided(arrays: Mapping[str, Shaped[Any, "..."]]) -> None:
    """Raises ValueError for an array, by name, that is on several devices in parts. Traced arrays are not checked."""
    for name, array in arrays.items():
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            _check(name, array.shape, array.sharding)


def guarded(arrays: Mapping[str, Shaped[Array, "..."]]) -> Mapping[str, Shaped[Array, "..."]]:
    """The arrays, unchanged, while tracing. Compiling for a mesh that divides one of them is an error that names it.

    The error is a JaxRuntimeError, as XLA raises it. An exported program (`jax.export`) is not guarded: jax cannot
    serialize what sees the shardings.
    """
    if not _may_be_divided(arrays):
        return arrays
    names = tuple(arrays)
    return dict(zip(names, _guard_p.bind(*arrays.values(), names=names, guard=_jaxpr(arrays)), strict=True))


def _may_be_divided(arrays: Mapping[str, Shaped[Array, "..."]]) -> bool:
    """Whether XLA may divide arrays: along Auto axes of a mesh in scope or in their types, or of one not known here."""
    meshes = [jax.typeof(array).sharding.mesh for array in arrays.values()]
    known = [mesh for mesh in (jax.sharding.get_abstract_mesh(), *meshes) if not mesh.empty]
    if not known:
        return jax.device_count() > 1
    # Without devices, programs are exported, not compiled.
    return any(has_auto_axes(mesh) for mesh in known if mesh.abstract_device is not None)


def has_auto_axes(mesh: jax.sharding.AbstractMesh) -> bool:
    """Whether `mesh` has an Auto axis of several devices, along which XLA decides how arrays are divided."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind == AxisType.Auto and mesh.shape[name] > 1 for name, kind in kinds)


def _check(name: str, shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> None:
    """ValueError if `sharding` divides an array."""
    if sharding.is_fully_replicated:
        return
    part = sharding.shard_shape(shape)
    axis = next(axis for axis, (size, its) in enumerate(zip(shape, part, strict=True)) if size != its)
    over = f"{-(-shape[axis] // part[axis])} devices"
    if isinstance(sharding, NamedSharding):
        entry = sharding.spec[axis]
        names = entry if isinstance(entry, tuple) else (entry,)
        over = f"mesh axis {', '.join(map(repr, names))} ({over})"
    raise ValueError(
        f"`experts.{name}` (shape {shape}) must not be divided along axis {axis} over {over} in a call without a "
        f"split: {_REMEDY}"
    )


def _jaxpr(arrays: Mapping[str, Shaped[Array, "..."]]) -> Any:
    """The guard of arrays of these names and types."""
    return jax.make_jaxpr(_partitioned(tuple(arrays)))(*arrays.values())


@cache
def _partitioned(names: tuple[str, ...]) -> Any:
    """The identity of arrays of these names, whose partitioning is an error unless all are replicated."""

    @custom_partitioning
    def identity(*arrays: Shaped[Array, "..."]) -> tuple[Shaped[Array, "..."], ...]:
        return arrays

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results  # whatever XLA chose: they are replicated, as the arguments are
        for name, argument in zip(names, arguments, strict=True):
            _check(name, argument.shape, argument.sharding)
        replicated = tuple(argument.sharding for argument in arguments)
        return mesh, lambda *arrays: arrays, replicated, replicated

    def rule(mesh: Any, arguments: Any, results: Any) -> SdyShardingRule:
        """No factor of an argument's axis is in another array: what XLA decides about others does not reach it."""
        del mesh
        factors = (f"f{number}" for number in range(sum(len(its.shape) for its in (*arguments, *results))))
        both = (tuple(ArrayMapping(*(next(factors) for _ in a.shape)) for a in its) for its in (arguments, results))
        return SdyShardingRule(*both)

    def replicate(mesh: Any, arguments: Any, results: Any) -> Any:
        """For XLA's partitioner before Shardy: no decision."""
        del arguments
        return tuple(NamedSharding(mesh, jax.sharding.PartitionSpec()) for _ in results)

    identity.def_partition(partition, infer_sharding_from_operands=replicate, sharding_rule=rule)
    return identity


def _evaluate(*arrays: Any, names: tuple[str, ...], guard: Any) -> Any:
    """The guard of arrays that are not traced, with jit disabled."""
    del guard
    check_not_divided(dict(zip(names, arrays, strict=True)))
    return arrays


def _lower(context: Any, *arrays: Any, names: tuple[str, ...], guard: Any) -> Any:
    del names
    if context.module_context.lowering_parameters.for_export:
        return arrays
    return mlir.lower_fun(jaxpr_as_fun(guard), multiple_results=True)(context, *arrays)


# `guard` is a parameter for jax to see that its lowering depends on the devices.
_guard_p = Primitive("jmx_guard")
_guard_p.multiple_results = True
_guard_p.def_abstract_eval(lambda *arrays, names, guard: arrays)
_guard_p.def_impl(_evaluate)
mlir.register_lowering(_guard_p, _lower)
