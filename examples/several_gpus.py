"""Tokens split over the devices of a mesh, with the experts on each: `jax.shard_map` keeps the tokens local.

On a machine without GPUs: `JAX_NUM_CPU_DEVICES=4 python examples/several_gpus.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jmx.nnx

TOKENS = PartitionSpec("data")

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
layer = jmx.nnx.MoE(128, 64, num_experts=8, top_k=2, rngs=nnx.Rngs(0))
graphdef, state = nnx.split(layer)
x = jax.random.normal(jax.random.key(0), (16 * jax.device_count(), 128))


@jax.jit
def split(state: nnx.State, x: jax.Array) -> jax.Array:
    """x (T, H) in equal parts, one a device -> (T, H), split in the same way."""
    local = jax.shard_map(
        lambda state, x: nnx.merge(graphdef, state)(x), mesh=mesh, in_specs=(PartitionSpec(), TOKENS), out_specs=TOKENS
    )
    return local(state, x)


everywhere = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
out = split(everywhere, jax.device_put(x, NamedSharding(mesh, TOKENS)))
error = jnp.max(jnp.abs(np.asarray(out) - layer(x)))
print(f"{jax.device_count()} devices, output {out.shape} as {out.sharding.spec}")
print(f"largest difference from one device: {error:.1e}")
