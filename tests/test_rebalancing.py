"""Weights that move between ranks: the bits of each slot, memory, programs compiled, and what an interrupt leaves."""

import contextlib
import dataclasses
import pathlib
import re
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import Case, draw_routing, draw_weights, draw_x
from child_environment import importing
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from memory import abstract_experts
from placements import random_placement

import jmx
from jmx.backends import registered_backends
from jmx.numerics import layouts
from jmx.numerics.formats import FORMATS
from jmx.parallel import PlacedExperts, Placement, balance, move, rebalance, rebalancing
from jmx.parallel.moves import schedule, sources
from jmx.parallel.transfer import _transfer, transfer, wait

pytestmark = [pytest.mark.costly, pytest.mark.devices(8)]

registered_backends()  # of other packages, too, which have layouts
EXPERTS, RANKS, PER_RANK = 10, 4, 3
CASE = Case(tokens=16, num_experts=EXPERTS, hidden=128, intermediate=128, top_k=3)


def mesh_of(shape: tuple[int, ...] = (RANKS,), kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("ep", "tp")[: len(shape)], axis_types=(kind,) * len(shape), devices=devices)


def draw(
    rng, placement: Placement, mesh: Mesh | None = None, axes: str | tuple[str, ...] = "ep", **case: Any
) -> tuple[jmx.Experts, PlacedExperts]:
    """Random experts, and the same in the slots of a placement, split over axes of a mesh."""
    drawn = dataclasses.replace(CASE, num_experts=placement.num_experts, **case)
    experts = draw_weights(rng, drawn).experts(drawn)
    return experts, PlacedExperts.of(experts, placement).split(mesh_of() if mesh is None else mesh, axes)


def two_placements(rng) -> tuple[Placement, Placement]:
    return random_placement(rng, EXPERTS, RANKS, PER_RANK), random_placement(rng, EXPERTS, RANKS, PER_RANK)


def bits(array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def assert_in_slots(placed: PlacedExperts, experts: jmx.Experts) -> None:
    """Every slot that holds an expert has its bits; arrays without slots are the same."""
    placed.check()
    filled = np.flatnonzero(np.asarray(placed.placement.expert_of_slot) >= 0)
    its = np.asarray(placed.placement.expert_of_slot)[filled]
    found, expected = placed.experts.arrays(), experts.arrays()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        whole = name.endswith("input_scale")
        got, wanted = (a if whole else np.asarray(a)[i] for a, i in ((found[name], filled), (array, its)))
        assert np.array_equal(bits(got), bits(wanted)), name


class Compilations:
    """Counts what XLA compiles, and what a cache of compiled programs would give."""

    def __enter__(self) -> "Compilations":
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)


# Sources and rounds


@given(seed=st.integers(0, 2**32), num_ranks=st.integers(1, 6), per_rank=st.integers(1, 4), data=st.data())
def test_a_schedule_moves_each_slot_from_a_source_with_its_expert(seed, num_ranks, per_rank, data):
    rng, num_experts = np.random.default_rng(seed), data.draw(st.integers(1, num_ranks * per_rank))
    before, after = (random_placement(rng, num_experts, num_ranks, per_rank) for _ in range(2))
    source = sources(before, after)
    old, new = before.expert_of_slot, after.expert_of_slot
    slots = np.arange(len(source))
    filled = new >= 0
    assert (old[source][filled] == new[filled]).all()
    assert (source == slots)[~filled | (old == new)].all()
    here = slots // per_rank
    held_here = np.array([expert in old[r * per_rank :][:per_rank] for expert, r in zip(new, here, strict=True)])
    assert (source // per_rank == here)[filled & held_here].all()
    # The schedule, with numpy for a machine.
    plan = schedule(source, num_ranks)
    by_rank = old.reshape(num_ranks, per_rank)
    moved = np.take_along_axis(by_rank, plan.local, 1)
    for i in range(num_ranks - 1):
        for j in range(plan.rounds[0, i]):
            for rank in range(num_ranks):
                to = (rank + i + 1) % num_ranks
                if plan.receive[to, i, j] >= 0:
                    moved[to, plan.receive[to, i, j]] = by_rank[rank, plan.send[rank, i, j]]
    assert (moved.reshape(-1)[filled] == new[filled]).all()
    assert (plan.receive >= 0).sum() == (source // per_rank != here).sum()


def test_copies_share_the_sending():
    before = Placement.of(np.array([0, 1, 0, 2, 3, 4, 5, -1, 6, -1, -1, -1]), num_experts=7, num_ranks=6)
    after = Placement.of(np.array([0, 1, 0, 2, 3, 4, 5, 0, 6, 0, -1, -1]), num_experts=7, num_ranks=6)
    assert sorted(sources(before, after)[[7, 9]].tolist()) == [0, 2]


# The bits of each slot


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("format", "layout"),
    [("mxfp4", layout) for layout in layouts.LAYOUTS]
    + [(format, "packed") for format in FORMATS if format != "mxfp4"]
    + [(format, "canonical") for format in ("nvfp4", "int4_g32_asym_order", "int8_g32_order", "fp8_block")]
    + [(format, "mosaic_sm90") for format in ("nvfp4", "int4_g32_asym_order", "fp8_channel")],
)
def test_slots_have_the_bits_of_their_experts(rng, format, layout):
    before, after = two_placements(rng)
    bias = (True, True) if rng.random() < 0.5 else (False, False)
    experts, placed = draw(rng, before, format=format, layout=layout, bias=bias)
    assert_in_slots(placed, experts)
    moved = move(placed, after)
    assert_in_slots(moved, experts)
    assert_in_slots(placed, experts)  # which has not changed
    assert_in_slots(move(moved, before), experts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "axes", "ranks", "per_rank"),
    [
        ((8,), "ep", 8, 2),
        ((2, 4), "ep", 2, 6),
        ((4, 2), ("ep", "tp"), 8, 2),
        ((4, 2), ("tp", "ep"), 8, 2),
        ((1, 2), "ep", 1, 12),
    ],
)
def test_meshes_of_each_kind_and_shape(rng, shape, axes, ranks, per_rank, kind):
    before, after = (random_placement(rng, EXPERTS, ranks, per_rank) for _ in range(2))
    experts, placed = draw(rng, before, mesh_of(shape, kind), axes, bias=(False, False))
    moved = move(placed, after)
    assert_in_slots(moved, experts)
    for name, array in moved.experts.arrays().items():
        assert array.sharding.is_equivalent_to(placed.experts.arrays()[name].sharding, array.ndim)


def test_everything_is_on_the_devices_of_the_mesh(rng):
    before, after = two_placements(rng)
    _, placed = draw(rng, before, format="fp8_tensor", input_format="fp8_static")
    for layer in (placed, move(placed, after), move(placed, before)):
        for array in jax.tree.leaves(layer):
            assert array.sharding.device_set == {*mesh_of().devices.flat}
        assert all(array.is_fully_replicated for array in jax.tree.leaves(layer.placement))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_another_mesh_axis_splits_stay_split(rng, kind):
    before, after = two_placements(rng)
    experts, placed = draw(rng, before, mesh_of((RANKS, 2), kind), bias=(False, False))
    columns = NamedSharding(mesh_of((RANKS, 2), kind), P("ep", None, "tp"))
    arrays = {name: jax.device_put(array, columns) for name, array in placed.experts.arrays().items()}
    moved = move(PlacedExperts(placed.experts.with_arrays(arrays), before), after)
    assert_in_slots(moved, experts)
    assert all(array.sharding.is_equivalent_to(columns, 3) for array in moved.experts.arrays().values())


def test_every_bit_pattern_of_a_bias_survives(rng):
    """Among them NaNs with a payload, which arithmetic may change."""
    before, after = two_placements(rng)
    experts, _ = draw(rng, before)
    assert experts.down_bias is not None
    patterns = rng.integers(0, 2**16, experts.down_bias.shape, np.uint16).view(jnp.bfloat16)
    experts = dataclasses.replace(experts, down_bias=jnp.asarray(patterns))
    assert np.array_equal(bits(experts.down_bias), bits(patterns))
    assert_in_slots(move(PlacedExperts.of(experts, before).split(mesh_of(), "ep"), after), experts)


def test_scales_of_inputs_stay(rng):
    before, after = two_placements(rng)
    experts, placed = draw(rng, before, format="fp8_tensor", input_format="fp8_static")
    moved = move(placed, after)
    assert_in_slots(moved, experts)
    name = "gate_up_input_scale"
    assert moved.experts.arrays()[name] is placed.experts.arrays()[name]


def test_a_layer_computes_the_same_in_every_placement_by_one_program(rng):
    """Each rank with its slots, all tokens on each."""
    before, after = two_placements(rng)
    experts, placed = draw(rng, before)
    case = dataclasses.replace(CASE, num_experts=EXPERTS)
    x, routing = jnp.asarray(draw_x(rng, case)), jax.tree.map(jnp.asarray, draw_routing(rng, case))
    compute = partial(jmx.moe, activation=case.activation, backend="xla")
    expected = compute(x, routing, experts)
    traced = []

    def on_rank(x, routing, placed):
        traced.append(1)
        first = placed.placement.slots_per_rank * jax.lax.axis_index("ep")
        slots = routing._replace(expert_ids=placed.placement.slot_ids(routing.expert_ids) - first)
        return jax.lax.psum(compute(x, slots, placed.experts), "ep")

    specs = (P(), P(), PlacedExperts(P("ep"), P()))  # pyright: ignore[reportArgumentType]
    run = jax.jit(jax.shard_map(on_rank, mesh=mesh_of(), in_specs=specs, out_specs=P()))
    for layer in (placed, move(placed, after)):
        assert np.linalg.norm(run(x, routing, layer) - expected) <= 2e-6 * np.linalg.norm(expected)
    assert len(traced) == 1


# Programs and memory


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_another_placement_compiles_nothing(rng, kind):
    before, after = two_placements(rng)
    experts, placed = draw(rng, before, mesh_of(kind=kind))
    placed = move(placed, after)
    with Compilations() as compilations:
        for _ in range(3):
            placed = move(placed, random_placement(rng, EXPERTS, RANKS, PER_RANK))
    assert compilations.count == 0
    assert_in_slots(placed, experts)
    with Compilations() as compilations:
        jax.jit(lambda x: x + rng.random())(1.0)
    assert compilations.count == 1


def compiled_transfer(mesh: Mesh, layout: str, size: int, per_rank: int) -> tuple[Any, float]:
    """A layer's transfer, of experts with H = I = `size`, as compiled for a mesh, and the bytes of one slot."""
    num_ranks, spec = mesh.devices.size, P(mesh.axis_names)
    experts = abstract_experts(num_ranks * per_rank, size, layout)
    tables = schedule(np.arange(num_ranks * per_rank, dtype=np.int32), num_ranks)
    arrays, tables = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        (tuple(experts.arrays().values()), tables),
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        options = {"axes": mesh.axis_names, "specs": (spec,) * len(arrays), "slot_axes": (0,) * len(arrays)}
        lowered = _transfer.lower(arrays, tables, mesh=mesh, **options)  # pyright: ignore[reportFunctionMemberAccess]
        compiled = lowered.compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return compiled, memory.output_size_in_bytes / per_rank


def assert_nothing_is_gathered(compiled: Any) -> None:
    text = compiled.as_text()
    assert "collective-permute" in text
    assert not re.search("all-gather|all-to-all", text)
    reduced = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    assert {dtype for kind in reduced for dtype in re.findall(r"(\w+)\[", kind)} <= {"s32"}  # those of the tables


@pytest.mark.parametrize("layout", ["packed", "mosaic_sm90"])
def test_no_weights_are_gathered_and_memory_is_bounded_by_slots(layout):
    """By the compiler's own analysis, of 8 ranks with 16 slots each."""
    compiled, slot = compiled_transfer(mesh_of((8,)), layout, 256, 16)
    assert compiled.memory_analysis().temp_size_in_bytes <= 3 * slot
    assert_nothing_is_gathered(compiled)


@pytest.mark.aot
@pytest.mark.parametrize("layout", ["packed", "canonical", "mosaic_sm90"])
def test_on_eight_gpus_memory_is_two_slots(layout):
    compiled, slot = compiled_transfer(aot.mesh_of("h200", 8), layout, 2880, 17)
    assert compiled.memory_analysis().temp_size_in_bytes <= 2.1 * slot
    assert_nothing_is_gathered(compiled)


def test_indexing_a_split_axis_gathers_all_slots():
    """Why there is a program for it: what XLA makes of `jnp.take` has all slots on each device."""
    by_slot, whole = (NamedSharding(mesh_of((8,)), spec) for spec in (P("ep"), P()))
    array = jax.ShapeDtypeStruct((128, 512), jnp.uint8, sharding=by_slot)
    source = jax.ShapeDtypeStruct((128,), jnp.int32, sharding=whole)
    take = jax.jit(lambda array, source: jnp.take(array, source, axis=0, mode="clip"), out_shardings=by_slot)
    memory = take.lower(array, source).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes >= 128 * 512


def test_layers_are_replaced_one_after_the_other_and_old_ones_freed(rng):
    before, after = two_placements(rng)
    layers = [draw(rng, before)[1] for _ in range(3)]
    held = lambda: sum(a.nbytes for a in jax.live_arrays())  # noqa: E731
    start, one = held(), sum(array.nbytes for array in layers[0].experts.arrays().values())
    seen = []
    rebalance(layers, Placement.stack([after] * 3), progress=lambda done, total: seen.append((done, total, held())))
    assert [row[:2] for row in seen] == [(1, 3), (2, 3), (3, 3)]
    assert all(bytes_held < start + one / 2 for _, _, bytes_held in seen)


# What stops it


def test_an_interrupt_leaves_every_layer_valid(rng):
    before, after = two_placements(rng)
    drawn = [draw(rng, before) for _ in range(3)]
    layers = [placed for _, placed in drawn]

    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebalance(layers, Placement.stack([after] * 3), progress=interrupt)
    assert [placed is old for placed, (_, old) in zip(layers, drawn, strict=True)] == [False, False, True]
    for placed, expected in zip(layers, (after, after, before), strict=True):
        assert placed.placement.expert_of_slot.tolist() == expected.expert_of_slot.tolist()
    for placed, (experts, _) in zip(layers, drawn, strict=True):
        assert_in_slots(placed, experts)
    rebalance(layers, Placement.stack([after] * 3))
    for placed, (experts, _) in zip(layers, drawn, strict=True):
        assert placed.placement.expert_of_slot.tolist() == after.expert_of_slot.tolist()
        assert_in_slots(placed, experts)


@pytest.mark.parametrize("error", [TimeoutError("late"), KeyboardInterrupt(), RuntimeError("device lost")])
def test_a_transfer_that_fails_leaves_the_old_placement(rng, monkeypatch, error):
    before, after = two_placements(rng)
    experts, placed = draw(rng, before)
    layers = [placed]

    def fail(*arguments):
        transfer(*arguments)
        raise error

    monkeypatch.setattr(rebalancing, "transfer", fail)
    with pytest.raises(type(error)):
        rebalance(layers, Placement.stack([after]), donate=True)
    assert layers[0] is placed
    assert_in_slots(placed, experts)


@pytest.mark.parametrize("table", ["sources", "rounds"])
def test_ranks_with_different_placements_are_an_error_and_not_a_stall(rng, monkeypatch, table):
    """One rank's tables are those of another placement, as if its process had balanced other counts."""
    before, after = (
        Placement.identity(12, RANKS),
        Placement.of(np.roll(np.arange(12), 3), num_experts=12, num_ranks=RANKS),
    )
    experts, placed = draw(rng, before)

    def disagree(source, num_ranks):
        plan = schedule(source, num_ranks)
        other = schedule(np.arange(12, dtype=np.int32), num_ranks)
        for mine, its in zip(plan, other, strict=True):
            mine[2] = its[2]
        return plan

    monkeypatch.setattr(rebalancing, "schedule", disagree)
    with pytest.raises(RuntimeError, match="processes passed different placements to one transfer"):
        move(placed, after)
    assert_in_slots(placed, experts)


class Array:
    """One that is ready after so many questions."""

    def __init__(self, questions: float):
        self.questions = questions

    def is_ready(self) -> bool:
        self.questions -= 1
        return self.questions < 0


def test_waiting_ends_with_an_error():
    wait((Array(0), Array(5)), 60)
    with pytest.raises(TimeoutError, match=re.escape("`timeout_s` (=0.05) seconds: a process may have stopped")):
        wait((Array(0), Array(float("inf"))), 0.05)


# Sharing and deleting


def test_a_placement_that_moves_nothing_shares_all_arrays(rng, monkeypatch):
    before = Placement.of(np.array([0, 1, 2, 3, 0, 4]), num_experts=5, num_ranks=2)
    after = Placement.of(np.array([0, 1, 2, 3, -1, 4]), num_experts=5, num_ranks=2)
    experts, placed = draw(rng, before, mesh_of((2,)))
    monkeypatch.setattr(rebalancing, "transfer", None)
    moved = move(placed, after)
    assert moved.experts is placed.experts
    assert_in_slots(moved, experts)
    layers = [placed]
    rebalance(layers, Placement.stack([after]), donate=True)
    assert_in_slots(layers[0], experts)


def test_donated_arrays_are_deleted_and_only_they(rng):
    before, after = two_placements(rng)
    experts, placed = draw(rng, before, format="fp8_tensor", input_format="fp8_static")
    layers = [placed]
    rebalance(layers, Placement.stack([after]), donate=True)
    assert_in_slots(layers[0], experts)
    for name, array in placed.experts.arrays().items():
        assert array.is_deleted() != name.endswith("input_scale")


def test_arrays_of_two_layers_are_not_donated(small):
    layers = [small, small]
    after = Placement.stack([Placement.of(np.array([1, 0, 2, 3, 4, 5, -1, -1]), num_experts=6, num_ranks=2)] * 2)
    with pytest.raises(ValueError, match=r"`donate` must be False where `layers\[1\]` has the array 'gate_up_values'"):
        rebalance(layers, after, donate=True)
    assert layers == [small, small]
    rebalance(layers, after)
    assert all((layer.placement.expert_of_slot == after.layer(0).expert_of_slot).all() for layer in layers)


def test_counts_to_balanced_weights(rng):
    """All of it: counts of two layers, a placement, and the weights in it."""
    before = Placement.stack([Placement.identity(EXPERTS, RANKS, 2)] * 2)
    drawn = [draw(rng, before.layer(i)) for i in range(2)]
    layers = [placed for _, placed in drawn]
    rebalance(layers, balance(rng.zipf(1.5, (2, EXPERTS)).clip(0, 1000), RANKS, 2, before=before))
    for placed, (experts, _) in zip(layers, drawn, strict=True):
        assert_in_slots(placed, experts)


def test_placed_experts_are_a_pytree(rng):
    placed = PlacedExperts.of(
        jmx.Experts.random(jax.random.key(0), 6, 32, 32, gate_up_order=None), *(Placement.identity(6, 2, 2),)
    )
    leaves, tree = jax.tree.flatten(placed)
    again = jax.tree.unflatten(tree, leaves)
    assert again.placement.num_ranks == 2
    assert again.experts.num_experts == 8
    jax.eval_shape(
        lambda placed: placed.experts.take("down", placed.placement.slot_ids(jnp.zeros((3, 1), int))), placed
    )


# Errors


@pytest.fixture(scope="module")
def small() -> PlacedExperts:
    """Six experts in the eight slots of two ranks."""
    placement = Placement.identity(6, 2, 2)
    experts = jmx.Experts.random(jax.random.key(0), 6, 32, 32, gate_up_order="interleaved")
    return PlacedExperts.of(experts, placement).split(mesh_of((2,)), "ep")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda placed: {"placed": 3}, "`placed` (=3, an int) must be a jmx.parallel.PlacedExperts"),
        (lambda placed: {"placed": dataclasses.replace(placed, experts=3)}, "`experts` (=3, an int) must be a jmx.Exp"),
        (
            lambda placed: {"placed": dataclasses.replace(placed, placement=3)},
            "`placement` (=3, an int) must be a jmx.parallel",
        ),
        (
            lambda placed: {"placed": PlacedExperts(placed.experts, Placement.identity(6, 2))},
            "`experts` (of 8 slots) must have 6, those of the placement: PlacedExperts.of fills them",
        ),
        (
            lambda placed: {"placed": PlacedExperts(jmx.Experts.stack([placed.experts] * 2), placed.placement)},
            "`experts` must be those of one layer, not a stack or a `layer` of one",
        ),
        (lambda placed: {"after": 3}, "`after` (=3, an int) must be a jmx.parallel.Placement"),
        (lambda placed: {"after": Placement.identity(6, 2, 4)}, "`after.num_slots` (=10) must be 8"),
        (lambda placed: {"after": Placement.identity(5, 2, 3)}, "`after.num_experts` (=5) must be 6"),
        (lambda placed: {"after": Placement.identity(6, 4, 2)}, "`after.num_ranks` (=4) must be 2"),
        (lambda placed: {"after": Placement.stack([placed.placement])}, "`after` (of layers (1,)) must be that of one"),
        *[(lambda _, t=t: {"timeout_s": t}, "`timeout_s`") for t in (0, -1, None, "1", float("nan"))],
    ],
)
def test_wrong_arguments_of_move_are_named(small, wrong, message):
    arguments: dict[str, Any] = {"placed": small, "after": small.placement}
    arguments.update(wrong(small))
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        move(arguments.pop("placed"), arguments.pop("after"), **arguments)


@pytest.mark.parametrize("how", ["one device", "numpy", "not split", "other axis", "fewer ranks", "two meshes"])
def test_arrays_that_are_not_split_over_the_ranks_are_named(small, how):
    mesh = mesh_of((2, 2))
    change: dict[str, Any] = {
        "one device": lambda array: jax.device_put(np.asarray(array), jax.devices()[0]),
        "numpy": np.asarray,
        "not split": lambda array: jax.device_put(np.asarray(array), NamedSharding(mesh, P())),
        "other axis": lambda array: jax.device_put(np.asarray(array), NamedSharding(mesh, P(None, "ep"))),
        "fewer ranks": lambda array: jax.device_put(np.asarray(array), NamedSharding(mesh, P(("ep", "tp")))),
        "two meshes": lambda array: jax.device_put(np.asarray(array), NamedSharding(mesh, P("ep"))),
    }
    name = "down_scales"
    arrays = small.experts.arrays() | {name: change[how](small.experts.arrays()[name])}
    placed = PlacedExperts(small.experts.with_arrays(arrays), small.placement)
    after = Placement.of(np.array([1, 0, 2, 3, 4, 5, -1, -1]), num_experts=6, num_ranks=2)
    named = (
        "must be split as `gate_up_values` is" if how == "two meshes" else "must be split along its first axis over 2"
    )
    with pytest.raises(ValueError, match=rf"`experts.{name}` .*{named}"):
        move(placed, after)
    layers = [small, placed]
    with pytest.raises(ValueError, match=named) as raised:
        rebalance(layers, Placement.stack([after] * 2))
    assert raised.value.__notes__ == ["This is about layers[1]; no layer was moved."]
    assert layers[0] is small  # nothing moved


def test_slots_of_one_rank_that_several_devices_split_are_named(small):
    mesh = mesh_of((2, 2))
    placement = Placement.of(np.arange(8), num_experts=8, num_ranks=1)
    arrays = {
        name: jax.device_put(np.asarray(array), NamedSharding(mesh, P("ep")))
        for name, array in small.experts.arrays().items()
    }
    placed = PlacedExperts(small.experts.with_arrays(arrays), placement)
    with pytest.raises(ValueError, match="must be split along its first axis over 1"):
        move(placed, Placement.of(np.arange(8)[::-1].copy(), num_experts=8, num_ranks=1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 3}, "`layers` (=3, an int) must be a list of jmx.parallel.PlacedExperts"),
        ({"layers": ()}, "`layers` (=(), a tuple) must be a list"),
        ({"layers": [3]}, "`layers[0]` (=3, an int) must be a jmx.parallel.PlacedExperts"),
        ({"after": 3}, "`after` (=3, an int) must be a jmx.parallel.Placement"),
        ({"after": Placement.identity(6, 2, 2)}, "`after` (of layers ()) must be that of 1 layers"),
        ({"after": Placement.stack([Placement.identity(6, 2, 4)])}, "`after.num_slots` (=10) must be 8"),
        ({"donate": 1}, "`donate` (=1, an int) must be True or False"),
        ({"timeout_s": 0}, "`timeout_s` (=0) must be positive"),
        ({"progress": 3}, "`progress` (=3, an int) must be callable"),
    ],
)
def test_wrong_arguments_of_rebalance_are_named(small, wrong, message):
    arguments = {"layers": [small], "after": Placement.stack([small.placement])} | wrong
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        rebalance(**arguments)


@pytest.mark.parametrize(
    ("mesh", "axes", "message"),
    [
        (3, "ep", "`mesh` (=3, an int) must be a jax.sharding.Mesh"),
        (None, "ep", "`mesh` (=None, a NoneType) must be a jax.sharding.Mesh"),
        ((2,), "tp", "`axes` (='tp') must be axes of the mesh, which has ('ep',)"),
        ((2,), (), "`axes` (=()) must be axes of the mesh"),
        ((2,), None, "`axes` (=None) must be axes of the mesh"),
        ((4, 2), "ep", "`axes` (='ep', of 4 devices) must be of 2, one a rank"),
        ((4, 2), ("ep", "tp"), "`axes` (=('ep', 'tp'), of 8 devices) must be of 2, one a rank"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(small, mesh, axes, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        small.split(mesh_of(mesh) if isinstance(mesh, tuple) else mesh, axes)


def test_wrong_arguments_of_placed_experts_are_named(small):
    experts = jmx.Experts.random(jax.random.key(0), 6, 32, 32, gate_up_order="interleaved")
    wrong: list[tuple[Any, Any, str]] = [
        (3, small.placement, "`experts` (=3, an int) must be a jmx.Experts"),
        (experts, 3, "`placement` (=3, an int) must be a jmx.parallel.Placement"),
        (experts, Placement.identity(5, 2, 3), "`placement` (of 5 experts) must be of 6, those of `experts`"),
        (experts, Placement.stack([small.placement]), "`placement` (of layers (1,)) must be that of one layer"),
        (jmx.Experts.stack([experts]), small.placement, "`experts` must be those of one layer"),
        (small.experts, Placement.identity(8, 2), "must be whole on each of its devices"),
    ]
    for given_experts, placement, message in wrong:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            PlacedExperts.of(given_experts, placement)


# Several processes


@pytest.fixture(scope="module")
def printed() -> tuple[list[str], list[str]]:
    """What each of the processes of rebalancing_process.py prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = pathlib.Path(__file__).with_name("rebalancing_process.py")
    environment = importing(file.parents[1], JAX_PLATFORMS="cpu")
    command = [sys.executable, "-W", "error", str(file)]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([*command, str(i), str(port)], env=environment, stdout=subprocess.PIPE, text=True)
            )
            for i in range(2)
        ]
        for process in processes:
            stack.callback(process.kill)
        out = processes[1].communicate(timeout=500)[0]
        processes[0].kill()
        outputs = processes[0].communicate(timeout=60)[0], out
    # Not those of Gloo, whose threads may write into each other's lines.
    said = ("same ", "different ", "alone ")
    first, second = ([line for line in text.splitlines() if line.startswith(said)] for text in outputs)
    return first, second


def test_two_processes_move_weights_together(printed):
    for lines in printed:
        assert lines[0] == "same [5, 4, 3, 2, 1, 0, 5, -1] "


def test_processes_with_different_placements_keep_the_old_one(printed):
    for lines in printed:
        assert lines[1].startswith("different [5, 4, 3, 2, 1, 0, 5, -1] RuntimeError: processes passed different")


def test_a_process_alone_stops_waiting(printed):
    assert len(printed[0]) == 2
    assert printed[1][2].startswith("alone [5, 4, 3, 2, 1, 0, 5, -1] TimeoutError: weights were still moving after")
