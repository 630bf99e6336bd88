"""Tokens of `peer` that arrive while a device routes, groups, and places the rows of its own: see test_summed, too."""

import dataclasses
import re
from functools import partial
from typing import Any

import divided_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
from jmx.ffi.peer import collectives, copies, library, terms
from jmx.parallel import arriving, needed, peer
from jmx.parallel.exchange import Call
from jmx.perf.shapes import MODELS

E, H, T, K = 8, 96, 16, 3


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None, **options: Any) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation="swiglu", backend="xla", split=split, **options)


@pytest.mark.costly
@pytest.mark.devices(2)
@pytest.mark.usefixtures("peer_by_collectives")
@pytest.mark.parametrize("weights_on", ["input", "output"])
def test_a_backend_that_reads_tokens_gets_all_of_them(
    weights_on: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(arriving, "LEAST_BYTES", 0)
    jax.clear_caches()
    x, logits = (jnp.asarray(rng.normal(size=(2 * T, width)), jnp.float32) for width in (H, E))
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias_dtype="float32")
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = jmx.Split(expert="ep", tokens="ep", mesh=mesh)
    got, expected = (
        jax.jit(partial(layer, split=dataclasses.replace(split, exchange=its), weights_on=weights_on))(
            x, logits, experts
        )
        for its in ("peer", "gather")
    )
    np.testing.assert_array_equal(got, expected)
    jax.clear_caches()


def test_which_calls_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(("ep",), 2, 4096, 4, 2880, 2, True, 128, 64)
    monkeypatch.setattr(arriving, "LEAST_BYTES", 4096 * 2880 * 2)
    assert arriving.applies(call)
    assert not arriving.applies(dataclasses.replace(call, num_tokens=4095))
    assert not arriving.applies(dataclasses.replace(call, input_format="fp8_token"))  # whose codes are sent
    assert not arriving.applies(dataclasses.replace(call, num_ranks=3))
    monkeypatch.setattr(arriving, "MOST_RANKS", 4)
    assert arriving.applies(dataclasses.replace(call, num_ranks=4, top_k=8, experts_per_rank=32))
    needs = dataclasses.replace(call, num_ranks=4, experts_per_rank=32)
    assert needed.applies(needs)
    assert not arriving.applies(needs)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    assert not arriving.applies(call)


@pytest.mark.aot
@pytest.mark.skipif(not library._PATH.exists(), reason="needs jmx's kernels in C++")
@pytest.mark.parametrize("tokens", [1024, 8192])
def test_own_rows_are_placed_while_tokens_arrive_when_compiled(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which XLA launches, without a copy of tokens or rows."""
    monkeypatch.setattr(arriving, "LEAST_BYTES", 0)
    divided_layers.lower_peer(monkeypatch, 2, collectives, copies, terms)
    entry = divided_layers.layer_over_h200s(MODELS["gpt-oss-120b"], 2, 2 * tokens, exchange="peer")
    calls = [line for line in entry.splitlines() if " custom-call(" in line]
    kinds = [re.findall(r'"(jmx_peer_\w+|mosaic_gpu_v2)"|(jmx_place_rows)', line) for line in calls]
    named = ["".join(its[0]) for its in kinds if its]
    assert named == [
        "jmx_peer_start",
        "jmx_peer_gather",  # of the routing
        "jmx_place_rows",  # of the device's own tokens
        "jmx_peer_finish",
        "jmx_place_rows",
        "mosaic_gpu_v2",
        "jmx_peer_scatter_terms",
    ]
    start, _, own, finish, rest, products, _ = (line for line, its in zip(calls, kinds, strict=True) if its)
    assert "fusion(" not in entry[entry.index(own) : entry.index(products)]  # all is grouped before
    sent = re.findall(r"%(\S+) = .*custom-call\(%([\w.-]+)\)", start)[0]
    assert f"custom-call(%{sent[1]}, " in own
    assert f"custom-call(%{sent[1]}, %{sent[0]})" in finish
    assert "output_to_operand_aliasing={{}: (3, {})}" in rest
    assert " copy(" not in entry


# On GPUs


@pytest.mark.gpu
@pytest.mark.devices(2)
@pytest.mark.parametrize("backend", ["mosaic", "xla"])
@pytest.mark.parametrize("tokens", [4, 1000])  # whose rows are not sorted, and are
def test_the_bits_are_those_of_tokens_that_a_kernel_sends(
    backend: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if peer.fault(2):
        pytest.skip(f"these devices do not write into each other's memory: {peer.fault(2)}")
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    shape = dataclasses.replace(MODELS["gpt-oss-120b"], num_experts=16)
    split = jmx.Split(expert="ep", tokens="ep", exchange="peer", mesh=mesh)
    rows = NamedSharding(mesh, P("ep"))
    x, logits = (
        jax.random.normal(jax.random.key(width), (2 * tokens, width), dtype)
        for width, dtype in ((shape.hidden_size, jnp.bfloat16), (16, jnp.float32))
    )
    experts = shape.experts(jax.random.key(0)).prepare("mosaic_sm90")

    def call(x: Any, logits: Any, experts: Any) -> jax.Array:
        routing = jmx.Logits(logits, shape.method)
        return jmx.moe(x, routing, experts, activation=shape.activation, split=split, backend=backend)

    results = []
    for least in (1 << 60, 0):
        monkeypatch.setattr(arriving, "LEAST_BYTES", least)
        jax.clear_caches()
        nan = jnp.full(1 << 26, jnp.nan, jnp.bfloat16)
        jax.block_until_ready([jax.device_put(nan, device) + 1 for device in mesh.devices for _ in range(4)])
        results.append(jax.jit(call)(*jax.device_put((x, logits, experts), rows)))
    assert bool(jnp.isfinite(results[0]).all())
    np.testing.assert_array_equal(*(its.view(jnp.uint16) for its in results))
    jax.clear_caches()
