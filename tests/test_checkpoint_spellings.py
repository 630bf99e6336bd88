"""Spellings of the same tensors by other models and tools: DeepSeek's own names, FP8 by tensor, algorithms by module,
and float experts in tensors of Qwen3-VL, Llama 4 and Granite."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from float_checkpoints import write as write_floats
from test_checkpoint_compressed_tensors import LAYER, golden, reader, same, wholes, write

import jmx
from jmx.checkpoint import CheckpointError, compressed_tensors, quantizing
from jmx.checkpoint.compressed_tensors import Scheme, read_quantization

EXPERT = f"{LAYER}.0.gate_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
E, H, I = 3, 48, 32  # noqa: E741 (the field's name)


def quantization(directory, entries):
    (directory / "config.json").write_text(json.dumps({"quantization_config": entries}))
    return read_quantization(directory)


# DeepSeek's own code


def own_spelling(key):
    key = key.replace("model.layers.0.mlp.", "layers.0.ffn.").replace(".weight_scale", ".scale")
    return re.sub(r"(gate|up|down)_proj", lambda match: PARTS[match[0]], key)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_names_of_deepseek_s_own_code(tmp_path, scale_fmt):
    arrays, config = golden("fp8_block_groups")
    config["quantization_config"] = FP8 | {"weight_block_size": [128, 128], "scale_fmt": scale_fmt}
    renamed = {own_spelling(key): array for key, array in arrays.items()}
    read = compressed_tensors.Reader(write(tmp_path / "own", renamed, config))
    layer = read.layers["layers.0.ffn.experts"]
    assert layer.scheme.inputs == ("fp8_block" if scale_fmt is None else "fp8_block_ue8m0")
    want = wholes(reader("fp8_block_groups").layers[LAYER])
    got = wholes(layer)
    assert all(same(got[key], array) for key, array in want.items())
    compressed_tensors.convert(read, tmp_path / "again")
    again = compressed_tensors.Reader(tmp_path / "again")
    assert all(same(again.view(key), array) for key, array in renamed.items())


def test_modules_outside_experts_with_these_names_are_dequantized(tmp_path):
    arrays, config = golden("fp8_block_groups")
    config["quantization_config"] = FP8 | {"weight_block_size": [128, 128]}
    renamed = {own_spelling(key): array for key, array in arrays.items()}
    moved = "layers.0.ffn.experts.1.w3"
    renamed |= {k.replace(moved, "layers.1.attn.wo"): a for k, a in renamed.items() if k.startswith(moved)}
    read = compressed_tensors.Reader(write(tmp_path / "own", renamed, config))
    scales = renamed["layers.1.attn.wo.scale"].astype(np.float32)
    values = renamed["layers.1.attn.wo.weight"].astype(np.float32)
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[: values.shape[0], : values.shape[1]]
    np.testing.assert_array_equal(read.dense("layers.1.attn.wo.weight"), values * wide)


def test_a_missing_scale_is_named_as_files_of_the_tool_name_it(tmp_path):
    arrays, config = golden("fp8_block_groups")
    config["quantization_config"] = FP8 | {"weight_block_size": [128, 128]}
    renamed = {own_spelling(key): array for key, array in arrays.items()}
    del renamed["layers.0.ffn.experts.0.w1.scale"]
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.0\.ffn\.experts\.0\.w1\.weight_scale_inv' is missing"):
        compressed_tensors.Reader(write(tmp_path / "own", renamed, config))


# FP8 by tensor in `quant_method` "fp8"


@pytest.mark.parametrize("block", [{}, {"weight_block_size": None}])
def test_fp8_by_tensor_with_static_inputs(tmp_path, block):
    arrays, config = golden("fp8_tensor_static")
    config["quantization_config"] = FP8 | {"activation_scheme": "static", "ignored_layers": ["gate"]} | block
    read = compressed_tensors.Reader(write(tmp_path / "static", arrays, config))
    layer, other = read.layers[LAYER], reader("fp8_tensor_static").layers[LAYER]
    assert layer.scheme == other.scheme == Scheme("fp8_tensor", "fp8_static", "float-quantized")
    for role in ("gate_up", "down"):
        np.testing.assert_array_equal(layer.static_scales(role), other.static_scales(role))
    assert all(same(array, wholes(other)[key]) for key, array in wholes(layer).items())


@pytest.mark.parametrize("scheme", [{}, {"activation_scheme": "dynamic"}])
def test_fp8_by_tensor_with_dynamic_inputs(tmp_path, scheme, rng):
    """As vLLM's `Fp8Config` without blocks: one scale for all tokens, computed from them."""
    arrays, config = golden("fp8_tensor_dynamic")
    config["quantization_config"] = {"quant_method": "fp8", "ignored_layers": ["gate"]} | scheme
    read = compressed_tensors.Reader(write(tmp_path / "dynamic", arrays, config))
    assert read.layers[LAYER].scheme == Scheme("fp8_tensor", "fp8_tensor", "float-quantized")
    experts = read.experts(LAYER)
    assert experts.input_format == "fp8_tensor"
    x = jnp.asarray(rng.standard_normal((6, experts.hidden_size)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((6, experts.num_experts)), jnp.float32)
    routing = jmx.route(jmx.Logits(logits, jmx.TopKSoftmax(2)))
    y, many = (jmx.moe(a, routing, experts, activation="silu_and_mul") for a in (x, x.at[0].mul(4)))
    assert y.shape == x.shape
    assert not (np.asarray(y[1:]) == np.asarray(many[1:])).all()  # the first token's size moves the scale of all


# Algorithms by module


def mixed(name, directory, **more):
    arrays, config = golden(name)
    names = sorted({key.rpartition(".")[0] for key in arrays if ".experts." in key})
    algorithm = {"modelopt_nvfp4": "NVFP4", "modelopt_fp8": "FP8"}[name]
    modules = {its: {"quant_algo": algorithm} for its in names} | more
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": modules,
    }
    return write(directory / name, arrays, config)


@pytest.mark.parametrize("name", ["modelopt_nvfp4", "modelopt_fp8"])
def test_modules_name_their_algorithms(tmp_path, name):
    arrays, _ = golden(name)
    outside = {key.rpartition(".")[0] for key in arrays if key.endswith("_scale") and ".experts." not in key}
    algorithm = {"modelopt_nvfp4": "NVFP4", "modelopt_fp8": "FP8"}[name]
    path = mixed(name, tmp_path, **{its: {"quant_algo": algorithm} for its in outside})
    layers, others = compressed_tensors.Reader(path).layers, reader(name).layers
    assert layers.keys() == others.keys()
    for key, layer in layers.items():
        assert layer.scheme == others[key].scheme
        assert all(same(array, wholes(others[key])[its]) for its, array in wholes(layer).items())


def test_modules_inside_a_named_one_have_its_algorithm(tmp_path):
    layers = {LAYER: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.0.self_attn": {"quant_algo": "FP8"}}
    found = quantization(
        tmp_path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    assert found.scheme(EXPERT) == Scheme("nvfp4", "nvfp4", "modelopt")
    assert found.scheme("model.layers.0.self_attn.q_proj") == Scheme("fp8_tensor", "fp8_static", "float-quantized")
    assert found.scheme("model.layers.0.mlp.gate") is None
    assert found.scheme(f"{LAYER}s.0.up_proj") is None


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, "`quantization_config.quantized_layers` must hold a module, but is empty"),
        (
            {EXPERT: {"quant_algo": "W4A8_AWQ"}},
            f"`quantization_config.quantized_layers.{EXPERT}.quant_algo` (='W4A8_AWQ')",
        ),
        (
            {EXPERT: {"quant_algo": "NVFP4", "group_size": 32}},
            f"quantized_layers.{EXPERT}.group_size` (=32) must be one of",
        ),
        ({EXPERT: {"quant_algo": "FP8", "odd": 1}}, f"quantized_layers.{EXPERT}.odd` (=1) is not a known key"),
        ({EXPERT: "FP8"}, f"`quantization_config.quantized_layers.{EXPERT}` (='FP8') must be an object"),
    ],
)
def test_other_algorithms_by_module_are_refused(tmp_path, layers, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quantization(
            tmp_path, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        )


# Float experts in one tensor


def floats(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("model_type", "prefix", "names"),
    [
        ("qwen3_vl_moe", "model.language_model.layers.0.mlp.experts", ("gate_up_proj", "down_proj")),
        ("llama4", "language_model.model.layers.0.feed_forward.experts", ("gate_up_proj", "down_proj")),
        ("granitemoe", "model.layers.0.block_sparse_moe", ("input_linear.weight", "output_linear.weight")),
    ],
)
def test_float_experts_of_published_models(tmp_path, rng, model_type, prefix, names):
    gate, up, down = floats(rng, E, I, H), floats(rng, E, I, H), floats(rng, E, H, I)
    both = np.concatenate([gate, up], axis=1)
    if model_type != "granitemoe":
        both, stored = both.swapaxes(1, 2).copy(), down.swapaxes(1, 2).copy()
    else:
        stored = down
    tensors = {f"{prefix}.{names[0]}": both, f"{prefix}.{names[1]}": stored}
    source = write_floats(tmp_path / "in", tensors, {"model_type": model_type, "hidden_size": H})
    read = quantizing.Reader(source)
    (layer,) = read.layers
    assert layer == (prefix if prefix.endswith("experts") else f"{prefix}.experts")
    found = read.floats(layer)
    np.testing.assert_array_equal(found.gate_up, np.concatenate([gate, up], axis=1))
    np.testing.assert_array_equal(found.down, down)
    quantizing.convert(source, tmp_path / "out", "fp8_channel")
    again = compressed_tensors.Reader(tmp_path / "out").layers[layer]
    assert (again.num_experts, again.hidden_size, again.intermediate_size) == (E, H, I)


def test_sizes_of_the_config_tell_a_tensor_the_other_way_round(tmp_path, rng):
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": floats(rng, E, 2 * I, H)}
    tensors["model.layers.0.mlp.experts.down_proj"] = floats(rng, E, H, I)
    source = write_floats(tmp_path / "in", tensors, {"model_type": "qwen3_vl_moe", "hidden_size": H})
    with pytest.raises(CheckpointError, match=r"must be|hidden_size"):
        quantizing.Reader(source)


# Requantizing


@pytest.mark.parametrize(
    "name", ["fp8_block_groups", "fp8_tensor_static", "fp8_channel_dynamic", "w4a16_g32", "gptq_g32"]
)
def test_quantized_experts_are_requantized(tmp_path, name):
    arrays, config = golden(name)
    number = max(int(key.split(".")[5]) for key in arrays if ".experts." in key)
    moved = f"{LAYER}.{number}.up_proj"  # a module outside experts, quantized alike
    outside = "model.layers.1.self_attn.o_proj"
    more = {key.replace(moved, outside): array for key, array in arrays.items() if key.startswith(moved)}
    source = write(tmp_path / "in", arrays | more, config)
    report = quantizing.convert(source, tmp_path / "out", "int8_channel")
    assert 0 < report.total()["up"].relative_error < 0.02
    before, after = compressed_tensors.Reader(source), compressed_tensors.Reader(tmp_path / "out")
    assert after.layers[LAYER].scheme == Scheme("int8_channel", None, "pack-quantized")
    made = after.experts(LAYER, "packed").dequantize(np.float32)
    for ours, theirs in zip(made, before.experts(LAYER, "packed", inputs=False).dequantize(np.float32), strict=True):
        assert np.linalg.norm(ours - theirs) < 0.02 * np.linalg.norm(theirs)
    kept, was = after.module(outside), before.module(outside)
    assert (kept.scheme.weights, kept.scheme.inputs) == (was.scheme.weights, was.scheme.inputs)
    for ours, theirs in zip(kept.weight(), was.weight(), strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or same(ours, theirs)
    assert kept.static_scale() == was.static_scale()
    assert after.quantization.scheme("model.layers.0.mlp.gate") is None


@pytest.mark.parametrize("name", ["quark_gpt_oss_fp8", "modelopt_gpt_oss"])
def test_quantized_experts_in_tensors_of_gate_and_up_are_requantized(tmp_path, name):
    arrays, config = golden(name)
    report = quantizing.convert(write(tmp_path / "in", arrays, config), tmp_path / "out", "int8_channel")
    assert 0 < report.total()["gate"].relative_error < 0.02
    before = compressed_tensors.Reader(tmp_path / "in", "interleaved").experts(LAYER, "packed", inputs=False)
    after = compressed_tensors.Reader(tmp_path / "out").experts(LAYER, "packed")
    assert (before.gate_up_order, after.gate_up_order) == ("interleaved", "concatenated")

    def concatenated(rows):
        return np.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)

    for which, (ours, theirs) in enumerate(zip(*(e.dequantize(np.float32) for e in (after, before)), strict=True)):
        expected = np.asarray(theirs) if which else concatenated(np.asarray(theirs))
        assert np.linalg.norm(ours - expected) < 0.02 * np.linalg.norm(expected)
    np.testing.assert_array_equal(after.gate_up_bias, concatenated(np.asarray(before.gate_up_bias)))
    np.testing.assert_array_equal(after.down_bias, before.down_bias)
    other = write(tmp_path / "other", arrays, config | {"model_type": "unheard_of"})
    with pytest.raises(CheckpointError, match=r"holds gate and up, in an order .* `model_type` gpt_oss.*'unheard_of'"):
        quantizing.convert(other, tmp_path / "never", "int8_channel")
    assert not (tmp_path / "never").exists()


def test_what_cannot_be_requantized_is_named(tmp_path):
    arrays, config = golden("gptq_g32_asym_order")
    moved, outside = f"{LAYER}.0.up_proj", "model.layers.1.self_attn.o_proj"
    more = {key.replace(moved, outside): array for key, array in arrays.items() if key.startswith(moved)}
    with pytest.raises(CheckpointError, match=rf"module '{outside}' \(int4_g32_asym_order.* is outside the experts"):
        quantizing.convert(write(tmp_path / "in", arrays | more, config), tmp_path / "out", "fp8_channel")
    assert not (tmp_path / "out").exists()
