"""jmx/perf/shares.py: what each device does in a layer, and logits with which all do the work of the fullest one."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmx.cli.layer_split import split_of
from jmx.perf import shares
from jmx.perf.shares import Groups, Shares
from jmx.routing import TopKSoftmax

METHOD = TopKSoftmax(2)
MESHES = [{"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}, {"ep": 2, "tp": 2}, {"tp": 2, "ep": 2}, {"dp": 4}]


def mesh_of(sizes: dict[str, int]) -> Any:
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=jax.devices()[:4])


def logits_of(chosen: list[list[tuple[int, int]]], num_experts: int) -> jax.Array:
    """Of layers, in which each token chooses two experts."""
    logits = np.zeros((len(chosen), len(chosen[0]), num_experts), np.float32)
    for layer, tokens in enumerate(chosen):
        for token, (first, second) in enumerate(tokens):
            logits[layer, token, first], logits[layer, token, second] = 2, 1
    return jax.numpy.asarray(logits)


def test_the_fullest_rank_has_most_experts_in_use_then_most_rows() -> None:
    chosen = [
        [(0, 2), (0, 3), (0, 2)],  # one expert with three rows, two experts with three
        [(0, 1), (0, 2), (0, 3)],  # two and two experts, four rows and two
        [(3, 2), (0, 3), (3, 1)],  # two and two experts, two rows and four
    ]
    its = Shares.of_logits(logits_of(chosen, 4), METHOD, Groups(1, 2, [(0, 0), (0, 1)]))
    assert its.used[:, 0].tolist() == [[1, 2], [2, 2], [2, 2]]
    assert its.rows[:, 0].tolist() == [[3, 3], [4, 2], [2, 4]]
    assert its.fullest()[:, 0].tolist() == [1, 0, 1]


@pytest.mark.devices(4)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_places_are_those_of_the_arrays(sizes: dict[str, int]) -> None:
    mesh = mesh_of(sizes)
    split = split_of(mesh, None)
    groups = Groups.of(split, mesh.shape)
    for names, number, count in (
        (shares.kept(split), 0, groups.num_groups),
        (split.names("expert"), 1, groups.num_ranks),
    ):
        sharding = NamedSharding(mesh, PartitionSpec(names or None))
        array = jax.device_put(np.arange(count), sharding)
        found = {its.device: int(its.data[0]) for its in array.addressable_shards}
        assert [found[device] for device in mesh.devices.flat] == [place[number] for place in groups.places]


@pytest.mark.devices(4)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_device_does_the_work_of_the_fullest(sizes: dict[str, int], rng: np.random.Generator) -> None:
    mesh = mesh_of(sizes)
    groups = Groups.of(split_of(mesh, None), mesh.shape)
    logits = jax.numpy.asarray(rng.standard_normal((3, 4 * groups.num_groups, 16)), "float32")
    whole = Shares.of_logits(logits, METHOD, groups)
    most = np.take_along_axis(whole.used * 100 + whole.rows, whole.fullest()[..., None], -1)[..., 0]
    alone, fullest = shares.of_devices(logits, groups, mesh), shares.of_devices(logits, groups, mesh, whole.fullest())
    for layer, (its, full) in enumerate(zip(alone, fullest, strict=True)):
        found = {shard.device: shard.data for shard in full.addressable_shards}
        given = {shard.device: shard.data for shard in its.addressable_shards}
        for device, (group, rank) in zip(mesh.devices.flat, groups.places, strict=True):
            np.testing.assert_array_equal(given[device], logits[layer, group * 4 : group * 4 + 4])
            np.testing.assert_array_equal(np.sort(found[device]), np.sort(given[device]))
            here = Shares.of_logits(found[device][None], METHOD, groups._replace(num_groups=1))
            assert here.used[0, 0, rank] * 100 + here.rows[0, 0, rank] == most[layer, group]
