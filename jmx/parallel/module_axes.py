"""How the `axes` of the NNX and Linen modules divide their calls, and their weights inside `jax.shard_map`."""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax

from jmx import meshes
from jmx.experts import Axes, check_axes
from jmx.meshes import MeshAxes, Names, names_of
from jmx.parallel.split import AnyMesh, Split
from jmx.util.typing import Shaped

TOKEN = "token"  # the logical axis of x, routing and mask; all others are those of weights


def check_module_axes(axes: Axes) -> None:
    """Raises ValueError or TypeError unless `axes` are mesh axes by logical axes of weights, or by "token".

    If there is a mesh in scope, it has these axes.
    """
    check_axes(axes, TOKEN)
    mesh = jax.sharding.get_abstract_mesh()
    for logical, given in axes.items():
        if len({*names_of(given)}) < len(names_of(given)):
            raise ValueError(f"`axes[{logical!r}]` (={given!r}) must not name a mesh axis twice")
        if not mesh.empty and (missing := [name for name in names_of(given) if name not in mesh.axis_names]):
            known = f"{mesh.axis_names}, not {missing[0]!r}"
            raise ValueError(f"`axes[{logical!r}]` (={given!r}) must name axes of the mesh, {known}")
    of_weights = [name for logical in ("expert", "intermediate", "hidden") for name in names_of(axes.get(logical))]
    if twice := [name for name in of_weights if of_weights.count(name) > 1]:
        raise ValueError(f"`axes` (={dict(axes)}) must not divide two axes of the weights over {twice[0]!r}")


def weight_axes(axes: Axes | None) -> Axes:
    """Those of weights."""
    return {} if axes is None else {logical: names for logical, names in axes.items() if logical != TOKEN}


def split_of(
    axes: Axes | None, x: Shaped[Any, "*tokens H"], arrays: Mapping[str, Shaped[Any, "..."]], num_shards: int = 1
) -> Split | None:
    """The split of a module's call on x; None for a call on one device.

    "expert" divides the experts, "intermediate" their shards, "token" the first axis of x, routing and mask, and along
    "hidden" weights are gathered. Without "token" it is the Explicit axes that split x which divide tokens; along all
    others tokens are whole on every device, and results are added. The mesh is the one in scope (`jax.set_mesh`), else
    that of x or of the weights. A call is on one device where there is no mesh, or `axes` name none of these.

    Args:
        axes: of the module.
        x: (..., H).
        arrays: the weights, by name.
        num_shards: the shards of the intermediate axis that the module holds.

    Raises:
        ValueError: a mesh that lacks an axis, or divides the intermediate axis of weights that are not in shards; axes
            of which only some are Manual.
    """
    axes = {} if axes is None else axes
    if not any(names_of(axes.get(logical)) for logical in ("expert", "intermediate", "hidden", TOKEN)):
        return None
    mesh = mesh_of(x, arrays)
    if mesh is None:
        return None

    def ways(logical: str) -> int:
        return prod(mesh.shape.get(name, 1) for name in names_of(axes.get(logical)))

    if num_shards == 1 and ways("intermediate") > 1:
        raise ValueError(
            f"`axes['intermediate']` (={axes['intermediate']!r}) must be axes of 1 device for weights that are not in "
            f"shards, but has {ways('intermediate')}: make the module, or read its variables, with the mesh in scope "
            "(jax.set_mesh)"
        )
    split = Split(
        expert=axes.get("expert"),
        tokens=axes[TOKEN] if TOKEN in axes else _explicit_names(x),
        intermediate=axes.get("intermediate") if num_shards > 1 else None,
        hidden=axes.get("hidden"),
        mesh=mesh,
    )
    split.mesh_of(())  # names axes that the mesh lacks
    return split


def local_shape(shape: tuple[int, ...], names: tuple[MeshAxes, ...]) -> tuple[int, ...]:
    """The shape inside `jax.shard_map` of an array, of whose first axes those in `names` are divided by the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = {*mesh.manual_axes}
    ways = [prod(mesh.shape[name] for name in names_of(given) if name in manual) for given in names]
    parts = (*ways, *(1 for _ in shape[len(ways) :]))  # layouts of kernels have more axes than weights
    return tuple(size // part for size, part in zip(shape, parts, strict=True))


def mesh_of(x: Any, arrays: Mapping[str, Any]) -> AnyMesh | None:
    """The mesh in scope, else that of x, else that of the first of `arrays` that has one."""
    scope = jax.sharding.get_abstract_mesh()
    found = (jax.typeof(array).sharding.mesh for array in (x, *arrays.values()))
    return next((mesh for mesh in (scope, *found) if not mesh.empty), None)


def _explicit_names(x: Shaped[Any, "*tokens H"]) -> Names:
    return tuple(name for entry in meshes.entries(x)[: len(x.shape) - 1] for name in entry)
