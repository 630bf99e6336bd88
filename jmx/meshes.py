"""Meshes: which axes of arrays they split, by the types of the arrays, and what of that tokens can follow.

Auto axes do not show in types: XLA splits along them as it likes. Explicit axes do; along these each device can take
its own tokens, as a token's result needs no other token and moves no array, and nothing else may be split. Inside
`jax.shard_map` (Manual axes) arrays are a device's own, and types say along which axes their values vary.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Array = Any
Entry = tuple[str, ...]  # names of the Explicit mesh axes that split one axis of an array


@dataclass(frozen=True)
class Split:
    """How the tokens of a call lie on the devices of a mesh; static.

    Args:
        mesh: the mesh, Explicit along all axes that `leading` names.
        leading: mesh axes that split each leading axis of what goes by token.
    """

    mesh: jax.sharding.AbstractMesh
    leading: tuple[Entry, ...]


def leading_split(num_leading: int, by_token: Mapping[str, Array], whole: Mapping[str, Array]) -> Split | None:
    """How Explicit mesh axes split the leading axes of a call's arrays; None where they split none.

    An array that is whole where another one is split is cut as that one is, which moves nothing: each device has all
    of it.

    Args:
        num_leading: leading axes of what goes by token.
        by_token: arrays by name, (*leading, ...).
        whole: arrays by name of which every device needs all.

    Raises:
        ValueError: an array that is split elsewhere, or in another way than the one before it. It names both.
    """
    leading: list[Entry] = [()] * num_leading
    first = [""] * num_leading
    for name, array in by_token.items():
        check_whole({name: array}, num_leading)
        for axis, entry in enumerate(_entries(array)[:num_leading]):
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
    split = (array for array in (*by_token.values(), *whole.values()) if any(_entries(array)))
    meshes = [jax.typeof(array).sharding.mesh for array in split]  # an axis of size 1 may "split" any axis of any array
    return Split(meshes[0], tuple(leading)) if meshes else None


def check_whole(arrays: Mapping[str, Array], num_leading: int = 0) -> None:
    """Raises ValueError for arrays, by name, that an Explicit mesh axis splits behind `num_leading` axes."""
    for name, array in arrays.items():
        for axis, entry in enumerate(_entries(array)):
            names = [mesh_axis for mesh_axis in entry if jax.typeof(array).sharding.mesh.shape[mesh_axis] > 1]
            if axis >= num_leading and names:
                raise ValueError(
                    f"`{name}` ({jax.typeof(array)}) must not be split along axis {axis}, as it is over mesh axis "
                    f"{_quoted(names)}: on Explicit mesh axes jmx splits tokens and nothing else yet. Replicate the "
                    "array with jax.reshard, or call inside jax.shard_map"
                )
        if unreduced := _spec(array).unreduced:
            raise ValueError(
                f"`{name}` ({jax.typeof(array)}) must not be unreduced over mesh axis {_quoted(unreduced)}: add it up "
                "with jax.reshard"
            )


def over_devices(split: Split, function: Callable[[Any, Any], Any], by_token: Any, whole: Any) -> Any:
    """`function` (by_token, whole), pytrees, on each device's part of what goes by token; its results go by token, too.

    Inside a trace. Cotangents of `whole` are added up over the devices.
    """
    tokens = P(*(entry or None for entry in split.leading))
    # All axes, where that can be, so that no collective and no kernel is left to XLA. Named ones may not be among those
    # that vmap took; where none are named, jax leaves these out by itself.
    auto = AxisType.Auto in split.mesh.axis_types
    names = {name for entry in split.leading for name in entry} if auto else set()
    body = jax.shard_map(function, mesh=split.mesh, in_specs=(tokens, P()), out_specs=tokens, axis_names=names)

    def place(tree: Any, spec: P) -> Any:
        return jax.tree.map(lambda array: _placed(array, NamedSharding(split.mesh, spec)), tree)

    return body(place(by_token, tokens), place(whole, P()))


def over_batch(function: Callable[[Any, Any], Any], batched: list[Array], whole: list[Array]) -> Any:
    """`function` (batched, whole) of a batch (n, ...), inside a trace: each device's elements where it is split.

    For rules of `jax.vmap`, which hides its axis from what is mapped.
    """
    arrays = ({str(i): array for i, array in enumerate(arrays)} for arrays in (batched, whole))
    split = leading_split(1, *arrays)
    return function(batched, whole) if split is None else over_devices(split, function, batched, whole)


def _placed(array: Array, sharding: NamedSharding) -> Array:
    wanted = P(*sharding.spec, *(None,) * (len(array.shape) - len(sharding.spec)))
    return array if _spec(array) == wanted else jax.reshard(array, NamedSharding(sharding.mesh, wanted))


def beside(array: Array, tokens: Array) -> Array:
    """`array`, whole, on each device of the mesh that splits `tokens`, inside a trace.

    Gradients of jax's products lie as their types have it, which name no mesh where none is in scope.
    """
    mesh = jax.typeof(tokens).sharding.mesh
    outside = any(_entries(tokens)) and jax.typeof(array).sharding.mesh.empty
    return jax.reshard(array, NamedSharding(mesh, P(*(None,) * len(array.shape)))) if outside else array


def varying_alike(*trees: Any) -> Any:
    """The pytrees with every array varying along each Manual mesh axis along which any of them does.

    Nothing moves. The cotangent of an array that did not vary is added up over the devices, which share it.
    """
    return _vary(trees, _varying(trees))


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of pytrees, inside of which jax does not check along which Manual mesh axes arrays vary.

    Loops and kernels would have to state it, and of Pallas's not all can. What comes out varies along each axis along
    which any argument does. Not differentiable: that takes the types which are lost inside.
    """

    def call(*arguments: Any) -> Any:
        axes = _varying(arguments)
        if not axes:
            return function(*arguments)
        manual = {*jax.sharding.get_abstract_mesh().manual_axes}  # so that no axis becomes Manual here
        inside = jax.shard_map(untyped, in_specs=P(), out_specs=P(), axis_names=manual, check_vma=False)
        return _vary(inside(*arguments), axes)

    def untyped(*arguments: Any) -> Any:
        # What is computed here has no such type, but arguments keep theirs, and Pallas looks at it.
        return function(*jax.tree.map(lambda array: lax.bitcast_convert_type(array, array.dtype), arguments))

    return call


def _varying(tree: Any) -> set[str]:
    return {axis for leaf in jax.tree.leaves(tree) for axis in jax.typeof(leaf).manual_axis_type.varying}


def _vary(tree: Any, axes: set[str]) -> Any:
    def vary(leaf: Array) -> Array:
        for axis in sorted(axes - jax.typeof(leaf).manual_axis_type.varying):
            leaf = lax.pcast(leaf, axis, to="varying")
        return leaf

    return jax.tree.map(vary, tree) if axes else tree


def _spec(array: Array) -> P:
    return jax.typeof(array).sharding.spec


def _entries(array: Array) -> list[Entry]:
    """Names of the Explicit mesh axes that split each axis of an array."""
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in _spec(array)]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
