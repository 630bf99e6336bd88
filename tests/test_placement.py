"""Placements: maps that are each other's inverses, errors that name what is wrong, and slots chosen on the device."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from placements import random_placement, random_table

from jmx import NOWHERE
from jmx.parallel import Placement
from jmx.parallel.placement import _slot_ids

COPIES = [0, 1, 2, 0, 3, -1, 0, 4, 5, 0, 1, -1]  # experts 0 and 1 have copies, of 6 experts on 4 ranks


def placed(table=COPIES, num_experts=6, num_ranks=4):
    return Placement.of(np.array(table), num_experts=num_experts, num_ranks=num_ranks)


# The maps


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "spare", "slots"),
    [
        (8, 8, 0, 8),
        (8, 4, 0, 8),
        (128, 8, 8, 136),
        (60, 8, 0, 64),
        (60, 8, 5, 72),
        (3, 8, 0, 8),
        (1, 1, 0, 1),
        (5, 1, 2, 7),
    ],
)
def test_identity_has_each_expert_in_its_own_slot(num_experts, num_ranks, spare, slots):
    placement = Placement.identity(num_experts, num_ranks, spare)
    assert placement.num_slots == slots
    assert placement.spare_experts == slots - num_experts
    assert placement.slots_per_rank * num_ranks == slots
    assert (placement.num_experts, placement.num_ranks, placement.layers) == (num_experts, num_ranks, ())
    assert placement.expert_of_slot.tolist() == [*range(num_experts), *[-1] * (slots - num_experts)]
    assert placement.slots_of_expert[:, 0].tolist() == [*range(num_experts)]
    assert (placement.slots_of_expert[:, 1:] == -1).all()
    assert (placement.copies == 1).all()
    placement.check()


@given(seed=st.integers(0, 2**32), num_ranks=st.integers(1, 5), per_rank=st.integers(1, 4), data=st.data())
def test_maps_are_inverses(seed, num_ranks, per_rank, data):
    num_experts = data.draw(st.integers(1, num_ranks * per_rank))
    table = random_table(np.random.default_rng(seed), num_experts, num_ranks, per_rank)
    placement = placed(table, num_experts, num_ranks)
    placement.check()
    assert placement.expert_of_slot.tolist() == table.tolist()
    for expert in range(num_experts):
        slots = [slot for slot, its in enumerate(table) if its == expert]
        assert placement.copies[expert] == len(slots)
        row = placement.slots_of_expert[expert].tolist()
        assert row == slots + [-1] * (len(row) - len(slots))
    assert all(array.dtype == np.int32 for array in jax.tree.leaves(placement))


def test_shapes_depend_on_sizes_only(rng):
    """So that a compiled function takes every placement."""
    structures = {
        str(jax.tree.map(lambda array: (array.shape, array.dtype), random_placement(rng, 6, 4, 3))) for _ in range(20)
    }
    assert len(structures) == 1


def test_layers_are_stacked_and_taken_apart(rng):
    layers = [random_placement(rng, 6, 4, 3) for _ in range(3)]
    stack = Placement.stack(layers)
    stack.check()
    assert (stack.layers, stack.num_experts, stack.num_slots, stack.slots_per_rank) == ((3,), 6, 12, 3)
    again = Placement.of(stack.expert_of_slot, num_experts=6, num_ranks=4)
    for i in (0, 1, -1):
        for other in (layers[i], again.layer(i)):
            for name in ("slots_of_expert", "copies", "expert_of_slot"):
                assert np.array_equal(getattr(stack.layer(i), name), getattr(other, name))


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_placement_on_a_mesh_is_the_same(rng, kind):
    placement = random_placement(rng, 6, 4, 3)
    there = placement.on(jax.make_mesh((8,), ("a",), axis_types=(kind,)))
    there.check()
    assert all(array.is_fully_replicated for array in jax.tree.leaves(there))
    ids = rng.integers(0, 6, (8, 2))
    assert np.array_equal(there.slot_ids(ids), placement.slot_ids(ids))
    with pytest.raises(TypeError, match=r"`mesh` \(=3, an int\) must be a jax.sharding.Mesh"):
        placement.on(3)  # pyright: ignore[reportArgumentType]


# Errors


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0, 1, 2, 0, 3, -1, 0, 4, -1, 0, 1, -1], "no slot of expert 5"),
        ([0, 1, 0, 2, 3, -1, 0, 4, 5, 0, 1, -1], "expert 0 twice on rank 0"),
        ([0, 1, 2, 0, 3, 6, 0, 4, 5, 0, 1, -1], "expert 6: it must be in 0..5, or -1"),
        ([0, 1, 2, 0, 3, -2, 0, 4, 5, 0, 1, -1], "expert -2: it must be in 0..5, or -1"),
        ([0, 1, 2, 3, 4, 5], "(shape (6,)) must have a number of slots that is a multiple of `num_ranks` (=4)"),
        ([0, 1, 2, 3], "(of 4 slots) must have a slot for each of 6 experts"),
        ([], "(shape (0,)) must be (slots,) or (layers, slots)"),
        ([[[0]]], "(shape (1, 1, 1)) must be (slots,) or (layers, slots)"),
    ],
)
def test_a_wrong_table_is_named(table, message):
    with pytest.raises(ValueError, match=rf"`expert_of_slot` .*{re.escape(message)}"):
        placed(np.array(table, np.int64))


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("copies", (1,), 1, "`copies[1]` (=1) must be 2, as `expert_of_slot` has expert 1"),
        ("slots_of_expert", (3, 0), 5, "`slots_of_expert[3]` (=[5, -1, -1, -1]) must be [4, -1, -1, -1], as"),
        ("slots_of_expert", (0, 3), -1, "`slots_of_expert[0]` (=[0, 3, 6, -1]) must be [0, 3, 6, 9], as"),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_maps_that_disagree_are_named(name, index, value, message, stacked):
    placement = Placement.stack([placed(), placed()]) if stacked else placed()
    array = getattr(placement, name).copy()
    array[(*[1] * stacked, *index)] = value
    if stacked:
        message = message.replace("[", "[1, ", 1)
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(placement, **{name: array}).check()


def test_maps_of_another_shape_are_named():
    with pytest.raises(ValueError, match=re.escape("`slots_of_expert` (shape (6, 1)) must be (6, 4)")):
        dataclasses.replace(placed(), slots_of_expert=np.zeros((6, 1), np.int32)).check()


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "3", None, True])
@pytest.mark.parametrize("name", ["num_experts", "num_ranks", "spare_experts"])
def test_wrong_sizes_are_named(name, wrong):
    if (name, wrong) == ("spare_experts", 0):
        return
    with pytest.raises((TypeError, ValueError), match=rf"`{name}` \(.*\) must be"):
        Placement.identity(**{"num_experts": 4, "num_ranks": 2, "spare_experts": 0} | {name: wrong})


@pytest.mark.parametrize("wrong", [None, "x", [0, 1], 3, np.zeros(4), np.ones(4, bool)])
def test_a_table_must_be_an_array_of_integers(wrong):
    with pytest.raises(TypeError, match="`expert_of_slot`"):
        Placement.of(wrong, num_experts=1, num_ranks=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "must hold that of one layer at least"),
        ("x", "must be a sequence of jmx.parallel.Placement"),
        (3, "must be a sequence of jmx.parallel.Placement"),
        ([3], r"`placements\[0\]` .* must be a jmx.parallel.Placement"),
        ([placed(), Placement.identity(6, 3, 6)], r"`placements\[1\].num_ranks` \(=3\) must be 4"),
        ([placed(), Placement.identity(6, 4, 0)], r"`placements\[1\].num_slots` \(=8\) must be 12"),
        ([placed(), Placement.identity(12, 4)], r"`placements\[1\].num_experts` \(=12\) must be 6"),
        ([Placement.stack([placed()])], r"`placements\[0\]` \(of layers \(1,\)\) must be that of one layer"),
    ],
)
def test_layers_that_do_not_fit_are_named(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Placement.stack(wrong)


def test_a_layer_that_is_not_there_is_named():
    stack = Placement.stack([placed()])
    wrong: list[Any] = [1, -2, 1.0, None]
    for index in wrong:
        with pytest.raises((TypeError, ValueError), match="`index`"):
            stack.layer(index)
    with pytest.raises(ValueError, match="must be called on a placement of several layers"):
        placed().layer(0)


# Slots of tokens


def slots_by_definition(placement, ids, first_token):
    """In Python integers: copy number floor(c * (top 16 bits of token * 2654435769 mod 2^32) / 2^16)."""
    found = np.full(ids.shape, NOWHERE)
    for token, row in enumerate(ids.reshape(-1, ids.shape[-1]).tolist()):
        part = (first_token + token) * 2654435769 % 2**32 >> 16
        for k, expert in enumerate(row):
            if 0 <= expert < placement.num_experts:
                copy = part * int(placement.copies[expert]) >> 16
                found.reshape(-1, ids.shape[-1])[token, k] = placement.slots_of_expert[expert, copy]
    return found


@pytest.mark.parametrize("leading", [(24,), (4, 6), ()])
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.int64, np.uint32])
def test_slots_are_those_of_the_definition(rng, leading, dtype):
    placement = random_placement(rng, 6, 4, 3)
    ids = rng.integers(0 if dtype == np.uint32 else -2, 8, (*leading, 3)).astype(dtype)
    for first in (0, 1000):
        found = placement.slot_ids(ids, first)
        assert found.dtype == jnp.int32
        assert np.array_equal(found, slots_by_definition(placement, ids.astype(np.int64), first))


def test_ids_that_int32_cannot_hold_are_nowhere():
    assert placed().slot_ids(np.array([[2**32, 2**40, -(2**33), 3]])).tolist() == [[NOWHERE] * 3 + [4]]


def test_a_slot_holds_its_tokens_expert_and_every_copy_is_used(rng):
    placement = random_placement(rng, 6, 4, 3)
    ids = rng.integers(0, 6, (4096, 2))
    slots = np.asarray(placement.slot_ids(ids))
    assert np.array_equal(placement.expert_of_slot[slots], ids)
    assert {*slots.ravel().tolist()} == {*np.flatnonzero(placement.expert_of_slot >= 0).tolist()}


@pytest.mark.parametrize("copies", [2, 3, 5, 8, 33])
@pytest.mark.parametrize("stride", [1, 2, 3, 8, 64])
def test_copies_get_equal_numbers_of_tokens(copies, stride):
    """Of consecutive tokens, and of every n-th one."""
    placement = placed([0] * copies, 1, copies)
    for first, tokens in (0, 64), (12345, 1000), (0, 4096):
        slots = np.asarray(placement.slot_ids(np.zeros((tokens * stride, 1), np.int32), first))[::stride]
        counts = np.bincount(slots.ravel(), minlength=copies)
        assert counts.max() - counts.min() <= 2 + 0.03 * tokens / copies + np.log2(tokens)


def test_a_token_has_the_same_slots_in_every_batch(rng):
    placement = random_placement(rng, 6, 4, 3)
    ids = rng.integers(0, 6, (64, 2))
    whole = placement.slot_ids(ids)
    assert np.array_equal(placement.slot_ids(ids[:40]), whole[:40])
    assert np.array_equal(placement.slot_ids(ids[40:], 40), whole[40:])
    assert np.array_equal(placement.slot_ids(ids[40:], jnp.int32(40)), whole[40:])
    assert np.array_equal(placement.slot_ids(ids.reshape(8, 8, 2)), whole.reshape(8, 8, 2))


def test_another_placement_compiles_nothing(rng):
    ids = rng.integers(0, 6, (8, 2)).astype(np.int32)
    traces = []

    @jax.jit
    def slots(placement, ids):
        traces.append(1)
        return placement.slot_ids(ids)

    eager = []
    for _ in range(4):
        placement = random_placement(rng, 6, 4, 3)
        expected = slots_by_definition(placement, ids, 0)
        assert np.array_equal(slots(placement, ids), expected)
        assert np.array_equal(placement.slot_ids(ids), expected)
        eager.append(_slot_ids._cache_size())  # pyright: ignore[reportAttributeAccessIssue]
    assert len(traces) == 1
    assert len({*eager}) == 1


def test_layers_of_a_scan_have_their_own_placements(rng):
    layers = [random_placement(rng, 6, 4, 3) for _ in range(3)]
    ids = rng.integers(0, 6, (8, 2)).astype(np.int32)
    _, found = jax.lax.scan(lambda _, placement: (None, placement.slot_ids(ids)), None, Placement.stack(layers))
    for placement, slots in zip(layers, found, strict=True):
        assert np.array_equal(slots, placement.slot_ids(ids))
    with pytest.raises(ValueError, match=r"of layers \(3,\)\) must be that of one layer, as `layer\(i\)` gives it"):
        Placement.stack(layers).slot_ids(ids)


@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("jit", [False, True])
def test_tokens_split_over_devices_have_the_slots_of_the_whole_batch(rng, kind, jit):
    placement = random_placement(rng, 6, 4, 3)
    ids = rng.integers(-1, 7, (8, 4, 2)).astype(np.int32)
    expected = placement.slot_ids(ids)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    split = jax.device_put(ids, NamedSharding(mesh, P("a", "b")))
    found = (jax.jit(lambda ids: placement.slot_ids(ids)) if jit else placement.slot_ids)(split)
    assert np.array_equal(found, expected)
    if kind == AxisType.Explicit:
        assert jax.typeof(found).sharding.spec == P("a", "b", None)

    def mine(ids, placement):
        first = ids.shape[0] * ids.shape[1] * jax.lax.axis_index("a")
        return placement.slot_ids(ids, first)

    mapped = jax.shard_map(mine, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a", "b"})
    assert np.array_equal(jax.jit(mapped)(jax.device_put(ids, NamedSharding(mesh, P("a"))), placement), expected)


@pytest.mark.parametrize("wrong", [None, "x", [[1]], 3, np.zeros((3, 2)), np.ones((3, 2), bool), np.int32(1)])
def test_ids_must_be_integers(wrong):
    with pytest.raises((TypeError, ValueError), match="`expert_ids`"):
        placed().slot_ids(wrong)


@pytest.mark.parametrize("wrong", [None, "x", 2.5, -1, True, 2**31, np.zeros(2, np.int32), np.float32(1), jnp.bool_(1)])
def test_the_first_token_must_be_an_integer(wrong):
    with pytest.raises((TypeError, ValueError), match="`first_token`"):
        placed().slot_ids(np.zeros((3, 2), np.int32), wrong)
