"""Tokens that go through the exchange `gather` in chunks: results, gradients, and what explain states."""

import re
from functools import partial
from typing import Any

import divided_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from model_steps import relative_error

import jmx
from jmx.parallel import chunks
from jmx.parallel.division import Division
from jmx.perf.shapes import MODELS

E, H, K = 8, 64, 3


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation="swiglu", backend="xla", split=split)


def loss(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    y = layer(x, logits, experts, split)
    return (y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 8192])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_sizes(num_tokens: int, count: int) -> None:
    sizes = chunks.sizes(num_tokens, count)
    assert (len(sizes), sum(sizes)) == (count, num_tokens)
    assert max(sizes) - min(sizes) <= 1
    assert (min(sizes) == 0) == (chunks.fault(num_tokens, count) is not None)


@pytest.mark.costly
@pytest.mark.devices(8)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2)])
@pytest.mark.parametrize("each", [16, 17, 25])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_tokens_have_the_bits_of_one_chunk(shape: Any, each: int, count: int) -> None:
    """A token's sum does not depend on the others in its chunk; sums over tokens, of biases, have another order."""
    mesh = jax.make_mesh(shape, ("dp", "ep"), (AxisType.Auto,) * 2)
    x = jax.random.normal(jax.random.key(1), (8 * each, H))
    logits = jax.random.normal(jax.random.key(2), (8 * each, E))
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved")
    results = {}
    for split_into in (1, count):
        split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange="gather", chunks=split_into, mesh=mesh)
        y = jax.jit(partial(layer, split=split))(x, logits, experts)
        results[split_into] = y, *jax.jit(jax.grad(partial(loss, split=split), (0, 1)))(x, logits, experts)
    whole = layer(x, logits, experts), *jax.grad(loss, (0, 1))(x, logits, experts)
    for one, several, expected in zip(results[1], results[count], whole, strict=True):
        np.testing.assert_array_equal(one, several)
        assert relative_error(several, expected) <= 2e-6


@pytest.mark.costly
@pytest.mark.devices(4)
@pytest.mark.parametrize("kind", ["vmap", "remat", "shards"])
def test_transformations(kind: str) -> None:
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(1), (2, 14, H))
    logits = jax.random.normal(jax.random.key(2), (2, 14, E))
    experts: Any = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved")
    expected = jnp.stack([layer(*each, experts) for each in zip(x, logits, strict=True)])
    split = jmx.Split(expert="ep", tokens="ep", exchange="gather", chunks=3, mesh=mesh)
    if kind == "shards":
        split = jmx.Split(expert="ep", tokens=("ep", "tp"), intermediate="tp", exchange="gather", chunks=2, mesh=mesh)
        experts = jmx.ShardedExperts.of(experts, 2)
        y = jax.jit(partial(layer, split=split))(x.reshape(28, H), logits.reshape(28, E), experts)
    elif kind == "vmap":
        y = jax.jit(jax.vmap(partial(layer, split=split), (0, 0, None)))(x, logits, experts)
    else:
        got = jax.grad(jax.checkpoint(partial(loss, split=split)))(x[0], logits[0], experts)
        assert relative_error(got, jax.grad(loss)(x[0], logits[0], experts)) <= 2e-6
        return
    assert relative_error(y.reshape(expected.shape), expected) <= 1e-6


@pytest.mark.aot
def test_collectives_overlap_with_products_when_compiled_for_two_gpus() -> None:
    """Between their start and their end lies a kernel of another chunk, in the order in which XLA launches.

    XLA lets one collective run at once, so it is one of each product.
    """
    count = 3
    entry = divided_layers.layer_over_h200s(MODELS["small"], 2, 128, exchange="gather", chunks=count)
    beside = []
    for kind in ("all-gather", "reduce-scatter"):
        starts = re.findall(rf"%([\w.-]+) = [^\n]* {kind}-start\(", entry)
        assert len(re.findall(rf" {kind}(?:-start)?\(", entry)) == count  # none is combined with another
        spans = [entry[entry.index(f"%{its} = ") : entry.index(f" {kind}-done(%{its})")] for its in starts]
        beside.append(sum(" custom-call(" in span for span in spans))
    assert sum(beside) >= count, beside


def test_what_explain_states_and_who_chunks() -> None:
    problem = jmx.Problem(64, 128, 128, 8, 2, "bfloat16", "mxfp4", jmx.SwiGLU(), "interleaved", True, "packed")
    its = Division.of(problem, jmx.Split(expert="ep", tokens="ep", chunks=4), {"ep": 2})
    assert its.chosen == "gather"
    assert its.as_dict()["chunks"] == 4
    assert "tokens of a device go in 4 chunks, and each reads the weights" in map(str, its.lines())
    assert "it has rounds instead of chunks" in str({name: no for name, _, no in its.trail}["rows"])
    many = Division.of(problem, jmx.Split(expert="ep", tokens="ep", chunks=33), {"ep": 2})
    assert many.chosen is None
    assert "32 tokens of a device are not 33 chunks" in str({name: no for name, _, no in many.trail}["gather"])


@pytest.mark.parametrize("value", [0, -1])
def test_chunks_that_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match=rf"`chunks` \(={value}\) must be at least 1"):
        jmx.Split(expert="ep", tokens="ep", chunks=value)
    with pytest.raises(ValueError, match=r"`chunks` \(=2\) must be 1 where no rows are exchanged"):
        jmx.Split(expert="ep", tokens="dp", chunks=2)


@pytest.mark.devices(2)
def test_more_chunks_than_tokens() -> None:
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved")
    split = jmx.Split(expert="ep", tokens="ep", chunks=4, mesh=mesh)
    with pytest.raises(ValueError, match="3 tokens of a device are not 4 chunks: pass a smaller `chunks`"):
        layer(jnp.ones((6, H)), jnp.ones((6, E)), experts, split)
