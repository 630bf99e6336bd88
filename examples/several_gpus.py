"""A Flax module divided over the devices of a mesh, its experts' load balanced, and its weights gathered at each call.

On a machine without GPUs: `JAX_NUM_CPU_DEVICES=4 python examples/several_gpus.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

import jmx
import jmx.nnx
from jmx.parallel import rebalance

HIDDEN, INTERMEDIATE, TOP_K = 128, 64, 2
devices = jax.device_count()
shards = 2 if devices % 2 == 0 else 1  # of each expert
mesh = jax.make_mesh((devices // shards, shards), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2)
experts = jmx.Experts.random(
    jax.random.key(0), 8 * devices, HIDDEN, INTERMEDIATE, gate_up_order="interleaved", bias_dtype=jnp.float32
)
x = jax.random.normal(jax.random.key(1), (16 * devices, HIDDEN))


def layer(axes: dict | None = None, spare_experts: int = 0) -> jmx.nnx.MoE:
    """A layer of these experts, on the mesh in scope if it has axes of it."""
    options = {"gate_up_order": "interleaved", "bias": True, "param_dtype": jnp.float32, "experts": experts}
    sizes = (HIDDEN, INTERMEDIATE, experts.num_experts, TOP_K)
    return jmx.nnx.MoE(*sizes, **options, axes=axes, spare_experts=spare_experts, rngs=nnx.Rngs(0))


@jax.jit
def step(layer: jmx.nnx.MoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The layer's results (T, H), and the tokens of each expert (E,), of all devices."""
    routing = layer.route(x)
    return layer(x, routing), layer.token_counts(routing)


def difference(y: jax.Array) -> str:
    return f"largest difference from one device: {np.abs(np.asarray(y) - alone).max():.1e}"


alone = np.asarray(step(layer(), x)[0])
with jax.set_mesh(mesh):
    # Experts over "ep", a half of each over "tp", tokens over both; and a slot a device for copies.
    divided = layer({"expert": "ep", "intermediate": "tp", "token": ("ep", "tp")}, spare_experts=devices)
    y, counts = step(divided, x)
    print(f"{devices} devices, output {y.shape} as {y.sharding.spec}")
    print(jmx.explain(divided, x))
    print(difference(y))

    rebalance(divided, counts)  # moves weights; nothing is compiled again
    y, _ = step(divided, x)
    print(f"copies of experts: {divided.placement().copies.tolist()}")
    print(f"balanced, {difference(y)}")

    # Weights divided over all devices, and gathered at each call.
    gathered = layer({"hidden": ("ep", "tp"), "token": ("ep", "tp")})
    y, _ = step(gathered, x)
    print(str(jmx.explain(gathered, x)))
    print(f"gathered, {difference(y)}")
