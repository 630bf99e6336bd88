"""Rows of `peer` for the devices that need them: which do, the calls that leave others out, and their kernels."""

import ctypes
import os
import pathlib
import shutil
import subprocess
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx.backends import register_handlers
from jmx.ffi import nvrtc
from jmx.ffi.peer import library, needed
from jmx.ffi.peer.needed import Chosen
from jmx.parallel import needed as exchange
from jmx.parallel import peer
from jmx.parallel.exchange import Call
from jmx.routing import GroupedTopK, SigmoidTopK, TopKSoftmax

ROOT = pathlib.Path(__file__).parents[1]
E, H, K = 8, 64, 2


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions of needed.h for one lane."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("needed") / "needed_ranks.so"
    flags = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(ROOT / "jmx/ffi/peer/src"),
    ]
    subprocess.run([compiler, *flags, str(ROOT / "tests/needed_ranks.cc"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).ranks_of


def by_header(function: Any, routing: np.ndarray, firsts: np.ndarray, chosen: Chosen, among: int) -> np.ndarray:
    tokens, width = routing.shape
    found = np.zeros(tokens, np.uint32)
    function(
        routing.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_long(tokens),
        ctypes.c_int(width),
        ctypes.c_bool(routing.dtype == np.float32),
        firsts.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int(firsts.size),
        ctypes.c_int(chosen.each),
        ctypes.c_int(chosen.top_k),
        ctypes.c_uint(among),
        found.ctypes.data_as(ctypes.c_void_p),
    )
    return found


@pytest.mark.parametrize(("num_experts", "num_ranks", "top_k"), [(16, 4, 2), (128, 8, 4), (500, 5, 8), (33, 3, 1)])
def test_the_ranks_of_a_token_are_those_of_its_experts(
    compiled: Any, num_experts: int, num_ranks: int, top_k: int, rng: np.random.Generator
) -> None:
    """Of ties, and of logits that are no numbers, too; the header's functions find the same."""
    each = num_experts // num_ranks
    firsts = np.array(rng.permutation(num_ranks) * each, np.int32)
    chosen = Chosen(top_k, each)
    logits = rng.normal(size=(64, num_experts)).astype(np.float32)
    logits[:16] = np.round(logits[:16])
    logits[rng.random(logits.shape) < 0.05] = np.nan
    logits[rng.random(logits.shape) < 0.05] = np.inf
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[3], logits[4] = -np.inf, np.nan
    ids, _ = jmx.route(jmx.Logits(logits, TopKSoftmax(top_k)))
    for values, is_logits in ((logits, True), (np.asarray(ids), False)):
        found = np.asarray(needed.ranks_of(jnp.asarray(values), jnp.asarray(firsts), chosen, is_logits))
        np.testing.assert_array_equal(by_header(compiled, values, firsts, chosen, (1 << num_ranks) - 1), found)
        one = by_header(compiled, values, firsts, chosen, 2)
        np.testing.assert_array_equal(one, found & 2)
    exact = np.zeros(64, np.uint32)
    for rank, first in enumerate(firsts):
        exact |= ((ids >= first) & (ids < first + each)).any(axis=1).astype(np.uint32) << np.uint32(rank)
    np.testing.assert_array_equal(found, exact)
    by_logits = np.asarray(needed.ranks_of(jnp.asarray(logits), jnp.asarray(firsts), chosen, True))
    np.testing.assert_array_equal(by_logits & exact, exact)
    normal = np.isfinite(logits).all(axis=1) & (np.arange(64) >= 16)
    np.testing.assert_array_equal(by_logits[normal], exact[normal])
    assert by_logits[3] == by_logits[4] == 0


def call_of(num_tokens: int, num_ranks: int, **options: Any) -> Call:
    """Of gpt-oss-120b."""
    return Call(("ep",), num_ranks, num_tokens, 4, 2880, 2, True, 128, 128 // num_ranks, **options)


def test_rows_are_left_out_where_many_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchange.applies(call_of(1024, 4, logit_bytes=512))
    assert exchange.applies(call_of(1024, 8))
    assert not exchange.applies(call_of(1024, 2))  # which need 94% of them
    assert not exchange.applies(call_of(256, 4))  # which are sent by slots
    assert not exchange.applies(call_of(1024, 4, ranks_known=False))
    assert not exchange.applies(Call(("ep",), 4, 4096, 4, 2884, 2, True, 128, 32))  # rows that are no whole units
    sent = peer.Peer().bytes_sent(call_of(1024, 4, logit_bytes=512))
    share = 1 - np.prod([(96 - i) / (128 - i) for i in range(4)])
    assert sent == (3 * 1024 * 512 + round(3 * 1024 * 5760 * share), round(3 * 1024 * 5760 * share))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "vmm")
    assert not exchange.applies(call_of(1024, 4))


def test_which_routing_tells_the_ranks() -> None:
    values = jnp.zeros((4, 16))
    assert exchange.names_ranks(jmx.Routing(jnp.zeros((4, 2), jnp.int32), values[:, :2]))
    assert exchange.names_ranks(jmx.Logits(values, TopKSoftmax(2)))
    assert exchange.names_ranks(jmx.Logits(values, SigmoidTopK(2, renormalize=True)))
    assert not exchange.names_ranks(jmx.Logits(values, SigmoidTopK(2, renormalize=True), values[0]))
    assert not exchange.names_ranks(jmx.Logits(values, GroupedTopK(2, 4, 2, "softmax", True)))
    assert not exchange.names_ranks(jmx.Logits(values.astype(jnp.bfloat16), TopKSoftmax(2)))


def test_the_kernels_are_compiled_once_for_programs_that_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that another process has compiled is not lowered here."""
    given: list[tuple[bytes, bytes]] = []
    loaded: Any = SimpleNamespace(jmx_peer_set_image=lambda *its: given.append((its[0], its[1].value[: its[2].value])))
    monkeypatch.setattr(library, "library", lambda: library.Library(loaded=loaded))
    monkeypatch.setattr(nvrtc, "architecture", lambda: "sm_90")
    monkeypatch.setattr(nvrtc, "compile_kernels", lambda folder, headers, arch, source: f"{arch} {source}".encode())
    library._compile_once.cache_clear()
    register_handlers([library.GATHER])
    assert not given
    register_handlers([library.GATHER_NEEDED, library.SCATTER_NEEDED])
    register_handlers([library.SCATTER_NEEDED])
    register_handlers([library.SCATTER_TERMS])
    assert given == [(b"needed.cu", b"sm_90 needed.cu"), (b"terms.cu", b"sm_90 terms.cu")]
    library._compile_once.cache_clear()


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    return jmx.moe(x, jmx.Logits(logits, TopKSoftmax(K)), experts, activation="swiglu", backend="xla", split=split)


def loss(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    y = layer(x, logits, experts, split)
    return (y * jnp.sin(jnp.arange(y.size)).reshape(y.shape)).sum()


@pytest.mark.costly
@pytest.mark.sampled(1)
@pytest.mark.devices(4)
@pytest.mark.usefixtures("peer_by_collectives")
@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_layers_and_gradients_are_those_of_one_device(
    sizes: tuple[int, int], chunks: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where XLA's collectives run, and rows that are left out are zeros."""
    monkeypatch.setattr(exchange, "LEAST_BYTES", 0)
    monkeypatch.setattr(exchange, "MOST_SHARE", 1.0)
    jax.clear_caches()
    x, logits = (jnp.asarray(rng.normal(size=(32, width)), jnp.float32) for width in (H, E))
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias_dtype="float32")
    mesh = jax.make_mesh(sizes, ("dp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange="peer", chunks=chunks, mesh=mesh)

    def every(x: Any, logits: Any, split: Any) -> Any:
        mapped = jax.vmap(partial(layer, experts=experts, split=split))(x[None], logits[None])[0]
        gradients = jax.grad(loss, (0, 1))(x, logits, experts, split)
        return layer(x, logits, experts, split), mapped, *gradients

    assert "jmx_peer_gather_needed" in str(jax.make_jaxpr(partial(every, split=split))(x, logits))
    expected = jax.jit(partial(every, split=None))(x, logits)
    for got, wanted in zip(jax.jit(partial(every, split=split))(x, logits), expected, strict=True):
        assert relative_error(got, wanted) <= 2e-6
    jax.clear_caches()


# On GPUs


@pytest.fixture(scope="module")
def mesh() -> Any:
    if peer.fault(2):
        pytest.skip(f"these devices do not write into each other's memory: {peer.fault(2)}")
    return jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))


def drawn(mesh: Any, tokens: int, width: int, dtype: str, is_logits: bool) -> tuple[Any, ...]:
    """Of all ranks: x, routing of 3 of 8 experts a rank, and what each rank returns for each token."""
    ranks = mesh.size
    keys = jax.random.split(jax.random.key(tokens), 3)
    x = jax.random.normal(keys[0], (ranks * tokens, width), dtype)
    logits = jax.random.normal(keys[1], (ranks * tokens, 8 * ranks))
    routing = (logits,) if is_logits else tuple(jmx.route(jmx.Logits(logits, TopKSoftmax(3)))[:2])
    return x, routing, jax.random.normal(keys[2], (ranks * ranks * tokens, width), dtype)


def of_ranks(x: Any, routing: Any, y: Any, firsts: Any, rows: int) -> Any:
    """The kernels' results, and what they must equal bit for bit. What ranks return is NaN where it is not needed."""
    chosen, axes = Chosen(3, 8), ("ep",)
    ranks, tokens, index = lax.axis_size("ep"), len(x), lax.axis_index("ep")
    got, bits = needed.all_gather((x, *routing), firsts, axes, chosen, rows)
    static = {"axes": axes, "num_ranks": ranks, "chosen": chosen, "rows": rows}
    expected = needed._gather_by_xla(x, *routing, firsts, **static)
    # The last tokens' results.
    its = expected[-1].reshape(ranks, tokens)[:, tokens - rows :].reshape(-1)
    returned = y.reshape(ranks, tokens, -1)[:, :rows].reshape(ranks * rows, -1)
    mine = (its >> index.astype(jnp.uint32) & 1 == 1)[:, None]
    part = needed.reduce_scatter(jnp.where(mine, returned, jnp.nan), bits, axes)
    parts = lax.all_to_all(jnp.where(mine, returned, 0).reshape(ranks, rows, -1), "ep", 0, 0)
    total = jnp.zeros(parts.shape[1:], jnp.float32)
    for its in parts:
        total = total + its.astype(jnp.float32)
    return [*got, bits, part], [*expected, total.astype(y.dtype)]


@pytest.mark.gpu
@pytest.mark.devices(2)
@pytest.mark.parametrize("is_logits", [True, False], ids=["logits", "ids"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sizes", [(1, 1, 2880), (7, 7, 64), (333, 100, 2880), (1024, 1024, 2880)], ids=str)
def test_kernels_give_the_bits_of_their_definition(
    mesh: Any, sizes: tuple[int, int, int], dtype: str, is_logits: bool
) -> None:
    """Of tokens, of which some rows are sent, and columns."""
    tokens, rows, width = sizes
    given = jax.device_put(drawn(mesh, tokens, width, dtype, is_logits), NamedSharding(mesh, P("ep")))
    firsts = jnp.arange(mesh.size, dtype=jnp.int32) * 8
    specs = P("ep"), P("ep"), P("ep"), P()
    body = partial(of_ranks, rows=rows)
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))
    for _ in range(3):
        got, wanted = run(*given, firsts)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a.view(jnp.uint8)), np.asarray(b.view(jnp.uint8)))


@pytest.mark.gpu
@pytest.mark.devices(2)
def test_a_thousand_calls_with_delays_give_the_same_bits(mesh: Any) -> None:
    """Each GPU is held up at random before each call."""
    number = int(os.environ.get("JMX_TEST_CALLS", "1000"))
    x, routing, _ = drawn(mesh, 64, 2880, "bfloat16", True)

    def calls(x: Any, routing: Any, delays: Any, firsts: Any) -> Any:
        def step(total: Any, delay: Any) -> tuple[Any, None]:
            waste = lax.fori_loop(0, delay[lax.axis_index("ep")], lambda _, a: jnp.tanh(a @ a), jnp.ones((256, 256)))
            given = x + (waste[0, 0] * 0).astype(x.dtype) + total[:1, :1] * 0
            (rows, *_), bits = needed.all_gather((given, *routing), firsts, ("ep",), Chosen(3, 8))
            return total + needed.reduce_scatter(rows * 3, bits, ("ep",)), None

        return lax.scan(step, jnp.zeros_like(x), delays)[0]

    x, routing = jax.device_put((x, routing), NamedSharding(mesh, P("ep")))
    specs = P("ep"), P("ep"), P(), P()
    run = jax.jit(jax.shard_map(calls, mesh=mesh, in_specs=specs, out_specs=P("ep"), check_vma=False))
    firsts = jnp.arange(mesh.size, dtype=jnp.int32) * 8
    first = None
    for seed in range(2):
        delays = jax.random.randint(jax.random.key(seed), (number // 2, mesh.size), 0, 20)
        got = np.asarray(run(x, routing, delays, firsts).astype(jnp.float32))
        assert np.isfinite(got).all()
        first = got if first is None else first
        np.testing.assert_array_equal(got, first)
