"""The experts of one layer: their arrays, how these are created, converted and split, and the rules they keep."""

from jmx.experts.creation import BIAS_DTYPES, ORDERS, check_sizes
from jmx.experts.experts import OTHER_ARRAYS, ROLES, Experts
from jmx.experts.partitioning import Axes, MeshAxes, check_axes, partition_names

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
