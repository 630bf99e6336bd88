"""Expert maps of ranks: by their definition, and the layer out of what each rank computes with its own experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from placements import random_table

import jmx
from jmx.parallel import Placement, expert_map, local_routing

E, H, I, T, K = 6, 32, 32, 10, 3  # noqa: E741


def linear(num_experts: int, num_ranks: int, rank: int) -> np.ndarray:
    """vLLM's "linear" placement, where ranks divide experts."""
    each = num_experts // num_ranks
    return np.array([e - rank * each if e // each == rank else -1 for e in range(num_experts)])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_maps_of_the_identity_are_linear(num_ranks):
    for rank in range(num_ranks):
        found = expert_map(Placement.identity(E, num_ranks), rank)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, linear(E, num_ranks, rank))


def test_a_round_robin_placement_has_its_map():
    """vLLM's "round_robin": expert e on rank e % ranks; the slots of rank 0 come first."""
    table = np.arange(E).reshape(-1, 2).T.reshape(-1)
    for rank in range(2):
        found = expert_map(Placement.of(table, num_experts=E, num_ranks=2), rank)
        np.testing.assert_array_equal(found, [e // 2 if e % 2 == rank else -1 for e in range(E)])


def test_maps_are_inverse_to_slots_with_copies_and_empty_slots(rng):
    for _ in range(20):
        table = random_table(rng, E, 4, 12)
        for rank, held in enumerate(table.reshape(4, -1)):
            found = expert_map(Placement.of(table, num_experts=E, num_ranks=4), rank)
            for expert in range(E):
                places = np.flatnonzero(held == expert)
                assert found[expert] == (places[0] if places.size else -1)


def test_what_the_ranks_compute_adds_up_to_the_layer(rng):
    experts = jmx.Experts.random(jax.random.key(int(rng.integers(2**31))), E, H, I, gate_up_order="concatenated")
    x = rng.standard_normal((T, H)).astype(np.float32)
    ids = rng.integers(-2, E + 2, (T, K), np.int32)
    routing = jmx.Routing(ids, rng.standard_normal((T, K)).astype(np.float32))
    placement = Placement.of(np.array([4, 0, -1, 1, 5, 3, 2, -1]), num_experts=E, num_ranks=2)
    total = np.zeros((T, H))
    for rank in range(2):
        held = np.maximum(np.asarray(placement.expert_of_slot).reshape(2, -1)[rank], 0)
        own = experts.with_arrays({name: array[held] for name, array in experts.arrays().items()})
        local = jax.jit(local_routing)(routing, expert_map(placement, rank))
        assert local.expert_ids.dtype == jnp.int32
        total += np.asarray(jmx.moe(x, local, own, activation="swiglu"), np.float64)
    whole = np.asarray(jmx.moe(x, routing, experts, activation="swiglu"), np.float64)
    assert np.linalg.norm(total - whole) <= 1e-6 * np.linalg.norm(whole)


ROUTING = jmx.Routing(np.ones((T, K), np.int32), np.ones((T, K), np.float32))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: expert_map(Placement.identity(E, 2), 2), ValueError, r"`rank` \(=2\) must be in 0..1"),
        (lambda: expert_map(Placement.identity(E, 2), -1), ValueError, r"`rank` \(=-1\)"),
        (lambda: expert_map(Placement.identity(E, 2), 1.0), TypeError, "`rank`"),  # pyright: ignore
        (lambda: expert_map(np.arange(E), 0), TypeError, "`placement`"),  # pyright: ignore
        (lambda: local_routing(ROUTING, np.ones((2, E), np.int32)), ValueError, r"`expert_map` \(shape \(2, 6\)\)"),
        (lambda: local_routing(ROUTING, np.ones(0, np.int32)), ValueError, r"`expert_map` \(shape \(0,\)\)"),
        (lambda: local_routing(ROUTING, np.ones(E)), TypeError, r"`expert_map` \(dtype float64\) must be integer"),
        (lambda: local_routing(ROUTING, [0, 1]), TypeError, "`expert_map`"),
        (lambda: local_routing(ROUTING.expert_ids, np.ones(E, int)), TypeError, "`routing`"),  # pyright: ignore
    ],
)
def test_what_is_no_map_or_rank_is_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
