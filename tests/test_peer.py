"""The exchange `peer`: what it computes, on GPUs, and by XLA's collectives where these run its programs instead."""

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx.ffi.peer import collectives
from jmx.parallel import peer
from jmx.parallel.exchange import Call

pytestmark = pytest.mark.costly

E, H, T, K = 8, 64, 16, 3
SPLIT = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange="peer")


@pytest.fixture
def by_xla(peer_by_collectives: None) -> Iterator[None]:
    """That of the name, for one test: others of this file need the real answer."""
    yield
    jax.clear_caches()


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = SPLIT) -> jax.Array:
    routing = jmx.Logits(logits, jmx.TopKSoftmax(K))
    return jmx.moe(x, routing, experts, activation="swiglu", backend="xla", split=split)


def loss(x: Any, logits: Any, experts: Any, split: jmx.Split | None = SPLIT) -> jax.Array:
    y = layer(x, logits, experts, split)
    return (y * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)).sum()


def arguments(num_tokens: int = T) -> tuple[jax.Array, jax.Array, jmx.Experts]:
    x = jax.random.normal(jax.random.key(1), (num_tokens, H), jnp.float32)
    logits = jax.random.normal(jax.random.key(2), (num_tokens, E), jnp.float32)
    return x, logits, jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias_dtype="float32")


def mesh_of(*shape: int, order: Any = None) -> Any:
    devices = jax.devices()[: int(np.prod(shape))]
    devices = devices if order is None else [devices[i] for i in order]
    return jax.make_mesh(shape, ("dp", "ep"), axis_types=(AxisType.Auto,) * 2, devices=devices)


# On any devices


@pytest.mark.devices(4)
@pytest.mark.usefixtures("by_xla")
@pytest.mark.parametrize("tokens", [("dp", "ep"), ("dp",), ()], ids=["all", "dp", "none"])
def test_results_gradients_and_transformations_are_those_of_one_device(tokens: Any) -> None:
    split = jmx.Split(expert="ep", tokens=tokens, exchange="peer")
    x, logits, experts = arguments()
    with jax.set_mesh(mesh_of(2, 2)):
        y, gradients = jax.jit(jax.value_and_grad(partial(loss, split=split), (0, 1)))(x, logits, experts)
        batch = jnp.stack([x, 2 * x]), jnp.stack([logits, -logits])
        mapped = jax.jit(jax.vmap(partial(layer, split=split), (0, 0, None)))(*batch, experts)

        def step(x: jax.Array, logits: jax.Array) -> tuple[jax.Array, None]:
            return x + jax.checkpoint(partial(layer, split=split))(x, logits, experts), None

        scanned = jax.jit(lambda x, logits: lax.scan(step, x, logits)[0])(x, batch[1])
    expected, expected_gradients = jax.value_and_grad(partial(loss, split=None), (0, 1))(x, logits, experts)
    assert relative_error(y, expected) <= 1e-6
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        assert relative_error(got, wanted) <= 2e-6
    for got, each_x, each_logits in zip(mapped, *batch, strict=True):
        assert relative_error(got, layer(each_x, each_logits, experts, None)) <= 1e-6
    first = x + layer(x, logits, experts, None)
    assert relative_error(scanned, first + layer(first, -logits, experts, None)) <= 2e-6


@pytest.mark.devices(4)
@pytest.mark.usefixtures("by_xla")
def test_an_exported_program_has_the_collectives_of_xla() -> None:
    x, logits, experts = arguments()
    with jax.set_mesh(mesh_of(2, 2)):
        exported = export.export(jax.jit(layer), platforms=("cuda",))(x, logits, experts)
    text = exported.mlir_module()
    assert "jmx_peer" not in text
    assert "all_gather" in text


def call_of(num_tokens: int, top_k: int, hidden_size: int, capacity: float | None = None) -> Call:
    """Of two ranks, in 16 bits."""
    return Call(
        axes=("ep",),
        num_ranks=2,
        num_tokens=num_tokens,
        top_k=top_k,
        hidden_size=hidden_size,
        itemsize=2,
        whole_experts=True,
        num_experts=E,
        experts_per_rank=E // 2,
        capacity=capacity,
    )


def test_reasons() -> None:
    call = call_of(4, K, H)
    if jax.default_backend() == "cpu":
        assert peer.Peer().supports(call) == "the platform is cpu, not gpu"
        rule = r"`exchange` \(='peer'\) cannot run this call: peer: the platform is cpu"
        with jax.set_mesh(mesh_of(1, 2)), pytest.raises(ValueError, match=rule):
            layer(*arguments())


@pytest.mark.usefixtures("by_xla")
def test_many_tokens_go_from_array_to_array_unless_the_allocator_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer.Peer().supports(call_of(8192, 4, 2880)) is None
    assert collectives.way_of([8192 * 2880 * 2, 128, 128], lines=True) is collectives.Way.ARRAYS
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "BFC")
    assert peer.Peer().supports(call_of(8192, 4, 2880)) is None
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    reason = str(peer.Peer().supports(call_of(8192, 4, 2880)))
    assert "more than 8388608, and XLA_PYTHON_CLIENT_ALLOCATOR (=cuda_async) must be unset" in reason
    assert collectives.way_of([8192 * 2880 * 2, 128, 128], lines=True) is collectives.Way.SLOT
    assert peer.Peer().supports(call_of(1024, 4, 2880)) is None


@pytest.mark.usefixtures("by_xla")
def test_no_row_is_dropped() -> None:
    assert "it drops no rows" in str(peer.Peer().supports(call_of(4, K, H, capacity=1.0)))


# On GPUs


@pytest.fixture(scope="module")
def gpu_mesh() -> Any:
    if peer.fault(2):
        pytest.skip(f"these devices do not write into each other's memory: {peer.fault(2)}")
    return jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))


def both(arrays: Any, y: Any, lines: bool = False) -> Any:
    """The three collectives by `peer` and by XLA, in one program, with what each must equal bit for bit."""
    return {
        "gather": (
            collectives.all_gather(arrays, ("ep",), lines),
            [lax.all_gather(a, "ep", tiled=True) for a in arrays],
        ),
        "scatter": (
            collectives.reduce_scatter(y, ("ep",), lines),
            _ordered_sum(lax.all_to_all(y.reshape(lax.axis_size("ep"), -1, y.shape[1]), "ep", 0, 0), y.dtype),
        ),
        "sum": (collectives.all_reduce(y, ("ep",), lines), _ordered_sum(lax.all_gather(y, "ep"), y.dtype)),
    }


def _ordered_sum(parts: jax.Array, dtype: Any) -> jax.Array:
    total = jnp.zeros(parts.shape[1:], jnp.float32)
    for part in parts:
        total = total + part.astype(jnp.float32)
    return total.astype(dtype)


WAYS = pytest.mark.parametrize("way", [*collectives.Way], ids=lambda way: way.name.lower())


def send(way: collectives.Way, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Has rows sent so, where they can be; the `lines` of the collectives."""
    monkeypatch.setattr(collectives, "LEAST_ARRAY_BYTES", 0 if way == collectives.Way.ARRAYS else 1 << 60)
    jax.clear_caches()
    return way == collectives.Way.LINES


@pytest.mark.gpu
@pytest.mark.devices(2)
@WAYS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 2880, 4), (1, 7, 1), (3, 33, 3), (16, 2880, 4), (64, 2880, 8), (1000, 2880, 4)])
def test_collectives_give_the_bits_of_their_definition(
    gpu_mesh: Any, shape: Any, dtype: str, way: collectives.Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens, width, k = shape
    lines = send(way, monkeypatch)
    ranks = gpu_mesh.size
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = (
        jax.random.normal(keys[0], (ranks * num_tokens, width), dtype),
        jax.random.randint(keys[1], (ranks * num_tokens, k), -1, 128),
        jax.random.normal(keys[2], (ranks * num_tokens, k), dtype),
    )
    y = jax.random.normal(keys[3], (ranks * ranks * num_tokens, width), dtype)
    run = jax.jit(
        jax.shard_map(partial(both, lines=lines), mesh=gpu_mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    )
    for _ in range(3):
        for name, (got, wanted) in run(*jax.device_put((arrays, y), NamedSharding(gpu_mesh, P("ep")))).items():
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_array_equal(
                    np.asarray(a.view(jnp.uint8)), np.asarray(b.view(jnp.uint8)), err_msg=name
                )


@pytest.mark.gpu
@pytest.mark.devices(2)
def test_a_mesh_in_another_order_of_devices(gpu_mesh: Any) -> None:
    del gpu_mesh
    x, logits, experts = arguments()
    expected = layer(x, logits, experts, None)
    for order in ((0, 1), (1, 0)):
        with jax.set_mesh(mesh_of(1, 2, order=order)):
            program = jax.jit(layer).lower(x, logits, experts)
            assert program.as_text().count("@jmx_peer_") == 2
            assert relative_error(program.compile()(x, logits, experts), expected) <= 1e-5
            summed = jax.jit(partial(layer, split=jmx.Split(expert="ep"))).lower(x, logits, experts)
            assert summed.as_text().count("@jmx_peer_sum") == 1
            assert relative_error(summed.compile()(x, logits, experts), expected) <= 1e-5


@pytest.mark.gpu
@pytest.mark.devices(2)
@WAYS
def test_a_thousand_calls_with_delays_give_the_same_bits(
    gpu_mesh: Any, way: collectives.Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU is held up at random before each call, results lie in buffers that held NaN."""
    ranks, lines = gpu_mesh.size, send(way, monkeypatch)
    number = int(os.environ.get("JMX_TEST_CALLS", "1000"))

    def calls(x: jax.Array, y: jax.Array, delays: jax.Array) -> jax.Array:
        def step(total: jax.Array, delay: jax.Array) -> tuple[jax.Array, None]:
            waste = lax.fori_loop(0, delay[lax.axis_index("ep")], lambda _, a: jnp.tanh(a @ a), jnp.ones((256, 256)))
            zero = (waste[0, 0] * 0).astype(x.dtype)
            (rows,) = collectives.all_gather((x + zero + total[:1, :1] * 0,), ("ep",), lines)
            poison = jnp.full_like(rows, jnp.nan)
            part = collectives.reduce_scatter(jnp.where(delay[0] < 0, poison, rows * 3 + y), ("ep",), lines)
            everyones = collectives.all_reduce(part, ("ep",), lines)
            return total + part + everyones, None

        return lax.scan(step, jnp.zeros_like(x), delays)[0]

    x = jax.random.normal(jax.random.key(0), (ranks * 4, 2880), jnp.float32)
    y = jax.random.normal(jax.random.key(1), (ranks * ranks * 4, 2880), jnp.float32)
    x, y = jax.device_put((x, y), NamedSharding(gpu_mesh, P("ep")))
    specs = (P("ep"), P("ep"), P())
    run = jax.jit(jax.shard_map(calls, mesh=gpu_mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))
    first = np.zeros(0)
    start = time.monotonic()
    for seed in range(2):
        delays = jax.random.randint(jax.random.key(seed), (number // 2, ranks), 0, 20)
        got = np.asarray(run(x, y, delays))
        first = got if seed == 0 else first
        np.testing.assert_array_equal(got, first)
    assert np.isfinite(first).all()
    assert time.monotonic() - start < 120
