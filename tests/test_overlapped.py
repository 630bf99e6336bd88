"""Tokens that go through the exchange `peer` in chunks: results, gradients, and what runs beside the experts."""

import dataclasses
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
from jmx.ffi.peer import collectives, copies, library
from jmx.parallel import chunks, overlapped, peer, wire
from jmx.parallel.exchange import Call
from jmx.perf.shapes import MODELS

E, H, K = 8, 64, 3


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None, **options: Any) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation="swiglu", backend="xla", split=split, **options)


def loss(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    y = layer(x, logits, experts, split)
    return (y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()


@pytest.mark.parametrize("num_tokens", [2, 7, 8, 8192])
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_first_chunk_and_the_last_are_half_as_large_as_others(num_tokens: int, count: int) -> None:
    if reason := overlapped.fault(num_tokens, count):
        assert f"{num_tokens} tokens of a device are not {count} chunks" in reason
        return
    bounds = chunks.bounds_with_small_ends(num_tokens, count)
    sizes = [end - begin for begin, end in bounds]
    assert [begin for begin, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert (len(sizes), sum(sizes)) == (count, num_tokens)
    assert min(sizes) > 0
    first, *inner, last = sizes
    assert abs(first - last) <= 1
    assert all(abs(size - chunks.INNER * first) <= chunks.INNER for size in inner)


@pytest.mark.costly
@pytest.mark.devices(8)
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("peer_by_collectives")
@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("each", [16, 17, 25])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_results_and_gradients_are_those_of_one_device(
    shape: Any, each: int, count: int, rng: np.random.Generator
) -> None:
    mesh = jax.make_mesh(shape, ("dp", "ep"), (AxisType.Auto,) * 2)
    x, logits, experts = drawn(rng, 8 * each)
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange="peer", chunks=count, mesh=mesh)
    assert relative_error(jax.jit(partial(layer, split=split))(x, logits, experts), layer(x, logits, experts)) <= 1e-6

    def of_bias(x: Any, logits: Any, bias: Any, split: Any) -> jax.Array:
        return loss(x, logits, experts.with_arrays({**experts.arrays(), "down_bias": bias}), split)

    bias = experts.arrays()["down_bias"]
    got, wanted = (jax.jit(jax.grad(partial(of_bias, split=its), (0, 1, 2)))(x, logits, bias) for its in (split, None))
    for each_got, each_wanted in zip(got, wanted, strict=True):
        assert relative_error(each_got, each_wanted) <= 2e-6


def drawn(rng: np.random.Generator, num_tokens: int, **options: Any) -> tuple[jax.Array, jax.Array, jmx.Experts]:
    x, logits = (jnp.asarray(rng.normal(size=(num_tokens, size)), jnp.float32) for size in (H, E))
    options = {"gate_up_order": "interleaved", "bias_dtype": "float32"} | options
    return x, logits, jmx.Experts.random(jax.random.key(int(rng.integers(1 << 30))), E, H, H, **options)


@pytest.mark.costly
@pytest.mark.devices(4)
@pytest.mark.usefixtures("peer_by_collectives")
@pytest.mark.parametrize("kind", ["vmap", "remat", "shards", "scan"])
def test_transformations(kind: str, rng: np.random.Generator) -> None:
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x, logits, experts = drawn(rng, 28)
    split = jmx.Split(expert="ep", tokens="ep", exchange="peer", chunks=3, mesh=mesh)
    divided, alone = partial(layer, experts=experts, split=split), partial(layer, experts=experts)
    if kind == "shards":
        split = jmx.Split(expert="ep", tokens=("ep", "tp"), intermediate="tp", exchange="peer", chunks=2, mesh=mesh)
        got = jax.jit(partial(layer, split=split))(x, logits, jmx.ShardedExperts.of(experts, 2))
        expected = alone(x, logits)
    elif kind == "vmap":
        pairs = x.reshape(2, 14, H), logits.reshape(2, 14, E)
        got = jax.jit(jax.vmap(divided))(*pairs)
        expected = jnp.stack([alone(*each) for each in zip(*pairs, strict=True)])
    elif kind == "scan":
        layers = jnp.stack([logits, -logits])
        got = jax.jit(lambda x: jax.lax.scan(lambda x, its: (x + divided(x, its), None), x, layers)[0])(x)
        expected = x + alone(x, logits)
        expected += alone(expected, -logits)
    else:
        got = jax.grad(jax.checkpoint(partial(loss, split=split)))(x, logits, experts)
        expected = jax.grad(loss)(x, logits, experts)
    assert relative_error(got, expected) <= 2e-6


@pytest.mark.costly
@pytest.mark.devices(2)
@pytest.mark.usefixtures("peer_by_collectives")
def test_codes_have_the_bits_of_tokens_sent_as_they_are(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    x, logits, experts = drawn(rng, 26)
    split = jmx.Split(expert="ep", tokens="ep", exchange="peer", chunks=3, mesh=mesh)
    results = []
    for least in (1, 1 << 40):
        monkeypatch.setattr(wire, "LEAST_SAVED", least)
        jax.clear_caches()  # the constant is no argument of what was compiled
        divided = jax.jit(partial(layer, split=split, input_format="fp8_token"))
        results.append(divided(x.astype(jnp.bfloat16), logits, experts))
    np.testing.assert_array_equal(*(its.view(jnp.uint16) for its in results))


@pytest.mark.usefixtures("peer_by_collectives")
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(("ep",), 2, 5, K, H, 2, True, E, E // 2, chunks=3)
    assert peer.Peer().supports(call) is None
    assert "it sends all tokens at once: use `peer`" in str(peer.PeerLines().supports(call))
    assert "5 tokens of a device are not 4 chunks" in str(peer.Peer().supports(dataclasses.replace(call, chunks=4)))
    assert "drops no rows" in str(peer.Peer().supports(dataclasses.replace(call, capacity=1.0)))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    assert "copy engines send chunks, and XLA_PYTHON_CLIENT_ALLOCATOR" in str(peer.Peer().supports(call))


@pytest.mark.aot
@pytest.mark.skipif(not library._PATH.exists(), reason="needs jmx's kernels in C++")
def test_copies_begin_before_the_experts_and_end_after_them_when_compiled_for_four_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order in which XLA launches, without a copy of what is sent or received."""
    divided_layers.lower_peer(monkeypatch, 4, collectives, copies)
    entry = divided_layers.layer_over_h200s(MODELS["small"], 4, 1024, exchange="peer", chunks=3)
    calls = re.findall(r'custom_call_target="(jmx_peer_\w+|mosaic_gpu_v2)"', entry)
    kinds = ["experts" if target == "mosaic_gpu_v2" else target.removeprefix("jmx_peer_") for target in calls]
    between = [sorted(group.split()) for group in " ".join(kinds).split("experts")]
    # Tokens of a chunk begin before the experts of the one before it, and end after them; results one chunk later.
    assert between == [
        ["gather", "start"],  # the gather is a call of its own: in a fusion with a slice it would run twice
        ["finish", "start", "start"],
        ["finish", "finish", "start"],
        ["finish", "scatter"],
    ]
    finished = re.findall(r"custom-call\(%[\w.-]+, %([\w.-]+)\)[^\n]*jmx_peer_finish", entry)
    assert len(finished) == 4
    assert all(its.startswith("jmx_peer_start") for its in finished)
