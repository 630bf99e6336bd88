"""Meshes: how mesh axes split the arrays of a call, by the arrays' types, and a call on each device's tokens.

Auto axes are not part of an array's type: XLA decides about them. Explicit axes are. They may split tokens only: each
device then computes its own tokens, and no array moves. Inside `jax.shard_map` (Manual axes) arrays are those of one
device, and their types state along which axes their values vary.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx.util.typing import Array, Shaped

NamedArrays = Mapping[str, Shaped[Any, "..."]]
MeshAxes = str | tuple[str, ...] | None  # those that split one axis of an array, as in a `PartitionSpec`
Names = tuple[str, ...]  # of mesh axes, the major one first


@dataclass(frozen=True)
class TokenSplit:
    """How the devices of a mesh share the tokens of a call; static.

    Args:
        mesh: the mesh, Explicit along all axes that `leading` names.
        leading: mesh axes that split each leading axis of the arrays with axes of tokens.
    """

    mesh: jax.sharding.AbstractMesh
    leading: tuple[Names, ...]


def leading_split(num_leading: int, by_token: NamedArrays, whole: NamedArrays) -> TokenSplit | None:
    """How Explicit mesh axes split the leading axes of a call's arrays; None if they split none.

    An array that is replicated while another one is split is then split likewise, which moves nothing.

    Args:
        num_leading: number of leading axes, those of tokens.
        by_token: arrays (*leading, ...) by name.
        whole: by name, arrays that every device needs whole.

    Raises:
        ValueError: an array that is split along other axes or in another way; it names both arrays.
    """
    leading: list[Names] = [()] * num_leading
    first = [""] * num_leading
    for name, array in by_token.items():
        check_whole({name: array}, num_leading)
        for axis, entry in enumerate(entries(array)[:num_leading]):
            if not entry or entry == leading[axis]:
                continue
            if leading[axis]:
                raise ValueError(
                    f"`{name}` ({jax.typeof(array)}) must be split as `{first[axis]}` is, along axis {axis} over "
                    f"{_quoted(leading[axis])}: jmx moves no array to another device. Give both the same sharding, "
                    "with jax.reshard"
                )
            if taken := {*entry} & {mesh_axis for other in leading for mesh_axis in other}:
                raise ValueError(
                    f"`{name}` ({jax.typeof(array)}) must not be split along axis {axis} over {_quoted(taken)}, which "
                    "splits another axis of the tokens. Give all arrays the same sharding, with jax.reshard"
                )
            leading[axis], first[axis] = entry, name
    check_whole(whole)
    split = (array for array in (*by_token.values(), *whole.values()) if any(entries(array)))
    meshes = [jax.typeof(array).sharding.mesh for array in split]  # an axis of size 1 may "split" any axis of any array
    return TokenSplit(meshes[0], tuple(leading)) if meshes else None


def check_whole(arrays: NamedArrays, num_leading: int = 0) -> None:
    """Raises ValueError for arrays, by name, that an Explicit mesh axis splits after the first `num_leading` axes."""
    for name, array in arrays.items():
        for axis, entry in enumerate(entries(array)):
            names = [mesh_axis for mesh_axis in entry if jax.typeof(array).sharding.mesh.shape[mesh_axis] > 1]
            if axis >= num_leading and names:
                raise ValueError(
                    f"`{name}` ({jax.typeof(array)}) must not be split along axis {axis}, as it is over mesh axis "
                    f"{_quoted(names)}: Explicit mesh axes may split tokens only. Replicate the array with "
                    "jax.reshard, or call inside jax.shard_map"
                )
        if unreduced := _spec(array).unreduced:
            raise ValueError(
                f"`{name}` ({jax.typeof(array)}) must not be unreduced over mesh axis {_quoted(unreduced)}: add it up "
                "with jax.reshard"
            )


def over_devices(split: TokenSplit, function: Callable[[Any, Any], Any], by_token: Any, whole: Any) -> Any:
    """`function` (by_token, whole) of pytrees, on each device with its part of `by_token`; results are split likewise.

    To be called while tracing. Cotangents of `whole` are summed over the devices.
    """
    tokens = P(*(entry or None for entry in split.leading))
    # All axes if possible, so that XLA partitions no kernel and adds no collective. Axes that vmap maps over may not be
    # named; if none are named, jax leaves those out by itself.
    auto = AxisType.Auto in split.mesh.axis_types
    names = {name for entry in split.leading for name in entry} if auto else set()
    body = jax.shard_map(function, mesh=split.mesh, in_specs=(tokens, P()), out_specs=tokens, axis_names=names)

    def place(tree: Any, spec: P) -> Any:
        return jax.tree.map(lambda array: placed(array, NamedSharding(split.mesh, spec)), tree)

    return body(place(by_token, tokens), place(whole, P()))


def over_batch(
    function: Callable[[Any, Any], Any], batched: list[Shaped[Any, "..."]], whole: list[Shaped[Any, "..."]]
) -> Any:
    """`function` (batched, whole) of a batch (n, ...), while tracing; if the batch is split, on each device's elements.

    For rules of `jax.vmap`, whose axis is not visible to the mapped function.
    """
    arrays = ({str(i): array for i, array in enumerate(arrays)} for arrays in (batched, whole))
    split = leading_split(1, *arrays)
    return function(batched, whole) if split is None else over_devices(split, function, batched, whole)


def placed(array: Shaped[Any, "*shape"], sharding: NamedSharding) -> Shaped[Any, "*shape"]:
    """The array, resharded unless its type has this split; entries for its last axes may be missing.

    Axes of the mesh that are not Explicit are left out, as they are not part of a type.
    """
    spec = _only(sharding.spec, explicit_names(sharding.mesh))
    wanted = P(*spec, *(None,) * (len(array.shape) - len(spec)))
    return array if _spec(array) == wanted else jax.reshard(array, NamedSharding(sharding.mesh, wanted))


def concrete_mesh(tree: Any) -> Mesh | None:
    """The one mesh of the arrays of a pytree, whatever is on no mesh; None if there are none, or several, or traced
    ones."""
    found = {mesh for array in jax.tree.leaves(tree) if (mesh := _mesh_of(array)) is not None}
    try:
        jax.sharding.get_mesh()
    except ValueError:  # arrays are constants of a function that is being traced
        return None
    return found.pop() if len(found) == 1 else None


def _mesh_of(array: Any) -> Mesh | None:
    if not isinstance(array, jax.Array) or isinstance(array, Tracer):
        return None
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


def on_auto_axes(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` of pytrees of arrays, for which Explicit axes of their mesh are Auto ones, and then Explicit again.

    Explicit axes are part of types, and jax rejects many operations along an axis that they split. While tracing,
    arrays keep their types.
    """
    mesh = concrete_mesh(arguments)
    if mesh is None or not explicit_names(mesh):
        return function(*arguments)
    auto = Mesh(mesh.devices, mesh.axis_names)

    def to(other: Mesh, tree: Any) -> Any:
        def put(array: Any) -> Any:
            place = array.sharding if _mesh_of(array) is not None else None
            return array if place is None else jax.device_put(array, NamedSharding(other, place.spec))

        return jax.tree.map(put, tree)

    moved = to(auto, arguments)
    with jax.set_mesh(auto):
        found = function(*moved)
    return to(mesh, found)


def beside(array: Shaped[Array, "*shape"], tokens: Shaped[Array, "..."]) -> Shaped[Array, "*shape"]:
    """`array`, replicated on the mesh that splits `tokens`, while tracing.

    Without it the type of a product's gradient would have no mesh if none is in scope.
    """
    mesh = jax.typeof(tokens).sharding.mesh
    outside = any(entries(tokens)) and jax.typeof(array).sharding.mesh.empty
    return jax.reshard(array, NamedSharding(mesh, P(*(None,) * len(array.shape)))) if outside else array


def gathered(array: Shaped[Any, "*shape"]) -> Shaped[Any, "*shape"]:
    """The array whole on every device, if Explicit mesh axes split it."""
    whole = P(*(None,) * len(array.shape))
    return jax.reshard(array, NamedSharding(jax.typeof(array).sharding.mesh, whole)) if any(entries(array)) else array


def varying_alike(*trees: Any) -> Any:
    """The pytrees, every array typed as varying along each Manual mesh axis along which any of them varies.

    Nothing moves. The cotangent of an array that did not vary is summed over the devices.
    """
    return _vary(trees, varying_axes(trees))


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of pytrees, inside which jax does not check along which Manual mesh axes arrays vary.

    Loops and kernels would have to state it, which some Pallas kernels cannot. Results vary along each axis along which
    any argument varies. Not differentiable, as that needs the types that are lost inside.
    """

    def call(*arguments: Any) -> Any:
        axes = varying_axes(arguments)
        if not axes:
            return function(*arguments)
        manual = {*jax.sharding.get_abstract_mesh().manual_axes}  # no other axis becomes Manual
        inside = jax.shard_map(untyped, in_specs=P(), out_specs=P(), axis_names=manual, check_vma=False)
        return _vary(inside(*arguments), axes)

    def untyped(*arguments: Any) -> Any:
        # Arguments keep their types, which Pallas checks; values computed from them have none.
        return function(*jax.tree.map(lambda array: lax.bitcast_convert_type(array, array.dtype), arguments))

    return call


def varying_axes(tree: Any) -> set[str]:
    """The Manual mesh axes along which any array of a pytree varies, by its type."""
    return {axis for leaf in jax.tree.leaves(tree) for axis in jax.typeof(leaf).manual_axis_type.varying}


def _vary(tree: Any, axes: set[str]) -> Any:
    def vary(leaf: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        for axis in sorted(axes - jax.typeof(leaf).manual_axis_type.varying):
            leaf = lax.pcast(leaf, axis, to="varying")
        return leaf

    return jax.tree.map(vary, tree) if axes else tree


def _spec(array: Shaped[Any, "..."]) -> P:
    return jax.typeof(array).sharding.spec


def names_of(axes: MeshAxes) -> Names:
    """The names of mesh axes that are given in any form: none, one or several."""
    return axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def entries(array: Shaped[Any, "..."]) -> list[Names]:
    """The Explicit mesh axes that split each axis of an array."""
    return [*map(names_of, _spec(array))]


def explicit_names(mesh: jax.sharding.AbstractMesh | jax.sharding.Mesh) -> set[str]:
    """The Explicit axes of a mesh."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in kinds if kind == AxisType.Explicit}


def _only(spec: P, names: set[str]) -> P:
    """A spec without the mesh axes that are not among `names`."""
    kept = [tuple(name for name in names_of(entry) if name in names) for entry in spec]
    return P(*(entry or None for entry in kept))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
