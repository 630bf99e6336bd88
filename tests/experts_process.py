"""One of two processes that share a layer: `python experts_process.py PROCESS PORT HEARTBEAT_S WHAT`.

WHAT is "compute": it compares the divided layer, its gradients and its rebalancing with one device. Or "repeat": it
calls the divided layer until the other process is killed, and prints the error that ends it.
"""

import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
from jmx.parallel import PlacedExperts, Placement, balance, rebalance

E, H, T, K = 8, 32, 16, 2
C = np.sin(np.arange(T * H, dtype=np.float32)).reshape(T, H)


def slices(tree: Any, mesh: Any, axes: Any, read: set[int] | None = None) -> Any:
    """Global arrays split along their first axis, of which this process makes its own; `read` gets their rows."""

    def put(array: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            if read is not None:
                read.update(range(array.shape[0])[index[0]])
            return array[index]

        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(axes)), part)

    return jax.tree.map(put, tree)


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation=jmx.SiLU(), backend="xla", split=split)


def loss(x: Any, logits: Any, experts: Any, c: Any, split: jmx.Split | None = None) -> tuple[jax.Array, jax.Array]:
    y = layer(x, logits, experts, split)
    return (y * c).sum(), y


def results(*arguments: Any, split: jmx.Split | None = None) -> Any:
    """Gradients of x and logits, and the layer's results."""
    return jax.jit(jax.grad(partial(loss, split=split), argnums=(0, 1), has_aux=True))(*arguments)


def check_alike(got: Any, expected: Any) -> None:
    """Raises AssertionError unless this process's parts of global arrays are those of `expected`."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        for shard in a.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(b)[shard.index], rtol=1e-5, atol=1e-5 * np.abs(b).max())


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))


def compute(whole: jmx.Experts, x: np.ndarray, logits: np.ndarray) -> None:
    expected = jax.tree.map(np.asarray, results(x, logits, whole, C))
    # Experts divided between processes, and both between and within them.
    for shape, names in (((2, 2), ("ep", "dp")), ((4,), ("ep",))):
        mesh, read = mesh_of(shape, names), set[int]()
        experts = slices(whole, mesh, "ep", read)
        assert len(read) == E // 2
        x_here, logits_here, c = slices((x, logits, C), mesh, names)
        split = jmx.Split(expert="ep", tokens=names, mesh=mesh)
        check_alike(results(x_here, logits_here, experts, c, split=split), expected)
        print("computed", *names, flush=True)

    mesh = mesh_of((4,), ("ep",))
    run: Any = jax.jit(partial(layer, split=jmx.Split(expert="ep", tokens="ep", mesh=mesh)))
    layers = [PlacedExperts.of(whole, Placement.identity(E, 4, 4)).split(mesh, "ep")]
    tokens = slices((x, logits), mesh, "ep")
    check_alike(run(*tokens, layers[0]), expected[1])
    after = balance(np.arange(E)[None] ** 3, 4, 4)
    rebalance(layers, after)
    assert np.array_equal(layers[0].placement.expert_of_slot, after.expert_of_slot[0])
    check_alike(run(*tokens, layers[0]), expected[1])
    assert run._cache_size() == 1
    print("rebalanced", flush=True)


def repeat(whole: jmx.Experts, x: np.ndarray, logits: np.ndarray) -> None:
    mesh = mesh_of((4,), ("ep",))
    run = jax.jit(partial(layer, split=jmx.Split(expert="ep", tokens="ep", mesh=mesh)))
    experts, (x, logits) = slices(whole, mesh, "ep"), slices((x, logits), mesh, "ep")
    jax.block_until_ready(run(x, logits, experts))
    print("ready", flush=True)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        jax.block_until_ready(run(x, logits, experts))


if __name__ == "__main__":
    process, port, heartbeat_s, what = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, heartbeat_timeout_seconds=heartbeat_s)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles faster
    random = partial(jmx.Experts.random, num_experts=E, hidden_size=H, intermediate_size=32, gate_up_order=None)
    whole = jax.jit(partial(random, bias_dtype=jnp.float32))(jax.random.key(0))
    x, logits = (np.random.default_rng(n).normal(size=(T, n)).astype(np.float32) for n in (H, E))
    {"compute": compute, "repeat": repeat}[what](jax.tree.map(np.asarray, whole), x, logits)
