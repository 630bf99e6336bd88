"""The exchange `rows`: its plan against Python's, its bounds, and what a capacity drops."""

from functools import partial
from itertools import product
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmx
from jmx.parallel import row_plan
from jmx.parallel.exchange import Call

E, H, K = 8, 32, 2


def call_of(num_tokens: int, num_ranks: int = 4, capacity: float | None = None) -> Call:
    return Call(("ep",), num_ranks, num_tokens, K, H, 4, True, E, E // num_ranks, capacity)


def ids_of(num_tokens: int) -> np.ndarray:
    """Two different experts a token, or none."""
    generator = np.random.default_rng(num_tokens)
    ids = np.argsort(generator.random((num_tokens, E)), axis=1)[:, :K].astype(np.int32)
    ids[::5] = [jmx.NOWHERE, 3]
    return ids


@pytest.mark.parametrize("capacity", [None, 0.5, 1, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
def test_rows_of_each_rank_in_the_order_of_the_tokens(num_tokens: int, capacity: float | None) -> None:
    call, ids = call_of(num_tokens, capacity=capacity), ids_of(num_tokens)
    routing = jmx.Routing(jnp.asarray(ids), jnp.ones(ids.shape))
    plan = row_plan.plan_rows(call, routing, jnp.arange(call.num_ranks) * call.experts_per_rank)
    for rank in range(call.num_ranks):
        wanted = [t for t in range(num_tokens) if any(i // call.experts_per_rank == rank for i in ids[t])]
        accepted = wanted[: row_plan.accepted_rows(call)]
        rows = [*accepted, *[num_tokens] * (plan.tokens.shape[1] - len(accepted))]
        assert plan.tokens[rank].tolist() == rows
        assert np.flatnonzero(plan.needed[:, rank]).tolist() == accepted
        assert plan.position[:, rank][np.asarray(accepted, int)].tolist() == [*range(len(accepted))]


def test_the_average_is_that_of_all_choices_of_experts() -> None:
    call = call_of(1)
    choices = [chosen for chosen in product(range(E), repeat=K) if len({*chosen}) == K]
    share = np.mean([any(expert < call.experts_per_rank for expert in chosen) for chosen in choices])
    assert row_plan.average_rows(call) == pytest.approx(share)


@pytest.mark.parametrize("capacity", [None, 0.1, 1, 5, 1e308])
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 1000, 8192])
def test_bounds_of_a_round(num_tokens: int, capacity: float | None) -> None:
    call = call_of(num_tokens, capacity=capacity)
    rows = row_plan.rows_of_a_round(call)
    assert 1 <= rows <= max(1, 2 * row_plan.average_rows(call))
    assert row_plan.most_rounds(call) * rows >= row_plan.accepted_rows(call)
    assert row_plan.most_rounds(call) <= ceil(num_tokens / rows)


def layer(x: jax.Array, routing: jmx.Routing, experts: jmx.Experts, split: jmx.Split | None = None) -> jax.Array:
    return jmx.moe(x, routing, experts, activation="swiglu", backend="xla", split=split)


@pytest.mark.costly
@pytest.mark.devices(8)
def test_a_capacity_drops_rows_beyond_it() -> None:
    """One device computes the same without the ids of dropped rows."""
    num_tokens, ranks = 16, 4
    experts = jmx.Experts.random(jax.random.key(0), E, H, 32, gate_up_order="interleaved")
    x = jax.random.normal(jax.random.key(1), (num_tokens * ranks, H))
    ids = ids_of(num_tokens * ranks)
    ids[:40] = [1, 6]  # more than the capacity to two of the ranks
    call = call_of(num_tokens, capacity=1)
    kept = ids.copy()
    for device, rank in product(range(ranks), repeat=2):
        tokens = np.arange(num_tokens) + num_tokens * device
        wanted = [t for t in tokens if (ids[t] // call.experts_per_rank == rank).any()]
        for t in wanted[row_plan.accepted_rows(call) :]:
            kept[t][ids[t] // call.experts_per_rank == rank] = jmx.NOWHERE
    assert (kept != ids).any()
    weights = jnp.ones(ids.shape)
    mesh = jax.make_mesh((ranks,), ("ep",), (AxisType.Auto,), devices=jax.devices()[:ranks])
    split = jmx.Split(expert="ep", tokens="ep", mesh=mesh, capacity=1)  # `gather` drops nothing, so this is `rows`
    y = jax.jit(partial(layer, split=split))(x, jmx.Routing(jnp.asarray(ids), weights), experts)
    expected = jax.jit(layer)(x, jmx.Routing(jnp.asarray(kept), weights), experts)
    assert np.linalg.norm(y - expected) <= 1e-6 * np.linalg.norm(expected)


def test_capacities_that_are_refused() -> None:
    for capacity in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"`capacity` \(=.*\) must be"):
            jmx.Split(expert="ep", tokens="ep", capacity=capacity)
    with pytest.raises(ValueError, match=r"`capacity` \(=2\) must be None where no rows are exchanged"):
        jmx.Split(expert="ep", tokens="dp", capacity=2)


@pytest.mark.costly
@pytest.mark.devices(8)
def test_temporary_memory_is_that_of_one_round() -> None:
    """Beside what the experts need: rows and results, each where they are sent from and where they arrive."""
    ranks, num_tokens, size = 8, 1024, 256
    call = Call(("ep",), ranks, num_tokens, K, size, 2, True, 4 * ranks, 4)
    received = ranks * row_plan.rows_of_a_round(call)
    mesh = jax.make_mesh((ranks,), ("ep",), (AxisType.Auto,))
    split = jmx.Split(expert="ep", tokens="ep", mesh=mesh, exchange="rows")

    def temporary(rows: int, experts: int, split: jmx.Split | None, *spec: str) -> int:
        key = jax.random.key(0)
        weights = partial(jmx.Experts.random, key, experts, size, 64, gate_up_order="interleaved")
        x = jnp.zeros((rows, size), jnp.bfloat16)
        arguments = x, jmx.Routing(jnp.zeros((rows, K), jnp.int32), jnp.zeros((rows, K))), jax.eval_shape(weights)
        sharding = NamedSharding(mesh, PartitionSpec(*spec)) if split else None
        described = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
        compiled = jax.jit(partial(layer, split=split)).lower(*described).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    experts_alone = temporary(received, 4, None)
    buffer = received * (size * 2 + 8 * K)
    summed, plan = 4 * num_tokens * size, 16 * num_tokens * ranks * K
    assert temporary(num_tokens * ranks, 4 * ranks, split, "ep") <= experts_alone + 4 * buffer + summed + plan
