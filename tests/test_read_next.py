"""Kernels of few tokens that read the next product's weights into the cache: when, and that results stay the same."""

import dataclasses
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sass
from model_steps import decode_step

import jmx
from jmx.engines import read_next
from jmx.models import few_rows, from_source, random_source
from jmx.models.families import FAMILIES
from jmx.pallas.attention.decode import flash_decode
from jmx.pallas.few_rows import choice
from jmx.pallas.sm90 import prefetch
from jmx.perf.shapes import MODELS
from jmx.selection.environment import Environment

BF16 = jnp.bfloat16
COPIES, LINES = "UBLKPF", "CCTL.E.PF2"  # instructions that read into the cache


def test_a_block_has_its_array_and_ends_with_the_one_before():
    def failing() -> None:
        with read_next.reads("inner"):
            assert read_next.array() == "inner"
            raise KeyError

    assert read_next.array() is None
    with read_next.reads("outer"):
        with pytest.raises(KeyError):
            failing()
        assert read_next.array() == "outer"
        with read_next.reads(None):
            assert read_next.array() is None
    assert read_next.array() is None


def test_weights_are_read_ahead_for_few_tokens_on_hopper_gpus(monkeypatch):
    x, weights = jnp.zeros((1, 1, 32), BF16), jnp.zeros((64, 32), BF16)
    assert few_rows.read_next(x, weights) is None  # a CPU
    monkeypatch.setattr(choice, "CAPABILITY", None)  # that of a CPU
    assert few_rows.read_next(x, weights) is weights
    most = choice.MOST_READ_AHEAD
    assert few_rows.read_next(jnp.zeros((most + 1, 1, 32), BF16), weights) is None
    assert few_rows.read_next(jnp.zeros((1, most + 1, 32), BF16), weights) is None
    assert few_rows.read_next(x.astype(jnp.float32), weights) is None
    assert few_rows.read_next(x, weights.astype(jnp.float32)) is None
    assert few_rows.read_next(x, object()) is None  # quantized weights have no dtype


def test_an_array_becomes_one_row_for_a_kernel(rng):
    array = jnp.asarray(rng.standard_normal((3, 5)), BF16)
    found = prefetch.flat(array)
    assert found is not None
    assert found.shape == (1, 15)
    assert prefetch.flat(None) is None


# Compiled


@pytest.mark.aot
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("window", "paged"), [(None, False), (128, False), (None, True)])
def test_attention_that_reads_ahead_compiles_into_a_sound_kernel(window, paged, batch, capfd):
    shape = jax.ShapeDtypeStruct
    cache = shape((2, 9, 8, 128, 64), BF16) if paged else shape((2, batch, 8, 1024, 64), BF16)
    tables = shape((batch, 8), jnp.int32) if paged else None
    query, sinks, at = shape((batch, 64, 64), BF16), shape((64,), jnp.float32), shape((batch,), jnp.int32)

    def call(query: Any, cache: Any, sinks: Any, at: Any, tables: Any, weights: Any) -> jax.Array:
        return flash_decode(query, cache, sinks, at, window, tables, weights)

    for weights in (shape((288, 4096), BF16), None):
        _, (kernel,) = aot.kernels_for_h200(capfd, call, query, cache, sinks, at, tables, weights)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel.report
        assert sass.hazards(sass.parse(kernel.sass)) == []
        assert (COPIES in kernel.sass) == (weights is not None)


@pytest.mark.aot
def test_experts_of_one_token_read_ahead(capfd):
    shape = dataclasses.replace(MODELS["gpt-oss-20b"], num_experts=8)

    def layer(x: jax.Array, logits: jax.Array, experts: Any, weights: Any) -> jax.Array:
        with read_next.reads(weights):
            return jmx.moe(x, jmx.Logits(logits, shape.method), experts, activation=shape.activation)

    x, logits = (jax.ShapeDtypeStruct((1, n), BF16) for n in (shape.hidden_size, shape.num_experts))
    experts = jax.eval_shape(lambda: shape.experts(jax.random.key(0)).prepare("mosaic_sm90"))
    for weights in (jax.ShapeDtypeStruct((320, 2880), BF16), None):
        _, (kernel,) = aot.kernels_for_h200(capfd, layer, x, logits, experts, weights)
        assert "0 bytes spill stores, 0 bytes spill loads" in kernel.report
        assert (LINES in kernel.sass) == (weights is not None)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(Environment.probe().compute_capability != choice.CAPABILITY, reason="needs a Hopper GPU")
def test_steps_that_read_ahead_have_the_same_bits(rng, monkeypatch):
    config = FAMILIES["gpt_oss"].published["gpt-oss-20b"]
    config = dataclasses.replace(config, num_hidden_layers=3, layer_types=config.layer_types[:3], vocab_size=2048)
    model = from_source(random_source(config, seed=int(rng.integers(1 << 30))))
    caches = [jnp.asarray(rng.standard_normal(its.shape), its.dtype) for its in model.cache_layers(1, 512)]
    tokens, starts = jnp.asarray([5], jnp.int32), jnp.asarray([300], jnp.int32)
    found = []
    for most in (1, 0):
        monkeypatch.setattr(choice, "MOST_READ_AHEAD", most)
        jax.clear_caches()
        found.append(decode_step(model, tokens, starts, [*caches]))
    for its, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(np.asarray(its, np.float32), np.asarray(other, np.float32))
