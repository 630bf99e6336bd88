"""Calls of the layer, and their gradients, under jax's strict promotion: no dtype is promoted to another one unsaid."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jmx
import jmx.lora
import jmx.training

T, E, H, I, K = 7, 4, 64, 32, 2  # noqa: E741


def of_kind(kind: str, format: str, bias: bool) -> tuple[Any, dict[str, Any]]:
    experts = jmx.Experts.random(jax.random.key(0), E, H, I, gate_up_order="interleaved", format=format, bias=bias)
    if kind == "masters":
        return jmx.training.QAT().masters(experts), {}
    if kind == "adapters":
        return experts, {"adapters": jmx.lora.LoRA(2).random(jax.random.key(1), experts)}
    return experts, {}


@pytest.mark.parametrize("backend", ["xla", "cpu"])
@pytest.mark.parametrize("input_format", [None, "int8_token", "mxfp8"])
@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("format", ["mxfp4", "int4_g32_asym", "bfloat16"])
@pytest.mark.parametrize("kind", ["experts", "masters", "adapters"])
@pytest.mark.sampled(6)
def test_nothing_is_promoted(
    kind: str, format: str, dtype: str, weights_on: str, input_format: str | None, backend: str, rng: Any
) -> None:
    experts, options = of_kind(kind, format, bool(rng.integers(2)))
    options |= {"activation": "swiglu", "weights_on": weights_on, "input_format": input_format, "backend": backend}
    num_tokens = int(rng.choice([1, T, 40]))  # few and many

    def loss(x: Any, logits: Any) -> jax.Array:
        y = jmx.moe(x, jmx.Logits(logits, jmx.TopKSoftmax(K)), experts, **options)
        return y.astype(jnp.float32).sum()

    x, logits = jnp.ones((num_tokens, H), dtype), jnp.ones((num_tokens, E), jnp.float32)
    try:
        jax.eval_shape(loss, x, logits)
    except jmx.NoBackendError as error:
        pytest.skip(str(error).splitlines()[0])
    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, logits)[0].dtype == x.dtype
        assert jax.eval_shape(jax.vmap(loss, (0, None)), x[None], logits).shape == (1,)


def test_losses_promote_nothing(rng: Any) -> None:
    values = jnp.asarray(rng.normal(size=(2, T, E)), jnp.bfloat16)
    logits, mask = jmx.Logits(values, jmx.TopKSoftmax(K)), jnp.asarray(rng.random((2, T)) < 0.7)
    with jax.numpy_dtype_promotion("strict"):
        found = [
            jmx.training.load_balancing_loss(logits, mask),
            jmx.training.sequence_balance_loss(logits, mask),
            jmx.training.router_z_loss(values, mask),
        ]
    assert all(jnp.isfinite(loss) and loss.dtype == jnp.float32 for loss in found)
