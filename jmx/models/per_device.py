"""A module's call on each device of a mesh, with the device's parts of its variables and of the arguments."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jmx.models.model_split import ModelSplit

Keys = tuple[str | None, ...]  # what each axis of an array is divided as, keys of `model_split.DEFAULT_AXES`


def on_each_device(
    split: ModelSplit,
    modules: Sequence[Any],
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, Keys]],
    results: Any,
) -> Any:
    """`function` (*modules, *arguments) on each device, inside `jax.shard_map`.

    Args:
        split: how the devices divide the model.
        modules: whose variables state how they are divided, see `keys_of`.
        arguments: pytrees, and what the axes of their arrays are divided as.
        results: the same of the function's results, a pytree of `Keys`.
    """
    graphdef, state = nnx.split(tuple(modules))
    leaves, treedef = jax.tree.flatten(state)

    def run(leaves: list[jax.Array], *arguments: Any) -> Any:
        return function(*nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves)), *arguments)

    specs = (variable_specs(split, state), *(split.spec(*keys) for _, keys in arguments))
    out_specs = jax.tree.map(lambda keys: split.spec(*keys), results, is_leaf=_is_keys)
    mapped = jax.shard_map(run, mesh=split.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    return mapped(leaves, *(argument for argument, _ in arguments))


def keys_of(variable: nnx.Variable) -> Keys:
    """What each axis of a variable is divided as: its metadata `divided`, nothing if it has none."""
    return variable.get_metadata().get("divided", ())


def local_size(split: ModelSplit | None, variable: nnx.Variable) -> int:
    """Elements of a variable, an array or its shape, on one device."""
    shape = variable.get_value().shape
    return math.prod(shape if split is None else split.sharding(*keys_of(variable)).shard_shape(shape))


def variable_specs(split: ModelSplit, state: Any) -> list[P]:
    """The spec of each array of a state, in the order of its leaves."""
    variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [split.spec(*keys_of(variable)) for variable in variables for _ in jax.tree.leaves(variable)]


def _is_keys(node: Any) -> bool:
    return isinstance(node, tuple) and all(key is None or isinstance(key, str) for key in node)
