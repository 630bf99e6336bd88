"""Every family's reader is a `jmx.checkpoint.Reader`, on the checkpoints that ship here; and importing them is lazy."""

import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child_environment import importing
from float_checkpoints import float_gpt_oss

import jmx
from jmx.checkpoint import CheckpointError, ExpertLayer, Reader, compressed_tensors, gpt_oss, quantizing

ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"
GOLDEN = ROOT / "tests" / "data" / "compressed_tensors"


class Family(NamedTuple):
    """A reader to be, and the name of a tensor outside the experts, which is (E, H): the router's weight."""

    make: Callable[[pathlib.Path], Reader[Any]]
    router: str


def original(folder: pathlib.Path) -> Reader[int]:
    gpt_oss.convert(TINY, folder / "original", "original")
    return gpt_oss.Reader(folder / "original")


def orbax(folder: pathlib.Path) -> Reader[int]:
    gpt_oss.convert(TINY, folder / "orbax", "orbax")
    return gpt_oss.Reader(folder / "orbax")


def floats(folder: pathlib.Path) -> Reader[str]:
    return quantizing.Reader(float_gpt_oss(folder / "floats", 2)[0], jmx.NVFP4)


FAMILIES = {
    "gpt_oss": Family(lambda _: gpt_oss.Reader(TINY), "layers.0.router_weight"),
    "gpt_oss_original": Family(original, "layers.0.router_weight"),
    "gpt_oss_orbax": Family(orbax, "layers.0.router_weight"),
    **{
        name: Family(lambda _, name=name: compressed_tensors.Reader(GOLDEN / name), "model.layers.0.mlp.gate.weight")
        for name in ("mxfp4", "nvfp4", "w4a16_g32", "fp8_block_dynamic")
    },
    "floats": Family(floats, "model.layers.0.mlp.router.weight"),
}


@pytest.mark.filterwarnings("ignore:static input scales differ")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reads_by_one_protocol(name, tmp_path):
    family = FAMILIES[name]
    reader = family.make(tmp_path)
    assert reader.path.is_dir()
    assert reader.config is not None
    assert reader.layers
    key: Any = next(iter(reader.layers))
    layer: ExpertLayer = reader.layers[key]
    router = reader.dense(family.router)
    assert isinstance(router, jax.Array)
    assert router.shape == (layer.num_experts, layer.hidden_size)
    assert np.isfinite(np.asarray(router, np.float32)).all()
    experts = reader.experts(key, "canonical")
    assert experts.layout == "canonical"
    assert (experts.num_experts, experts.hidden_size) == (layer.num_experts, layer.hidden_size)
    assert (experts.intermediate_size, experts.format) == (layer.intermediate_size, layer.format)
    assert experts.gate_up_order == layer.gate_up_order
    assert (experts.gate_up_bias is not None) == layer.has_bias
    gate_up, down = experts.dequantize(jnp.float32)
    assert gate_up.shape == (layer.num_experts, 2 * layer.intermediate_size, layer.hidden_size)
    assert down.shape == (layer.num_experts, layer.hidden_size, layer.intermediate_size)


@pytest.mark.parametrize("name", ["gpt_oss", "mxfp4", "floats"])
def test_every_family_places_and_refuses_alike(name, tmp_path):
    family = FAMILIES[name]
    reader = family.make(tmp_path)
    key: Any = next(iter(reader.layers))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert reader.dense(family.router, sharding).committed
    assert reader.dense(family.router, {family.router: sharding}).committed
    assert not reader.dense(family.router).committed
    assert reader.experts(key, "canonical", sharding).gate_up.values.committed
    with pytest.raises(ValueError, match=r"no\.such"):  # CheckpointError is one
        reader.dense("no.such")
    with pytest.raises(ValueError, match="layout"):
        reader.experts(key, "no such")
    with pytest.raises((ValueError, TypeError), match="layer"):
        reader.experts(999 if isinstance(key, int) else "no such")


def test_floats_are_read_as_they_are(tmp_path):
    path, tensors = float_gpt_oss(tmp_path / "floats", 1)
    reader = quantizing.Reader(path)
    (name,) = reader.layers
    assert reader.layers[name].format is None
    found = reader.floats(name)
    gate_up = tensors[f"{name}.gate_up_proj"].swapaxes(1, 2)
    bias = tensors[f"{name}.gate_up_proj_bias"]
    np.testing.assert_array_equal(found.gate_up, np.concatenate([gate_up[:, ::2], gate_up[:, 1::2]], 1))
    np.testing.assert_array_equal(found.gate_up_bias, np.concatenate([bias[:, ::2], bias[:, 1::2]], 1))
    np.testing.assert_array_equal(found.down, tensors[f"{name}.down_proj"].swapaxes(1, 2))
    with pytest.raises(ValueError, match="`format`"):
        reader.experts(name)
    with pytest.raises(CheckpointError, match="'nothing' is missing"):
        reader.dense("nothing")


def test_names_of_gpt_oss_are_public_and_those_of_its_files():
    config = gpt_oss.read_config(TINY)
    tensors = {*gpt_oss.tensor_shapes(config)}
    assert "layers.3.q_bias" in tensors
    files = {name for file in TINY.glob("*.safetensors") for name in jmx.checkpoint.shards.read_header(file)}
    assert {gpt_oss.file_name(name) for name in tensors} == {name for name in files if ".experts." not in name}
    assert gpt_oss.file_name("layers.12.k_weight", "original") == "block.12.attn.qkv.weight"
    for wrong in ("layers.0.nothing", "nothing", "layers.x.q_weight"):
        with pytest.raises(ValueError, match="`name`"):
            gpt_oss.file_name(wrong)


@pytest.mark.costly
def test_importing_jmx_imports_no_reader_and_no_orbax():
    code = (
        "import sys, jmx\n"
        "assert not [name for name in sys.modules if name.startswith(('orbax', 'jmx.checkpoint.'))]\n"
        "from jmx.checkpoint import gpt_oss, CheckpointError\n"
        "assert jmx.checkpoint.quantizing.convert and jmx.checkpoint.Reader and 'orbax' in dir(jmx.checkpoint)\n"
        "assert 'jmx.checkpoint.orbax' not in sys.modules\n"
        "assert jmx.checkpoint.orbax.save\n"
        "try:\n    jmx.checkpoint.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=importing(ROOT))
    assert done.stdout.strip() == "module 'jmx.checkpoint' has no attribute 'nothing'", done.stderr
