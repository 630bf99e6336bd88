"""The arrays of experts: the shapes and dtypes that they must have, and the mesh axes that split them.

Shapes and dtypes are checked before a call: mapping over a pytree may slice, cast or mix its arrays, while its static
sizes do not change.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.experts.creation import check_bias_dtype
from jmx.experts.experts import ROLES, Experts
from jmx.meshes import MeshAxes
from jmx.numerics import layouts
from jmx.numerics.formats import BlockScaled
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.util.checks import check_array, check_instance

Axes = Mapping[str, MeshAxes]  # by logical axis

# Logical axes of the arrays of each role. Layouts keep the expert axis first.
LOGICAL_AXES = {"gate_up": ("expert", "intermediate", "hidden"), "down": ("expert", "hidden", "intermediate")}


def check_arrays(experts: Experts) -> None:
    """Raises ValueError or TypeError, naming the array, unless these are experts of one layer whose arrays fit.

    Arrays must fit the sizes, format, order of gate and up, layout and input format, and each other in the number of
    experts. They may be abstract or traced, of one layer, or of a stack with an `index`.
    """
    for role in ROLES:
        if not isinstance(getattr(experts, role), BlockScaled):
            raise TypeError(f"`experts.{role}` (={getattr(experts, role)!r}) must be a BlockScaled")
    lead = _leading(experts)
    for name, array, expected, dtypes in _expected(experts, lead):
        _check_array(experts, f"experts.{name}", array, expected, dtypes)


def expected_shapes(experts: Experts) -> dict[str, tuple[int, ...]]:
    """The shapes that the arrays of experts, or of a stack of them, must have, by name. Leading axes are kept."""
    values = experts.gate_up.values
    rank = layouts.abstract(experts.layout, experts.spec("gate_up")).values.ndim - 1  # of one expert's
    lead = tuple(values.shape[: len(values.shape) - rank])
    return {name: shape for name, _, shape, _ in _expected(experts, lead) if shape is not None}


def _leading(experts: Experts) -> tuple[int, ...]:
    """Leading axes of gate_up's values: (E,), or (L, E) of a stack with an index; errors for others."""
    index, values = experts.index, experts.gate_up.values
    check_array("experts.gate_up_values", values, abstract=True)
    rank = layouts.abstract(experts.layout, experts.spec("gate_up")).values.ndim - 1  # of one expert's
    stacked = int(index is not None)
    if index is None and len(values.shape) == rank + 2:
        raise ValueError(
            f"`experts` (gate_up_values of shape {values.shape}) must be those of one layer: "
            "pass `experts.layer(i)`, not the stack"
        )
    if len(values.shape) != rank + 1 + stacked:
        raise ValueError(
            f"`experts.gate_up_values` (shape {values.shape}) must have {rank + 1 + stacked} axes, "
            f"{'layers, ' * stacked}experts and those of {experts.layout!r}"
        )
    if index is not None:
        check_array("experts.index", index, abstract=True)
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(f"`experts.index` (dtype {index.dtype}) must be an integer")
        if index.shape != ():
            raise ValueError(f"`experts.index` (shape {index.shape}) must be (), the number of one layer")
    return tuple(values.shape[: 1 + stacked])


def _expected(
    experts: Experts, lead: tuple[int, ...]
) -> Iterator[tuple[str, Any, tuple[int, ...] | None, tuple[Any, ...]]]:
    """Name, array, required shape (None: the array must be None), and allowed dtypes."""
    static = experts.input_format is not None and INPUT_FORMATS[experts.input_format].static
    for role in ROLES:
        q, spec = getattr(experts, role), experts.spec(role)
        dtypes = [layouts.abstract(experts.layout, spec, dtype) for dtype in spec.format.scale_dtypes]
        for field, array, *wanted in zip(BlockScaled._fields, q, *dtypes, strict=True):
            shape = None if wanted[0] is None else (*lead, *wanted[0].shape[1:])
            yield f"{role}_{field}", array, shape, tuple(w.dtype for w in wanted if w is not None)
        bias = getattr(experts, f"{role}_bias")
        if bias is not None:
            yield f"{role}_bias", bias, (*lead, spec.shape[0]), ()
        scale = getattr(experts, f"{role}_input_scale")
        yield f"{role}_input_scale", scale, lead[:-1] if static else None, (np.dtype(np.float32),)


def _check_array(
    experts: Experts, name: str, array: Any, shape: tuple[int, ...] | None, dtypes: tuple[Any, ...]
) -> None:
    weights = f"{experts.format.name} weights in {experts.layout!r}"
    if shape is None:
        if array is not None:
            raise TypeError(f"`{name}` (a {type(array).__name__}) must be None for {weights}")
        return
    check_array(name, array, abstract=True)
    if tuple(array.shape) != shape:
        sizes = "hidden_size={} and intermediate_size={}".format(*experts.array_sizes)
        raise ValueError(
            f"`{name}` (shape {tuple(array.shape)}) must be {shape}, for {experts.num_experts} experts of {sizes}, "
            f"{weights}{_sharding_hint()}"
        )
    if dtypes and array.dtype not in dtypes:
        wanted = " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise TypeError(f"`{name}` (dtype {array.dtype}) must be {wanted} for {weights}: arrays must not be cast")
    if not dtypes:
        check_bias_dtype(name, array)


def _sharding_hint() -> str:
    """The likely reason why arrays do not fit inside `jax.shard_map`."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if not axes:
        return ""
    return (
        f". Inside jax.shard_map (over {', '.join(map(repr, axes))}) the arrays of jmx.Experts can be split along "
        "'expert' only, and those of jmx.ShardedExperts along their shards, too: gather others with jax.lax.all_gather"
    )


def check_axes(axes: Axes, *others: str) -> None:
    """Raises ValueError for logical axes that are not of weights, nor `others`, TypeError for values that name none."""
    check_instance("axes", axes, Mapping, "a mapping of logical axes to mesh axes")
    known = (*LOGICAL_AXES["gate_up"], *others)
    if unknown := set(axes) - set(known):
        raise ValueError(f"`axes` (={dict(axes)}) must name logical axes among {known}, not {sorted(unknown)}")
    for logical, names in axes.items():
        check_mesh_axes(f"axes[{logical!r}]", names)


def check_mesh_axes(argument: str, given: Any) -> None:
    """Raises TypeError unless the value of an argument is `MeshAxes`."""
    names, known = (given, str) if isinstance(given, tuple) else ((given,), str | None)
    for name in names:
        check_instance(argument, name, known, "the name of a mesh axis, a tuple of those, or None")


def has_expert_axis(name: str) -> bool:
    """Whether an array of `Experts.arrays` has an axis of experts: all but scales of inputs, one for all experts."""
    return not name.endswith("_input_scale")


def partition_names(experts: Experts, axes: Axes) -> dict[str, tuple[MeshAxes, ...]]:
    """The mesh axes that split each axis of each array, by the names of `Experts.arrays`.

    `axes`: mesh axes of the logical axes "expert", "hidden" and "intermediate". Axes that are left out are not split,
    nor is the axis of layers of a stack.
    """
    check_axes(axes)
    names, layers = {}, len(experts.canonical_shape()) - 3
    for name, array in experts.arrays().items():
        expert, rows, columns = next(LOGICAL_AXES[role] for role in ROLES if name.startswith(role))
        logical = (expert, columns) if name.endswith("_order") else (expert, rows, columns)
        names[name] = (*(None,) * layers, *(axes.get(axis) for axis in logical[: array.ndim - layers]))
    return names
