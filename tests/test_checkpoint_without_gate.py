"""Experts without a gate, `up_proj` and `down_proj` alone: quantized files, float ones, and what `convert` writes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float_checkpoints import write as write_floats
from test_checkpoint_compressed_tensors import LAYER, golden, reader, same, wholes, write

import jmx
from jmx.checkpoint import CheckpointError, compressed_tensors, quantizing
from jmx.numerics.formats import pack

QUANTIZED = ["nvfp4", "mxfp4a16", "fp8_block_dynamic", "w4a16_g64_asym_order", "w8a16_channel"]


def without_gate(name, directory):
    arrays, config = golden(name)
    return write(directory, {key: a for key, a in arrays.items() if ".gate_proj." not in key}, config)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_experts_are_the_upper_half_of_gated_ones(name, tmp_path):
    layer = compressed_tensors.Reader(without_gate(name, tmp_path / name)).layers[LAYER]
    gated = reader(name).layers[LAYER]
    assert layer.gate_up_order is None
    assert (layer.hidden_size, layer.intermediate_size) == (gated.hidden_size, gated.intermediate_size)
    got, want = wholes(layer), wholes(gated)
    assert got.keys() == want.keys()
    for key, array in want.items():
        rows = slice(None) if key.startswith("down") or key.endswith("order") else slice(layer.intermediate_size, None)
        assert same(got[key], array[:, rows]), key


def test_they_run_with_an_activation_that_has_no_gate(tmp_path, rng):
    read = compressed_tensors.Reader(without_gate("w4a16_g32", tmp_path / "checkpoint"))
    experts = read.experts(LAYER, "packed")
    assert not experts.gated
    x = rng.normal(size=(4, experts.hidden_size)).astype(np.float32)
    routing = jmx.Routing(np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32))
    up, down = (np.asarray(w, np.float64)[0] for w in experts.dequantize(jnp.float32))
    want = np.maximum(x @ up.T, 0) ** 2 @ down.T
    got = jmx.moe(x, routing, experts, activation="relu2", backend="xla")
    assert np.linalg.norm(got - want) < 2e-6 * np.linalg.norm(want)
    with pytest.raises(ValueError, match=r"`activation` \(=.*\) is gated, but the experts have gate_up_order=None"):
        jmx.moe(x, routing, experts, activation="silu_and_mul")


def test_sizes_that_do_not_fit_are_named(tmp_path):
    arrays, config = golden("w8a16_channel")
    arrays = {key: a for key, a in arrays.items() if ".gate_proj." not in key}
    for expert in range(3):  # as if up were gate and up
        key = f"{LAYER}.{expert}.up_proj."
        for name in ("weight_packed", "weight_scale"):
            arrays[key + name] = np.concatenate([arrays[key + name]] * 2)
        arrays[f"{key}weight_shape"] = arrays[f"{key}weight_shape"] * np.array([2, 1])
    with pytest.raises(
        CheckpointError, match=r"must be up \(I, H\) and down \(H, I\), but are \(120, 92\) and \(92, 60\)"
    ):
        compressed_tensors.Reader(write(tmp_path / "wrong", arrays, config))


def test_one_expert_without_a_gate_is_refused(tmp_path):
    arrays, config = golden("mxfp4a16")
    arrays = {key: a for key, a in arrays.items() if f"{LAYER}.1.gate_proj." not in key}
    with pytest.raises(CheckpointError, match=rf"module '{LAYER}\.1\.gate_proj' is missing, which other experts have"):
        compressed_tensors.Reader(write(tmp_path / "wrong", arrays, config))


def test_float_experts_are_read_and_quantized(tmp_path, rng):
    tensors = {"model.layers.0.mixer.gate.weight": rng.normal(size=(2, 64)).astype(np.float32)}
    for expert in range(2):
        at = f"model.layers.0.mixer.experts.{expert}"
        tensors[f"{at}.up_proj.weight"] = rng.normal(size=(96, 64)).astype(np.float32)
        tensors[f"{at}.down_proj.weight"] = rng.normal(size=(64, 96)).astype(np.float32)
    source = write_floats(tmp_path / "in", tensors, {"model_type": "nemotron_h", "hidden_size": 64})
    (layer,) = (floats := quantizing.Reader(source)).layers
    gate_up, down, *biases = floats.floats(layer)
    assert (gate_up.shape, down.shape, biases) == ((2, 96, 64), (2, 64, 96), [None, None])
    report = quantizing.convert(source, tmp_path / "out", "int4_g32", report=tmp_path / "report.json")
    assert report.layers[layer].keys() == report.total().keys() == {"up", "down"}
    assert json.loads((tmp_path / "report.json").read_text())["total"].keys() == {"up", "down"}
    quantizing.convert(source, tmp_path / "out", "int4_g32", report=tmp_path / "report.json", overwrite=True)
    experts = compressed_tensors.Reader(tmp_path / "out").experts(layer, "packed")
    on_reading = quantizing.Reader(source, "int4_g32").experts(layer, "packed")
    for expert in range(2):
        for role, part in (("gate_up", "up"), ("down", "down")):
            weight = tensors[f"{layer}.{expert}.{part}_proj.weight"]
            want = pack(jmx.quantize(jnp.asarray(weight), "int4_g32"))
            for made in (experts, on_reading):
                for got, its in zip(jax.tree.leaves(getattr(made, role)), jax.tree.leaves(want), strict=True):
                    np.testing.assert_array_equal(got[expert], its)
    assert experts.gate_up_order is on_reading.gate_up_order is None
