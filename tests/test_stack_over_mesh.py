"""Stacked layers over a mesh: a scan over the number of the layer, in which each call divides `stack.layer(i)`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx

E, H, T = 8, 64, 16


@pytest.mark.costly
@pytest.mark.devices(4)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "fields",
    [{"expert": "ep"}, {"expert": "ep", "exchange": "rows"}, {"hidden": "ep"}, {"expert": "ep", "hidden": "dp"}],
    ids=str,
)
def test_a_scan_over_layers_has_results_and_gradients_of_one_device(kind: Any, fields: Any) -> None:
    mesh = jax.make_mesh((2, 2), ("dp", "ep"), (kind,) * 2, devices=jax.devices()[:4])
    split = jmx.Split(tokens=("dp", "ep"), mesh=mesh, **fields)
    keys = jax.random.split(jax.random.key(0), 3)
    stack = jmx.Experts.stack(
        [jmx.Experts.random(key, E, H, H, gate_up_order="interleaved", bias_dtype="float32") for key in keys]
    )
    x = jax.random.normal(jax.random.key(1), (T, H))
    logits = jax.random.normal(jax.random.key(2), (T, E))

    def loss(x: Any, logits: Any, stack: Any, split: Any) -> Any:
        def step(x: Any, i: Any) -> tuple[Any, None]:
            routing = jmx.Logits(logits, jmx.TopKSoftmax(3))
            y = jmx.moe(x, routing, stack.layer(i), activation="swiglu", backend="xla", split=split)
            return jnp.tanh(x + y), None

        y = jax.lax.scan(step, x, jnp.arange(len(keys)))[0]
        return (y**2).sum(), y

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=3)
    expected = run(x, logits, stack, None)
    by_token = NamedSharding(mesh, P(("dp", "ep")))
    by_expert = NamedSharding(mesh, P(None, "ep") if "expert" in fields else P())
    with jax.set_mesh(mesh):
        got = run(*jax.device_put((x, logits), by_token), jax.device_put(stack, by_expert), split)
    for its, wanted in zip(got, expected, strict=True):
        assert relative_error(its, wanted) <= 5e-6
