"""The experts of one layer: their arrays, checks, creation, conversion between layouts, and sharding."""

from jmx.experts.arrays import Axes, check_axes, check_mesh_axes, has_expert_axis, partition_names
from jmx.experts.creation import ORDERS, check_sizes
from jmx.experts.experts import OTHER_ARRAYS, ROLES, Experts
from jmx.experts.sharded import ShardedExperts

__all__ = [
    "ORDERS",
    "OTHER_ARRAYS",
    "ROLES",
    "Axes",
    "Experts",
    "ShardedExperts",
    "check_axes",
    "check_mesh_axes",
    "check_sizes",
    "has_expert_axis",
    "partition_names",
]
