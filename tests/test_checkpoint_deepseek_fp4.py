"""Experts of DeepSeek-V4's checkpoints: two FP4 elements in an int8, scales in e8m0, beside weights in FP8."""

import json
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from float_checkpoints import write

import jmx
from jmx.checkpoint import compressed_tensors, shards
from jmx.checkpoint.compressed_tensors.quantization_config import read_quantization
from jmx.checkpoint.shards import CheckpointError

E, H, I, LAYER = 3, 64, 96, "layers.3.ffn.experts"  # noqa: E741
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
CONFIG = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": FP8}


@pytest.fixture(scope="module")
def experts() -> jmx.Experts:
    return jmx.Experts.random(jax.random.key(7), E, H, I, gate_up_order="concatenated", bias=False)


def tensors_of(experts: jmx.Experts) -> dict[str, np.ndarray]:
    """As DeepSeek's own code names and types them."""
    found = {
        "layers.3.ffn.shared_experts.w1.weight": np.ones((I, H), ml_dtypes.float8_e4m3fn),
        "layers.3.ffn.gate.weight": np.ones((E, H), np.float32),
    }
    for expert in range(E):
        gate_up, down = (jax.tree.map(lambda a, e=expert: np.asarray(a[e]), q) for q in (experts.gate_up, experts.down))
        for name, q, rows in (("w1", gate_up, slice(I)), ("w3", gate_up, slice(I, None)), ("w2", down, slice(None))):
            found[f"{LAYER}.{expert}.{name}.weight"] = q.values[rows].view(np.int8)
            found[f"{LAYER}.{expert}.{name}.scale"] = q.scales[rows].view(ml_dtypes.float8_e8m0fnu)
    return found


@pytest.fixture
def checkpoint(experts, tmp_path):
    return write(tmp_path / "given", tensors_of(experts), CONFIG)


def test_experts_are_mxfp4_and_all_others_fp8(checkpoint, experts):
    reader = compressed_tensors.Reader(checkpoint)
    assert [*reader.layers] == [LAYER]
    found = reader.experts(LAYER, "packed")
    assert (found.format, found.gate_up_order, found.input_format) == (jmx.MXFP4, "concatenated", "fp8_block_ue8m0")
    for name, array in experts.arrays().items():
        np.testing.assert_array_equal(found.arrays()[name], array)
    quantization = read_quantization(checkpoint)
    weights = {"experts.0.w1": "mxfp4", "shared_experts.w1": "fp8_block"}
    for module, format in weights.items():
        scheme = quantization.scheme(f"layers.3.ffn.{module}")
        assert scheme is not None
        assert scheme.weights == format


@pytest.mark.parametrize("place", ["inside", "both"])
def test_the_key_may_be_in_the_quantization(checkpoint, place):
    config = CONFIG | {"quantization_config": FP8 | {"expert_dtype": "fp4"}}
    if place == "inside":
        del config["expert_dtype"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert compressed_tensors.Reader(checkpoint).layers[LAYER].format == jmx.MXFP4


def test_they_are_written_to_the_bit(checkpoint, tmp_path):
    compressed_tensors.convert(compressed_tensors.Reader(checkpoint), tmp_path / "again")
    given, again = (shards.read_headers(path) for path in (checkpoint, tmp_path / "again"))
    assert {*given} == {*again}
    for name, tensor in given.items():
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
        assert again[name].view().tobytes() == tensor.view().tobytes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CONFIG | {"expert_dtype": "fp6"}, r"`expert_dtype` \(='fp6'\) must be 'fp8' or 'fp4'"),
        (CONFIG | {"expert_dtype": 4}, r"`expert_dtype` \(=4\) must be 'fp8' or 'fp4'"),
        (CONFIG | {"quantization_config": FP8 | {"expert_dtype": "fp8"}}, r"`expert_dtype` \(='fp4'\) must be .*'fp8'"),
        (CONFIG | {"expert_dtype": "fp8"}, r"experts.0.w1.weight' is I8 \(96, 32\), but must be F8_E4M3"),
    ],
)
def test_another_dtype_is_an_error(checkpoint, config, message):
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        compressed_tensors.Reader(checkpoint)


def test_tensors_of_other_types_and_scales_that_are_nan_are_errors(experts, tmp_path):
    tensors = tensors_of(experts)
    weight, scale = f"{LAYER}.1.w3.weight", f"{LAYER}.1.w3.scale"
    path = write(tmp_path / "bytes", tensors | {weight: tensors[weight].view(np.uint8)}, CONFIG)
    with pytest.raises(CheckpointError, match=r"1.w3.weight' is U8 \(96, 32\), but must be I8"):
        compressed_tensors.Reader(path)
    path = write(tmp_path / "floats", tensors | {scale: tensors[scale].astype(np.float32)}, CONFIG)
    with pytest.raises(CheckpointError, match=r"1.w3.scale' is F32 \(96, 2\), but must be U8 or F8_E8M0"):
        compressed_tensors.Reader(path)
    codes = tensors[scale].view(np.uint8).copy()
    codes[5, 1] = 255
    path = write(tmp_path / "nan", tensors | {scale: codes.view(ml_dtypes.float8_e8m0fnu)}, CONFIG)
    with pytest.raises(CheckpointError, match=r"1.w3.scale' must have no scale of 255 .* one at \(5, 1\)"):
        compressed_tensors.Reader(path).arrays(LAYER)
