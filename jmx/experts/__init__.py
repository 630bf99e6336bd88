"""The experts of one layer: their arrays, checks, creation, conversion between layouts, and sharding."""

from jmx.experts.arrays import Axes, MeshAxes, check_axes, partition_names
from jmx.experts.creation import BIAS_DTYPES, ORDERS, check_sizes
from jmx.experts.experts import OTHER_ARRAYS, ROLES, Experts

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
