"""Experts divided over the devices of a mesh, and tokens too: each device computes what its own experts add.

On a machine without GPUs: `JAX_NUM_CPU_DEVICES=4 python examples/several_gpus.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmx

mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
by_device = NamedSharding(mesh, PartitionSpec("ep"))
experts = jmx.Experts.random(jax.random.key(0), 8 * jax.device_count(), 128, 64, gate_up_order="interleaved")
x = jax.random.normal(jax.random.key(1), (16 * jax.device_count(), 128))
logits = jax.random.normal(jax.random.key(2), (x.shape[0], experts.num_experts))


def layer(x: jax.Array, logits: jax.Array, experts: jmx.Experts, split: jmx.Split | None = None) -> jax.Array:
    """x (T, H), logits (T, E) -> (T, H)."""
    return jmx.moe(x, jmx.Logits(logits, jmx.TopKSoftmax(2)), experts, activation="swiglu", split=split)


@jax.jit
def divided(x: jax.Array, logits: jax.Array, experts: jmx.Experts) -> jax.Array:
    """The layer, of which each device has some of the experts and some of the tokens."""
    return layer(x, logits, experts, jmx.Split(expert="ep", tokens="ep", mesh=mesh))


out = divided(*jax.device_put((x, logits, experts), by_device))
error = jnp.max(jnp.abs(np.asarray(out) - layer(x, logits, experts)))
print(f"{jax.device_count()} devices, output {out.shape} as {out.sharding.spec}")
print(f"largest difference from one device: {error:.1e}")
