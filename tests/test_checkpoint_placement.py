import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from jmx.checkpoint import CheckpointError, gpt_oss, placement

TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"


def same_tensors(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes() for n in a
    )


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices; there are {jax.device_count()}")
    return jax.make_mesh((2, 2), ("e", "n"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("layout", ["packed", "canonical"])
def test_experts_go_to_a_sharding_bit_for_bit(mesh, layout):
    plain = gpt_oss.load(TINY, 1, layout).arrays()
    one = NamedSharding(mesh, PartitionSpec("e"))
    by_name = {"gate_up_values": NamedSharding(mesh, PartitionSpec("e", "n")), "down_bias": one}
    for sharding, expected in (
        (one, dict.fromkeys(plain, one)),
        (by_name, by_name),
        (by_name.get, by_name),
    ):
        arrays = gpt_oss.load(TINY, 1, layout, sharding).arrays()
        assert same_tensors(arrays, plain)
        for name, wanted in expected.items():
            assert arrays[name].sharding.is_equivalent_to(wanted, arrays[name].ndim), name


def test_only_the_slices_that_devices_need_are_read(mesh, monkeypatch):
    read = []
    monkeypatch.setattr(gpt_oss.Reader, "check_scales", lambda self, name, part, index=(): read.append(part.shape))
    sharding = NamedSharding(mesh, PartitionSpec("e", "n"))
    gpt_oss.Reader(TINY).experts(0, "packed", {"gate_up_values": sharding})
    assert read.count((4, 96, 32)) == 4
    assert (8, 192, 32) not in read


def test_other_arrays_go_to_a_sharding_too(mesh):
    rows = NamedSharding(mesh, PartitionSpec("n"))
    top = gpt_oss.Reader(TINY).top({"embedding": rows})
    assert top["embedding"].sharding == rows
    assert same_tensors(top, gpt_oss.Reader(TINY).top())
    layer = gpt_oss.Reader(TINY).layer(0, rows)
    assert {array.sharding for array in layer.values()} == {rows}


def test_bad_shardings_are_named(mesh):
    with pytest.raises(ValueError, match=r"`sharding` of 'down_scales' must fit its shape \(8, 64, 3\)"):
        gpt_oss.load(TINY, 0, sharding={"down_scales": NamedSharding(mesh, PartitionSpec(None, None, "e"))})
    with pytest.raises(TypeError, match=r"`sharding` \(='e' for 'gate_up_values'\) must be a jax.sharding.Sharding"):
        gpt_oss.load(TINY, 0, sharding="e")  # pyright: ignore[reportArgumentType]
    assert placement.sharding_of("x", None) is None


def test_a_nan_scale_is_named_where_it_is_whichever_device_reads_it(mesh, tmp_path):
    path = tmp_path / "nan"
    shutil.copytree(TINY, path)
    file, name = path / "model-00001-of-00002.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    tensors = safetensors.numpy.load_file(file)
    tensors[name] = tensors[name].copy()
    tensors[name][5, 40, 2] = 255
    safetensors.numpy.save_file(tensors, file)
    for sharding in (None, NamedSharding(mesh, PartitionSpec("e", "n"))):
        with pytest.raises(CheckpointError, match=rf"tensor '{re.escape(name)}' .* scale of 255 .* at \(5, 40, 2\)"):
            gpt_oss.load(path, 1, sharding=sharding)
    assert gpt_oss.load(path, 0).num_experts == 8
