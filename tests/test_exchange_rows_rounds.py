"""The exchange `rows` where tokens need several rounds: results, gradients and transformations, beside one device."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jmx
from jmx.parallel import row_plan
from jmx.parallel.exchange import Call

pytestmark = [pytest.mark.costly, pytest.mark.devices(8), pytest.mark.sampled(2)]

E, H, K, EACH, CALLS = 16, 32, 2, 7, 3  # an odd number of tokens a device
T = 8 * EACH
C = np.sin(np.arange(CALLS * T * H, dtype=np.float32)).reshape(CALLS, T, H)
EXPERTS = partial(jmx.Experts.random, format="mxfp4", bias_dtype=jnp.float32)


def split_of(shape: tuple[int, int]) -> jmx.Split:
    mesh = jax.make_mesh(shape, ("dp", "ep"), axis_types=(AxisType.Auto,) * 2)
    return jmx.Split(expert="ep", tokens=("dp", "ep"), exchange="rows", mesh=mesh)


def ids_of(ranks: int) -> np.ndarray:
    """Calls that need as many rounds as there can be, few, and none."""
    ids = np.argsort(np.random.default_rng(0).random((CALLS, T, E)), axis=2)[:, :, :K].astype(np.int32)
    ids[0] %= E // ranks  # all of them to the first rank
    ids[0, :, 1] = jmx.NOWHERE  # an expert twice is none of a routing's
    ids[2] = jmx.NOWHERE
    return ids


def weighted(floats: Any, ids: Any, c: Any, experts: jmx.Experts, split: jmx.Split | None) -> Any:
    x, weights, gate_up_bias, down_bias = floats
    experts = dataclasses.replace(experts, gate_up_bias=gate_up_bias, down_bias=down_bias)
    y = jmx.moe(x, jmx.Routing(ids, weights), experts, activation="swiglu", backend="xla", split=split)
    return (y * c).sum(), y


def by_scan(step: Any, *by_call: Any) -> Any:
    return jax.lax.scan(lambda _, its: (None, step(*its)), None, by_call)[1]


def by_vmap(step: Any, *by_call: Any) -> Any:
    return jax.vmap(step)(*by_call)


@pytest.mark.parametrize("calls", [by_scan, by_vmap])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("shape", [(1, 8), (2, 4)])
def test_calls_that_need_different_numbers_of_rounds(shape: tuple[int, int], remat: bool, calls: Any) -> None:
    experts = EXPERTS(jax.random.key(0), E, H, 32, gate_up_order="interleaved")
    x = jax.random.normal(jax.random.key(1), (CALLS, T, H))
    weights = jax.random.uniform(jax.random.key(2), (CALLS, T, K))
    ids = jnp.asarray(ids_of(shape[1]))

    def gradients(split: jmx.Split | None) -> Any:
        def step(x: Any, weights: Any, ids: Any, c: Any) -> Any:
            loss = partial(weighted, experts=experts, split=split)
            loss = jax.checkpoint(loss) if remat else loss
            return jax.grad(loss, has_aux=True)((x, weights, experts.gate_up_bias, experts.down_bias), ids, c)

        return jax.jit(partial(calls, step))(x, weights, ids, C)

    got, again, expected = gradients(split_of(shape)), gradients(split_of(shape)), gradients(None)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, again))
    for ours, its in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        for call in range(CALLS):
            error = np.abs(ours[call] - its[call]).max()
            assert error <= 1e-6 * max(1, np.abs(its[call]).max()), call


@pytest.mark.parametrize("ranks", [4, 8])
def test_these_calls_do_need_several_rounds(ranks: int) -> None:
    call = Call(("ep",), ranks, EACH, K, H, 4, True, E, E // ranks)
    routing = jmx.Routing(jnp.asarray(ids_of(ranks)[0, :EACH]), jnp.ones((EACH, K)))
    plan = row_plan.plan_rows(call, routing, jnp.arange(ranks) * (E // ranks))
    assert plan.needed[:, 0].all()
    assert row_plan.most_rounds(call) == -(-EACH // row_plan.rows_of_a_round(call)) > 1
