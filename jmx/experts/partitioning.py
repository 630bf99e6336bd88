"""Which mesh axes split which axes of experts' arrays."""

from collections.abc import Mapping

from jmx.experts.experts import ROLES, Experts
from jmx.util.checks import check_instance

MeshAxes = str | tuple[str, ...] | None  # along which one axis of an array is split
Axes = Mapping[str, MeshAxes]  # by logical axis

# Logical axes of the arrays of each role. Layouts keep the expert axis first.
LOGICAL_AXES = {"gate_up": ("expert", "intermediate", "hidden"), "down": ("expert", "hidden", "intermediate")}


def check_axes(axes: Axes) -> None:
    """Raises ValueError for logical axes that experts do not have, TypeError for values that name no mesh axes."""
    check_instance("axes", axes, Mapping, "a mapping of logical axes to mesh axes")
    known = LOGICAL_AXES["gate_up"]
    if unknown := set(axes) - set(known):
        raise ValueError(f"`axes` (={dict(axes)}) must name logical axes among {known}, not {sorted(unknown)}")
    for logical, names in axes.items():
        for name in names if isinstance(names, tuple) else (names,):
            check_instance(f"axes[{logical!r}]", name, str | None, "the name of a mesh axis, a tuple of those, or None")


def partition_names(experts: Experts, axes: Axes) -> dict[str, tuple[MeshAxes, ...]]:
    """Mesh axis names of each array's axes, for arrays as `Experts.arrays` names them.

    `axes`: mesh axis of the logical axes "expert", "hidden" and "intermediate". One left out is not split, nor is the
    first axis of a stack's arrays, that of layers.
    """
    check_axes(axes)
    names, layers = {}, len(experts.canonical_shape()) - 3
    for name, array in experts.arrays().items():
        expert, rows, columns = next(LOGICAL_AXES[role] for role in ROLES if name.startswith(role))
        logical = (expert, columns) if name.endswith("_order") else (expert, rows, columns)
        names[name] = (*(None,) * layers, *(axes.get(axis) for axis in logical[: array.ndim - layers]))
    return names
