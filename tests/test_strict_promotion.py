"""Calls of the layer and of models, and their gradients, under jax's strict promotion of dtypes and of ranks.

No dtype becomes another one, and no array gets more axes, unless the code states it.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmx
import jmx.lora
import jmx.training
from jmx.models import FAMILIES, Sampler
from jmx.models.sampling import choose
from jmx.numerics.layouts import LAYOUTS
from jmx.pallas.triton.backend import Triton
from jmx.selection.registry import Registry

T, E, H, I, K = 7, 4, 64, 32, 2  # noqa: E741


@contextmanager
def strict_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


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
    with strict_promotion():
        assert jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, logits)[0].dtype == x.dtype
        assert jax.eval_shape(jax.vmap(loss, (0, None)), x[None], logits).shape == (1,)


def test_losses_promote_nothing(rng: Any) -> None:
    values = jnp.asarray(rng.normal(size=(2, T, E)), jnp.bfloat16)
    logits, mask = jmx.Logits(values, jmx.TopKSoftmax(K)), jnp.asarray(rng.random((2, T)) < 0.7)
    with strict_promotion():
        found = [
            jmx.training.load_balancing_loss(logits, mask),
            jmx.training.sequence_balance_loss(logits, mask),
            jmx.training.router_z_loss(values, mask),
        ]
    assert all(jnp.isfinite(loss) and loss.dtype == jnp.float32 for loss in found)


@pytest.mark.parametrize("order", ["interleaved", "concatenated", None])
@pytest.mark.parametrize(
    ("layout", "format"),
    [(layout, name) for layout, its in LAYOUTS.items() for name, format in jmx.FORMATS.items() if its.holds(format)],
)
def test_conversions_promote_nothing(layout: str, format: str, order: str | None) -> None:
    def convert(key: jax.Array) -> jmx.Experts:
        return jmx.Experts.random(key, E, 256, 256, gate_up_order=order, format=format).prepare(layout).canonical()

    with strict_promotion():
        assert jax.eval_shape(convert, jax.random.key(0)).layout == "canonical"


@pytest.mark.parametrize("format", ["mxfp4", "int4_g32_asym"])
def test_kernels_of_triton_promote_nothing(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry([Triton(interpret=True)]))
    experts, _ = of_kind("experts", format, bias=True)
    logits = jmx.Logits(jnp.ones((T, E), jnp.float32), jmx.TopKSoftmax(K))
    with strict_promotion():
        y = jax.eval_shape(lambda x: jmx.moe(x, logits, experts, activation="swiglu"), jnp.ones((T, H), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16


@pytest.mark.costly
@pytest.mark.parametrize("name", FAMILIES)
def test_models_promote_nothing(name: str) -> None:
    """A prompt, with its gradient where experts are floats, and a step. Nothing is computed, so sizes are published."""
    family = FAMILIES[name]
    config: Any = next(iter(family.published.values()))
    first = {"layer_types": config.layer_types[:2]} if hasattr(config, "layer_types") else {}
    config = dataclasses.replace(config, num_hidden_layers=2, **first)
    model: Any = nnx.eval_shape(lambda: family.model(config, format="bfloat16", dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graph, variables = nnx.split(model)
    windows, vocab = jnp.ones((2, 9), jnp.int32), config.vocab_size

    def loss(variables: Any) -> jax.Array:
        return jmx.training.next_token_losses(nnx.merge(graph, variables), windows).mean()

    def step(variables: Any) -> jax.Array:
        model = nnx.merge(graph, variables)
        lengths = jnp.ones(2, jnp.int32)
        x, _ = model(windows[:, :1], lengths, model.empty_cache(2, 16).layers)
        return model.logits(x[:, 0])

    sampler = Sampler(0.7, 0.9, 3, top_k=5, min_p=0.01, presence_penalty=0.5)
    counts = sampler.counts([[1], [2, 3]], vocab)
    with strict_promotion():
        jax.eval_shape(jax.grad(loss), variables)
        logits = jax.eval_shape(step, variables)
        assert logits.shape == (2, vocab)
        drawn = jax.eval_shape(lambda x: choose(x, sampler.numbers, 3, counts), logits)
        assert jax.eval_shape(lambda counts, drawn: counts.add(drawn), counts, drawn).new.shape == logits.shape
    with jax.enable_x64(True):  # indices of 32 and of 64 bits meet in no operation
        jax.eval_shape(jax.grad(loss), variables)
        assert jax.eval_shape(step, variables) == logits
        assert jax.eval_shape(lambda x: choose(x, sampler.numbers, 3, counts), logits) == drawn
