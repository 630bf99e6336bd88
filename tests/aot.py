"""Compiling for an H200 on a machine that has none, with the CUDA plugin of jax."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TARGET = pathlib.Path(__file__).parent / "data" / "h200.txtpb"


def h200_mesh() -> Mesh:
    """A mesh of one H200 that is not here."""
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET.read_text())
    return Mesh(np.array(topology.devices), ("device",), axis_types=(AxisType.Auto,))


def compile_for_h200(function: Callable[..., Any], *arguments: Any) -> jax.stages.Compiled:
    """`function` compiled for an H200, its abstract arguments placed there."""
    mesh = h200_mesh()
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).lower(*placed).compile()
