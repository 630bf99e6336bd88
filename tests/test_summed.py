"""`peer` with the sum over a token's rows in the kernel that sends results."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import divided_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from model_steps import relative_error

import jmx
from jmx.engines.grouped import Terms
from jmx.ffi.peer import collectives, copies, library, needed, terms
from jmx.grouping import Blocks, Work
from jmx.pallas import place_rows
from jmx.parallel import arriving, peer, summed
from jmx.parallel import needed as needed_rows
from jmx.perf.shapes import MODELS
from jmx.xla.backend import Xla

E, H, T, K = 8, 96, 16, 3


def terms_of(self: Xla, problem: Any, x: Any, routing: Any, experts: Any, environment: Any, take: Any = None) -> Terms:
    """A row a slot, in an order that is not that of tokens, in two parts, with NaN where nothing may be read."""
    shape = routing.expert_ids.shape
    row_of = jnp.arange(routing.expert_ids.size, dtype=jnp.int32)[::-1]
    here = (routing.expert_ids >= 0) & (routing.expert_ids < problem.num_experts)
    work = Work(Blocks(None, 0, 0, 0, 0), jnp.where(here, row_of.reshape(shape), -1), row_of // shape[1])
    given = x[work.token_of_row] if take is None else take(problem, x, work)
    one = jmx.Routing(routing.expert_ids.reshape(-1, 1)[::-1], jnp.ones((given.shape[0], 1), jnp.float32))
    rows = self.apply(problem, given, one, experts, environment).astype(jnp.float32)
    rows = jnp.pad(jnp.where(here.reshape(-1, 1)[::-1], rows, jnp.nan), ((0, 0), (0, 4)))
    return Terms(jnp.stack([rows / 4, rows * 0.75]), work.row_of, routing.weights)


@pytest.fixture(params=["all", "needed", "arriving"])
def of_rows(request: Any, peer_by_collectives: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Which rows are sent, and how, for a test in which the reference gives its terms."""
    monkeypatch.setattr(Xla, "terms", terms_of, raising=False)
    monkeypatch.setattr(Xla, "takes_rows", lambda *_: True, raising=False)
    monkeypatch.setattr(summed, "GivesTerms", Xla)  # a protocol would know the reference as one after this test, too
    monkeypatch.setattr(needed_rows, "LEAST_BYTES", 0 if request.param == "needed" else 1 << 60)
    monkeypatch.setattr(needed_rows, "MOST_SHARE", 1.0)
    monkeypatch.setattr(arriving, "LEAST_BYTES", 0 if request.param == "arriving" else 1 << 60)
    monkeypatch.setattr(arriving, "MOST_RANKS", 4)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def layer(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    return jmx.moe(x, jmx.Logits(logits, jmx.TopKSoftmax(K)), experts, activation="swiglu", backend="xla", split=split)


def loss(x: Any, logits: Any, experts: Any, split: jmx.Split | None = None) -> jax.Array:
    y = layer(x, logits, experts, split)
    return (y * jnp.sin(jnp.arange(y.size)).reshape(y.shape)).sum()


@pytest.mark.costly
@pytest.mark.devices(4)
@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
def test_layers_and_what_is_made_of_them_are_those_of_one_device(
    of_rows: str, sizes: tuple[int, int], rng: np.random.Generator
) -> None:
    x, logits = (jnp.asarray(rng.normal(size=(4 * T, width)), jnp.float32) for width in (H, E))
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias_dtype="float32")
    mesh = jax.make_mesh(sizes, ("dp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    split = jmx.Split(expert="ep", tokens=("dp", "ep"), exchange="peer", mesh=mesh)

    def biased(bias: Any, x: Any, logits: Any, split: Any) -> Any:
        arrays = experts.arrays() | {"down_bias": bias}
        return loss(x, logits, experts.with_arrays(arrays), split)

    def every(x: Any, logits: Any, split: Any) -> Any:
        mapped = jax.vmap(partial(layer, experts=experts, split=split))(
            jnp.stack([x, -x]), jnp.stack([logits, x[:, :E]])
        )
        gradients = jax.grad(biased, (0, 1, 2))(experts.down_bias, x, logits, split)
        again = jax.grad(jax.checkpoint(partial(loss, split=split)))(x, logits, experts)
        return layer(x, logits, experts, split), mapped, *gradients, again

    text = str(jax.make_jaxpr(partial(layer, split=split))(x, logits, experts))
    assert text.count(f"{library.SCATTER_TERMS}[") == 1
    assert ("jmx_peer_gather_needed[" in text) == (of_rows == "needed")
    assert ("jmx_peer_start[" in text) == (of_rows == "arriving")
    way = collectives.Way.ARRAYS if of_rows == "needed" else collectives.Way.SLOT
    assert re.findall(r"way=(\d)", text) == [str(int(way))]
    expected = jax.jit(partial(every, split=None))(x, logits)
    for got, wanted in zip(jax.jit(partial(every, split=split))(x, logits), expected, strict=True):
        assert relative_error(got, wanted) <= 2e-6


@pytest.mark.devices(2)
def test_what_arrives_is_waited_for_inside_of_a_nested_shard_map(
    of_rows: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Where the mesh is abstract, and a lowering does not find its GPUs."""
    monkeypatch.setattr(place_rows, "_place", lambda *given, call: call.define(*given))  # a kernel needs a GPU's name
    x, logits = (jnp.asarray(rng.normal(size=(2 * T, width)), jnp.float32) for width in (H, E))
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias_dtype="float32")
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    call = jax.jit(partial(layer, split=jmx.Split(expert="ep", tokens="ep", exchange="peer", mesh=mesh)))
    lowered = call.trace(x, logits, experts).lower(lowering_platforms=("cuda",)).as_text()
    assert (library.FINISH in lowered) == (of_rows == "arriving")
    assert library.FINISH not in jax.export.export(call, platforms=["cuda"])(x, logits, experts).mlir_module()


@pytest.mark.costly
@pytest.mark.devices(2)
@pytest.mark.usefixtures("of_rows")
def test_inside_shard_map_outside_of_any_jit(rng: np.random.Generator) -> None:
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias_dtype="float32")
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    x, logits = (jnp.asarray(rng.normal(size=(4 * T, width)), jnp.float32) for width in (H, E))
    body = partial(layer, split=jmx.Split(expert="ep", tokens="ep", exchange="peer"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("ep"), P("ep"), P("ep")), out_specs=P("ep"))
    assert library.SCATTER_TERMS in str(jax.make_jaxpr(mapped)(x, logits, experts))
    assert relative_error(mapped(x, logits, experts), jax.jit(layer)(x, logits, experts)) <= 2e-6


@pytest.mark.costly
@pytest.mark.devices(2)
@pytest.mark.usefixtures("of_rows")
def test_rows_that_are_no_whole_units_are_summed_before(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    experts = jmx.Experts.random(jax.random.key(0), E, H, H, gate_up_order="interleaved", bias_dtype="float32")
    mesh = jax.make_mesh((2,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:2])
    split = jmx.Split(expert="ep", tokens="ep", exchange="peer", mesh=mesh)
    x, logits = (jnp.asarray(rng.normal(size=(4 * T, width)), jnp.float32) for width in (H, E))
    whole = str(jax.make_jaxpr(partial(layer, split=split))(x, logits, experts))
    assert library.SCATTER_TERMS in whole
    monkeypatch.setattr(terms, "UNIT_BYTES", 1 << 20)
    jax.clear_caches()
    assert library.SCATTER_TERMS not in str(jax.make_jaxpr(partial(layer, split=split))(x, logits, experts))


@pytest.mark.aot
@pytest.mark.skipif(not library._PATH.exists(), reason="needs jmx's kernels in C++")
@pytest.mark.parametrize(
    ("num_gpus", "tokens", "sent"),
    [(2, 64, ["gather"]), (2, 8192, ["start", "gather", "finish"]), (4, 4096, ["gather_needed"])],
)
def test_the_sum_reads_what_the_products_wrote_when_compiled(
    num_gpus: int, tokens: int, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy or another kernel between them."""
    divided_layers.lower_peer(monkeypatch, num_gpus, collectives, copies, needed, terms)
    entry = divided_layers.layer_over_h200s(MODELS["gpt-oss-120b"], num_gpus, num_gpus * tokens, exchange="peer")
    calls = re.findall(r'custom_call_target="(jmx_peer_\w+|mosaic_gpu_v2)"', entry)
    assert calls == [*(f"jmx_peer_{its}" for its in sent), "mosaic_gpu_v2", "jmx_peer_scatter_terms"]


# On GPUs


@pytest.mark.gpu
@pytest.mark.devices(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "columns", "slots"), [(1, 24, 1), (3, 96, 5), (40, 2880, 4), (300, 2880, 6), (1000, 2880, 8)]
)
@pytest.mark.parametrize("way", ["slots", "arrays", "needed"])
def test_sums_are_those_of_their_definition(
    tokens: int, columns: int, slots: int, dtype: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of integers, whose sums are exact; rows that no slot has are NaN, and so is memory before the calls."""
    if peer.fault(2):
        pytest.skip(f"these devices do not write into each other's memory: {peer.fault(2)}")
    monkeypatch.setattr(collectives, "LEAST_ARRAY_BYTES", 0 if way == "arrays" else 1 << 60)
    jax.clear_caches()
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), ("ep",), (AxisType.Auto,))
    rng, all_tokens, count = np.random.default_rng(0), ranks * tokens, 2 * tokens * slots + 1
    parts = rng.integers(-2, 3, (ranks, 2, count, columns + 4)).astype(np.float32)
    weights = np.ldexp(1.0, rng.integers(-1, 1, (all_tokens, slots))).astype(np.float32)
    owners = rng.integers(-1, ranks, (all_tokens, slots))
    row_of = np.stack([np.where(owners == rank, rng.integers(0, count - 1, owners.shape), -1) for rank in range(ranks)])
    unused = np.stack([~np.isin(np.arange(count), row_of[rank]) for rank in range(ranks)])
    bits = np.zeros(all_tokens, np.uint32)
    for rank in range(ranks):
        bits |= (owners == rank).any(axis=1).astype(np.uint32) << np.uint32(rank)
    expected = np.zeros((all_tokens, columns), np.float32)
    for rank in range(ranks):
        terms_of_rank = parts[rank].sum(axis=0)[row_of[rank], :columns] * weights[..., None]
        expected += np.where(row_of[rank][..., None] >= 0, terms_of_rank, 0).sum(axis=1)
    parts[np.broadcast_to(unused[:, None], parts.shape[:3])] = np.nan

    def scatter(parts: Any, row_of: Any) -> jax.Array:
        needed_by = jnp.asarray(bits) if way == "needed" else None
        return terms.reduce_scatter(parts[0], row_of[0], jnp.asarray(weights), needed_by, ("ep",), columns, dtype)

    run = jax.jit(jax.shard_map(scatter, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    arrays = jax.device_put((parts, row_of.astype(np.int32)), NamedSharding(mesh, P("ep")))
    assert f"@{library.SCATTER_TERMS}" in run.lower(*arrays).as_text()
    for _ in range(3):
        nan = jax.device_put(np.full((ranks, 1 << 22), np.nan, np.float32), NamedSharding(mesh, P("ep"))) + 1
        jax.block_until_ready(nan)
        del nan
        np.testing.assert_array_equal(np.asarray(run(*arrays), np.float32), expected)
