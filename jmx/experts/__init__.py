"""One layer's experts: their arrays, and the rules that these keep."""

from jmx.experts.experts import (
    BIAS_DTYPES,
    ORDERS,
    OTHER_ARRAYS,
    ROLES,
    Axes,
    Experts,
    MeshAxes,
    check_axes,
    check_sizes,
    partition_names,
)

__all__ = [
    "BIAS_DTYPES",
    "ORDERS",
    "OTHER_ARRAYS",
    "ROLES",
    "Axes",
    "Experts",
    "MeshAxes",
    "check_axes",
    "check_sizes",
    "partition_names",
]
