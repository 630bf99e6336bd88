import contextlib
import copy
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from properties import examples

from jmx.checkpoint.compressed_tensors import Reader, Scheme, read_quantization
from jmx.checkpoint.compressed_tensors.config import INPUTS
from jmx.checkpoint.compressed_tensors.config_writer import entries
from jmx.checkpoint.compressed_tensors.quantization_config import quantization_of
from jmx.checkpoint.compressed_tensors.targets import parse_target
from jmx.checkpoint.shards import CheckpointError
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.numerics.quantization import dequantize

GOLDEN = Path(__file__).parent / "data" / "compressed_tensors"
FILE = Path("somewhere/config.json")
EXPERT = "model.layers.0.mlp.experts.1.gate_proj"

# What each golden checkpoint's config says of an expert's projection.
SCHEMES = {
    "nvfp4": Scheme("nvfp4", "nvfp4", "nvfp4-pack-quantized"),
    "nvfp4a16": Scheme("nvfp4", None, "nvfp4-pack-quantized"),
    "mxfp4": Scheme("mxfp4", "mxfp4", "mxfp4-pack-quantized"),
    "mxfp4a16": Scheme("mxfp4", None, "mxfp4-pack-quantized"),
    "mxfp8": Scheme("mxfp8", "mxfp8", "mxfp8-quantized"),
    "fp8_tensor_static": Scheme("fp8_tensor", "fp8_static", "float-quantized"),
    "fp8_tensor_dynamic": Scheme("fp8_tensor", "fp8_token", "float-quantized"),
    "fp8_channel_static": Scheme("fp8_channel", "fp8_static", "float-quantized"),
    "fp8_channel_dynamic": Scheme("fp8_channel", "fp8_token", "float-quantized"),
    "fp8_block_static": Scheme("fp8_block", "fp8_static", "float-quantized"),
    "fp8_block_dynamic": Scheme("fp8_block", "fp8_block", "float-quantized"),
    "fp8_block_groups": Scheme("fp8_block", "fp8_block", "float-quantized"),
    "w4a16_g32": Scheme("int4_g32", None, "pack-quantized"),
    "w4a16_g64": Scheme("int4_g64", None, "pack-quantized"),
    "w4a16_g128": Scheme("int4_g128", None, "pack-quantized"),
    "w4a16_channel": Scheme("int4_channel", None, "pack-quantized"),
    "w4a16_g32_asym": Scheme("int4_g32_asym", None, "pack-quantized"),
    "w4a16_channel_asym": Scheme("int4_channel_asym", None, "pack-quantized"),
    "w4a16_g32_order": Scheme("int4_g32_order", None, "pack-quantized"),
    "w4a16_g64_asym_order": Scheme("int4_g64_asym_order", None, "pack-quantized"),
    "w4a16_g128_order": Scheme("int4_g128_order", None, "pack-quantized"),
    "w8a16_g32": Scheme("int8_g32", None, "pack-quantized"),
    "w8a16_g128": Scheme("int8_g128", None, "pack-quantized"),
    "w8a16_channel": Scheme("int8_channel", None, "pack-quantized"),
    "w8a16_g32_asym": Scheme("int8_g32_asym", None, "pack-quantized"),
    "w8a16_g32_order": Scheme("int8_g32_order", None, "pack-quantized"),
    "w4a8_channel": Scheme("int4_channel", "int8_token", "int-quantized"),
    "w4a8_g32": Scheme("int4_g32", "int8_token", "int-quantized"),
    "w4afp8_g32": Scheme("int4_g32", "fp8_token", "int-quantized"),
    "w8a8_channel": Scheme("int8_channel", "int8_token", "int-quantized"),
}

OTHERS = {
    "modelopt_nvfp4": Scheme("nvfp4", "nvfp4", "modelopt"),
    "modelopt_gpt_oss": Scheme("nvfp4", "nvfp4", "modelopt"),
    "modelopt_fp8": Scheme("fp8_tensor", "fp8_static", "float-quantized"),
    "quark_gpt_oss": Scheme("mxfp4", "fp8_static", "quark"),
    "quark_gpt_oss_fp8": Scheme("fp8_channel", "fp8_token", "float-quantized"),
}

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
NVFP4_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}


def config(**changes: Any) -> dict[str, Any]:
    """A config.json with some entries changed, by path: keys joined by two underscores. ... takes one out."""
    found = copy.deepcopy(QUANTIZATION)
    for path, value in changes.items():
        *parents, key = path.split("__")
        entries: Any = found
        for parent in parents:
            entries = entries[parent]
        if value is ...:
            del entries[key]
        else:
            entries[key] = value
    return {"hidden_size": 64, "quantization_config": found}


def scheme(contents: dict[str, Any], name: str = EXPERT, module_class: str = "Linear") -> Scheme | None:
    return quantization_of(FILE, contents).scheme(name, module_class)


def weights(**changes: Any) -> dict[str, Any]:
    return config(config_groups__group_0__weights=WEIGHTS | changes)


def inputs(**given: Any) -> dict[str, Any]:
    return config(config_groups__group_0__input_activations={"symmetric": True} | given)


def test_every_golden_checkpoint_is_listed():
    """Those of GPTQ, AWQ and AutoRound are in tests/test_checkpoint_gptq.py."""
    others = ("auto_round", "awq", "gptq")
    names = {path.name for path in GOLDEN.iterdir() if path.is_dir() and not path.name.startswith(others)}
    assert names == (SCHEMES | OTHERS).keys()


@pytest.mark.parametrize("name", [*SCHEMES, *OTHERS])
def test_schemes_are_those_that_the_tool_was_given(name):
    quantization = read_quantization(GOLDEN / name)
    assert quantization.scheme(EXPERT) == (SCHEMES | OTHERS)[name]
    assert quantization.scheme(f"model.layers.0.mlp.{'router' if 'gpt_oss' in name else 'gate'}") is None
    assert not quantization.kv_cache
    assert quantization.scheme("model.norm", "RMSNorm") is None


def test_schemes_name_formats_that_there_are():
    for scheme in (SCHEMES | OTHERS).values():
        assert scheme.weights in FORMATS
        assert scheme.inputs is None or (scheme.static_scale is not None) == INPUT_FORMATS[scheme.inputs].static
    assert {*INPUTS.values()} == {*INPUT_FORMATS} - {"fp8_block_ue8m0"}  # which only DeepSeek's own config declares


def test_static_inputs_name_the_tensor_of_their_scale():
    assert SCHEMES["nvfp4"].static_scale == "input_global_scale"
    assert SCHEMES["fp8_channel_static"].static_scale == "input_scale"
    assert {SCHEMES[name].static_scale for name in ("nvfp4a16", "mxfp4", "fp8_block_dynamic", "w4a8_g32")} == {None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"strategy": None}, "int4_g128"),
        ({"strategy": None, "group_size": -1}, "int4_channel"),
        ({"group_size": 16, "symmetric": False}, "int4_g16_asym"),
        ({"group_size": 48, "num_bits": 8, "actorder": "group"}, "int8_g48_order"),
        ({"strategy": "channel", "group_size": None}, "int4_channel"),
        ({"strategy": "channel", "group_size": -1, "num_bits": 8}, "int8_channel"),
        ({"group_size": 64, "symmetric": False, "actorder": "dynamic"}, "int4_g64_asym_order"),
        ({"actorder": True}, "int4_g128_order"),
        ({"actorder": False}, "int4_g128"),
        ({"actorder": "weight"}, "int4_g128"),
        ({"actorder": "static"}, "int4_g128"),
        ({"observer": "mse", "observer_kwargs": {"maxshrink": 0.2}, "zp_dtype": "torch.int8"}, "int4_g128"),
    ],
)
def test_weights_may_be_said_in_several_ways(changes, expected):
    assert scheme(weights(**changes)) == Scheme(expected, None, "pack-quantized")


def test_the_packages_defaults_are_filled_in():
    contents = config(config_groups__group_0={"targets": ["Linear"], "weights": {"group_size": 32}})
    assert scheme(contents) == Scheme("int8_g32", None, "pack-quantized")
    contents = config(ignore=..., quantization_status=...)
    assert scheme(contents) == Scheme("int4_g128", None, "pack-quantized")


def test_older_spellings_of_the_same(tmp_path):
    contents = config(quantization_status="frozen", sparsity_config={"format": "dense"}, ignore=None)
    contents["compression_config"] = contents.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(contents))
    assert read_quantization(tmp_path).scheme("lm_head") == Scheme("int4_g128", None, "pack-quantized")
    block = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}
    contents = config(config_groups__group_0__weights=block, format="float-quantized")
    assert scheme(contents) == Scheme("fp8_block", None, "float-quantized")
    for group_size, strategy, expected in ((16, "tensor_group", "nvfp4"), (32, "group", "mxfp4")):
        four_bits = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group_size}
        contents = config(config_groups__group_0__weights=four_bits, format=f"{expected}-pack-quantized")
        assert scheme(contents) == Scheme(expected, None, f"{expected}-pack-quantized")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, "fp8_token"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, "fp8_static"),
        ({"num_bits": 8, "type": "float"}, "fp8_static"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}, "fp8_tensor"),
        ({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}, "fp8_block"),
        ({"type": "float", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"}, "mxfp8"),
        ({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}, "mxfp4"),
        (NVFP4_INPUTS, "nvfp4"),
        ({"strategy": "token", "dynamic": True}, "int8_token"),
    ],
)
def test_inputs(given, expected):
    found = scheme(inputs(**given))
    assert found is not None
    assert found.inputs == expected


# Modules that a group selects


def grouped(**groups: tuple[list[str], int]) -> dict[str, Any]:
    """Groups by name: targets, and the group size of their weights, which identifies the group."""
    return config(
        config_groups={
            n: GROUP | {"targets": t, "weights": WEIGHTS | {"group_size": s}} for n, (t, s) in groups.items()
        }
    )


def size(contents: dict[str, Any], name: str = EXPERT, module_class: str = "Linear") -> int | None:
    found = scheme(contents, name, module_class)
    return None if found is None else int(found.weights.removeprefix("int4_g"))


@pytest.mark.parametrize(
    ("target", "matches"),
    [
        (EXPERT, True),
        ("model.layers.0.mlp.experts.1", False),
        ("gate_proj", False),
        ("Linear", True),
        ("linear", False),
        (r"re:.*\.experts\.\d+\..*_proj$", True),
        ("re:.*gate$", False),
        ("re:gate_proj", False),
        ("re:model", True),
        ("re:^(?!.*gate_proj).*", False),
        ("re:.*(gate|up)_proj", True),
        (r"re:.*experts\.(\d+\.)?gate_proj", True),
    ],
)
def test_targets_are_names_classes_or_patterns_from_the_first_character(target, matches):
    assert size(grouped(a=([target], 32))) == (32 if matches else None)
    contents = grouped(a=(["Linear"], 32))
    contents["quantization_config"]["ignore"] = [target]
    assert size(contents) == (None if matches else 32)


def test_names_go_before_patterns_and_patterns_before_classes():
    contents = grouped(c=(["Linear"], 32), b=(["re:.*_proj"], 64), a=([EXPERT], 128))
    assert size(contents) == 128
    assert size(contents, "model.layers.0.mlp.experts.1.up_proj") == 64
    assert size(contents, "model.layers.0.self_attn.qkv") == 32
    assert size(contents, "model.layers.0.self_attn.qkv", "Conv1d") is None


def test_targets_of_one_rank_that_disagree_are_refused_by_name():
    contents = grouped(a=(["re:.*gate.*"], 32), b=(["re:.*_proj"], 64))
    assert size(contents, "model.layers.0.mlp.experts.1.up_proj") == 64
    with pytest.raises(
        CheckpointError, match=re.escape(f"module {EXPERT!r} must be of one group, but is of ['a', 'b']")
    ):
        size(contents)
    assert size(grouped(a=(["re:.*gate.*"], 32), b=(["re:.*_proj"], 32))) == 32


def test_groups_may_store_differently_under_mixed_precision():
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    contents = grouped(a=(["re:.*gate_proj"], 32), b=(["re:.*up_proj"], 64))
    groups = contents["quantization_config"]["config_groups"]
    groups["a"] |= {"weights": fp8, "format": "float-quantized", "input_activations": TOKEN}
    with pytest.raises(CheckpointError, match=r"`.*config_groups.a.format` .* must be 'pack-quantized'"):
        scheme(contents)
    contents["quantization_config"]["format"] = "mixed-precision"
    with pytest.raises(CheckpointError, match=r"`.*config_groups.b.format` is missing"):
        scheme(contents)
    groups["b"]["format"] = "pack-quantized"
    assert scheme(contents) == Scheme("fp8_channel", "fp8_token", "float-quantized")
    assert scheme(contents, EXPERT.replace("gate", "up")) == Scheme("int4_g64", None, "pack-quantized")


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*$", "(a*)*", "(a?){30}a{30}", "([ab]|b)+c", "(?:x(?:y|z))*", ".*" * 7]
)
def test_patterns_that_may_take_for_ever_are_refused(pattern):
    with pytest.raises(ValueError, match=r"must have at most 6 repeats"):
        parse_target(f"re:{pattern}")


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:.*layers\.\d+\.(mlp|self_attn)\..*_proj$",
        r"re:model\.layers\.(?:[0-9]|1[0-9])\.mlp\.experts\.\d+\.(gate|up|down)_proj",
        r"re:^(?!.*(lm_head|router)).*$",
        r"re:(model\.)?layers[.]\d+?[.](?P<what>mlp|\(.*\)+)",
        r"re:.*[)*+|(].*",
    ],
)
def test_patterns_as_people_write_them_are_taken_and_fast(pattern):
    start = time.perf_counter()
    parse_target(pattern).rank("model.layers.7.mlp.experts.12.gate_proj" * 20, "Linear")
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_bits": 4, "strategy": "token", "dynamic": True}, "int4 by token, dynamic"),
        ({"num_bits": 6, "type": "float", "group_size": 32, "dynamic": True}, "float6 by group of 32, dynamic"),
        ({"strategy": "token", "dynamic": True, "symmetric": False}, "asymmetric int8 by token, dynamic"),
        ({"type": "float", "num_bits": 6, "dynamic": True}, "float6 by tensor, dynamic"),
        (
            {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": True},
            "float4 by tensor_group of 16, dynamic",
        ),
    ],
)
def test_inputs_of_no_format_that_is_known_are_put_in_words(given, words):
    assert scheme(inputs(**given)) == Scheme("int4_g128", words, "pack-quantized")


# Where it is said


def nested(contents: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "kimi_k25", "text_config": contents}


@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
def test_the_config_of_the_text_model_may_say_it(place):
    contents = {place: config()["quantization_config"]}
    expected = Scheme("int4_g128", None, "pack-quantized")
    assert scheme(nested(contents)) == scheme(contents) == scheme(contents | nested(contents)) == expected
    with pytest.raises(CheckpointError, match=rf"`text_config.{place}.bits` \(=4\) is not a known key"):
        scheme(nested({place: contents[place] | {"bits": 4}}))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"ignore": ["lm_head", "vision"]}, "differs in 'ignore'"),
        ({"ignore": ...}, "differs in 'ignore'"),
        ({"version": "0.20.0"}, "differs in 'version'"),
        (3, "differs"),
    ],
)
def test_two_places_that_differ_are_refused_by_name(change, difference):
    said = config()["quantization_config"]
    other = change if isinstance(change, int) else {k: v for k, v in (said | change).items() if v is not ...}
    message = rf"`text_config.quantization_config` must equal `quantization_config`, but {difference}$"
    with pytest.raises(CheckpointError, match=message):
        scheme({"quantization_config": said} | nested({"quantization_config": other}))
    message = rf"`compression_config` must equal `quantization_config`, but {difference}$"
    with pytest.raises(CheckpointError, match=message):
        scheme({"quantization_config": said, "compression_config": other})


def test_weights_that_are_not_quantized_are_called_so(tmp_path):
    for contents in ({}, {"model_type": "qwen3_moe", "quantization_config": None}, {"text_config": {}}, nested({})):
        message = "config.json: has no `quantization_config`, so weights are not quantized; `jmx convert IN OUT --quan"
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_quantization(placed(tmp_path, contents))


def test_a_place_that_is_not_known_is_named():
    said = config()["quantization_config"]
    for contents, place in (
        ({"vision_config": {"quantization_config": said}}, "vision_config.quantization_config"),
        ({"thinker_config": {"text_config": {"quantization_config": said}}}, "thinker_config.text_config.quan"),
    ):
        with pytest.raises(CheckpointError, match=rf"`{place}.* must be in a place that is known: one of \['quant"):
            scheme(contents)
        assert scheme(contents | config()) is not None


# What is refused


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"quantization_config": {}, "compression_config": {}}, "`quantization_config.quant_method` is missing"),
        ({"quantization_config": 3}, "`quantization_config` (=3) must be an object"),
        (config(quant_method=...), "`quantization_config.quant_method` is missing"),
        (config(quant_method="hqq"), "`quantization_config.quant_method` (='hqq') must be one of"),
        (config(quantization_status="calibration"), "quantization_status` (='calibration') must be one of"),
        (config(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config` (={'format'"),
        (config(transform_config={"config_groups": {}}), "must be empty: it would change the model"),
        (config(kv_cache_scheme=8), "kv_cache_scheme` (=8) must be an object"),
        (config(version={}), "`quantization_config.version` (={}) must be a number or a string"),
        (config(format="marlin-24"), "`quantization_config.format` (='marlin-24') must be one of"),
        (config(format=...), "`quantization_config.format` is missing"),
        (config(bits=4), "`quantization_config.bits` (=4) is not a known key"),
        (config(ignore="lm_head"), "`quantization_config.ignore` (='lm_head') must be a list of strings"),
        (config(ignore=["re:("]), "`quantization_config.ignore`: pattern '(' must be a regular expression"),
        (config(ignore=["re:[[]"]), "must be a regular expression"),
        (config(ignore=[""]), "`quantization_config.ignore`: a target must not be empty"),
        (config(ignore=["re:" + "a" * 1001]), "must have at most 1000 characters"),
        (config(config_groups=...), "`quantization_config.config_groups` is missing"),
        (config(config_groups={}), "must hold a group, but is empty"),
        (config(config_groups={"W4A16": ["Linear"]}), "`quantization_config.config_groups.W4A16` (=['Linear']) must"),
        (config(config_groups__group_0__targets=[]), "group_0.targets` (=[]) must name a module"),
        (config(config_groups__group_0__targets=...), "group_0.targets` is missing"),
        (config(config_groups__group_0__weights=None), "group_0.weights` (=None) must be an object"),
        (config(config_groups__group_0__weights=...), "group_0.weights` is missing"),
        (config(config_groups__group_0__bits=4), "group_0.bits` (=4) is not a known key"),
        (config(config_groups__group_0__output_activations=TOKEN), "group_0.output_activations` (={"),
        (config(config_groups__group_0__input_activations=8), "group_0.input_activations` (=8) must be an object"),
        (config(config_groups__group_0__format="mixed-precision"), "group_0.format` (='mixed-precision') must be one"),
        (config(format="float-quantized"), "is int4_g128, which must not be stored as 'float-quantized'"),
        (weights(num_bits=3), "group_0.weights.num_bits` (=3) must be one of [4, 8]"),
        (weights(num_bits=4.0), "group_0.weights.num_bits` (=4.0) must be a positive whole number"),
        (weights(type="bfloat"), "group_0.weights.type` (='bfloat') must be one of"),
        (weights(group_size=10**9), "group_0.weights.group_size` (=1000000000) must be positive and below 1000000000"),
        (weights(group_size=0), "group_0.weights.group_size` (=0) must be positive and below 1000000000, or -1"),
        (weights(group_size=True), "group_0.weights.group_size` (=True) must be positive and below 1000000000, or -1"),
        (weights(group_size=None), "group_0.weights.group_size` must be given for strategy 'group'"),
        (weights(strategy="channel"), "group_0.weights.group_size` must not be given for strategy 'channel'"),
        (weights(strategy="tensor", group_size=None), "(int4 by tensor, static) must be weights of a format"),
        (weights(strategy="attn_head"), "group_0.weights.strategy` (='attn_head') must be one of"),
        (
            weights(strategy="block", group_size=None),
            "block_structure` (=None) must be [rows, columns] for strategy 'block' alone",
        ),
        (
            weights(strategy="block", group_size=None, block_structure=[64, 0]),
            "block_structure` (=[64, 0]) must be two positive whole numbers",
        ),
        (weights(block_structure=[128, 128]), "must be [rows, columns] for strategy 'block' alone"),
        (weights(symmetric=1), "group_0.weights.symmetric` (=1) must be one of"),
        (weights(dynamic=True), "(int4 by group of 128, dynamic) must be weights of a format"),
        (weights(actorder="random"), "group_0.weights.actorder` (='random') must be one of"),
        (weights(actorder="group", strategy="channel", group_size=None), "actorder` (='group') must be of integers"),
        (weights(zp_bits=4), "group_0.weights.zp_bits` (=4) is not a known key"),
        (weights(observer_kwargs=[]), "group_0.weights.observer_kwargs` (=[]) must be an object"),
        (weights(type="float", group_size=32, symmetric=False), "(asymmetric float4 by group of 32, static) must be"),
        (weights(type="float", num_bits=8, group_size=64, scale_dtype="torch.uint8"), "(float8 by group of 64, static"),
        (
            weights(type="float", num_bits=8, group_size=32, scale_dtype="torch.uint8"),
            "group_0.weights` is mxfp8, which must not be stored as 'pack-quantized'",
        ),
        (weights(type="float", group_size=32, scale_dtype="torch.int8"), "torch.int8 scales) must be weights"),
        (weights(scale_dtype="half"), "group_0.weights.scale_dtype` (='half') must be a dtype, such as 'torch.uint8'"),
        (weights(zp_dtype="int8"), "group_0.weights.zp_dtype` (='int8') must be a dtype, such as 'torch.uint8'"),
        (weights(scale_dtype="torch.uint8"), "(int4 by group of 128, static, torch.uint8 scales) must be weights of a"),
        (
            weights(strategy="token", group_size=None),
            "weights.dynamic` (=False) must not be given for strategy 'token'",
        ),
        (inputs(strategy="token"), "input_activations.dynamic` (=False) must not be given for strategy 'token'"),
        (inputs(dynamic="local"), "input_activations.dynamic` (='local') must not be given for strategy 'tensor'"),
        (
            # The group size alone means "group".
            inputs(**NVFP4_INPUTS | {"strategy": None}),
            "input_activations.dynamic` (='local') must not be given for strategy 'group'",
        ),
        (inputs(strategy="channel"), "input_activations.strategy` must not be 'channel', which is of weights"),
        (inputs(num_bits=0), "input_activations.num_bits` (=0) must be a positive whole number"),
        (inputs(strategy="token", dynamic=True, actorder="group"), "input_activations.actorder` (='group') must be"),
    ],
)
def test_what_is_unknown_or_half_said_is_refused_by_name(contents, message):
    with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
        scheme(contents)
    assert str(raised.value).startswith(f"{FILE}: ")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: the file is missing"):
        read_quantization(tmp_path)


def test_a_cache_that_is_quantized_can_be_asked_for():
    assert quantization_of(FILE, config(kv_cache_scheme={"num_bits": 8, "type": "float"})).kv_cache


# Writing


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_written_says_the_same(name):
    written = entries({"experts": (["re:.*experts.*"], SCHEMES[name])}, ["lm_head"])
    quantization = quantization_of(FILE, {"quantization_config": json.loads(json.dumps(written))})
    assert quantization.scheme(EXPERT) == SCHEMES[name]
    assert quantization.scheme("lm_head") is None
    theirs = json.loads((GOLDEN / name / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    for key in ("weights", "input_activations"):
        ours = written["config_groups"]["experts"][key]
        assert (ours is None) == (theirs[key] is None)
        assert ours is None or ours == {name: theirs[key][name] for name in ours}


def test_groups_that_are_written_may_differ():
    gate, other = SCHEMES["w4a16_g32"], SCHEMES["fp8_block_dynamic"]
    written = entries({"a": (["re:.*gate_proj"], gate), "b": (["Linear"], other)})
    quantization = quantization_of(FILE, {"quantization_config": written})
    assert quantization.scheme(EXPERT) == gate
    assert quantization.scheme("model.layers.0.mlp.experts.1.up_proj") == other
    with pytest.raises(ValueError, match="`groups` must hold a group"):
        entries({})
    with pytest.raises(ValueError, match=r"inputs of group 'a' \(='fp8_block_ue8m0'\) must be one of"):
        entries({"a": (["Linear"], Scheme("fp8_block", "fp8_block_ue8m0", "float-quantized"))})
    with pytest.raises(ValueError, match=r"storage of group 'a' \(='modelopt'\) must be one of"):
        entries({"a": (["Linear"], OTHERS["modelopt_nvfp4"])})


# Other tools


def placed(directory: Path, contents: Any, file: str = "config.json") -> Path:
    (directory / file).write_text(json.dumps(contents))
    return directory


NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "model.layers.*.mlp.gate", "*self_attn*"],
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NVFP4, "input_activations": NVFP4}},
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}
PER_CHANNEL = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": MX | {"observer_cls": "PerBlockMXObserver", "symmetric": None},
        "input_tensors": MX | {"is_dynamic": True},
        "bias": None,
        "output_tensors": None,
    },
    "exclude": ["lm_head", "re:.*self_attn.*", "*.mlp.gate"],
    "algo_config": [{"name": "gptq", "damp_percent": 0.01}],
    "export": {"pack_method": "reorder"},
    "layer_quant_config": {},
}


def test_modelopt_in_newer_and_older_files(tmp_path):
    quantization = read_quantization(placed(tmp_path, {"quantization_config": MODELOPT}))
    assert quantization.scheme(EXPERT) == Scheme("nvfp4", "nvfp4", "modelopt")
    ignored = ("lm_head", "model.layers.12.mlp.gate", "model.layers.3.self_attn.q_proj")
    assert [quantization.scheme(name) for name in ignored] == [None] * 3
    assert quantization.kv_cache
    older = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    placed(tmp_path, {"model_type": "qwen3_moe"})
    placed(tmp_path, {"producer": {"name": "modelopt"}, "quantization": older}, "hf_quant_config.json")
    quantization = read_quantization(tmp_path)
    assert quantization.scheme(EXPERT) == Scheme("nvfp4", None, "modelopt")
    assert not quantization.kv_cache


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("FP8", Scheme("fp8_tensor", "fp8_static", "float-quantized")),
        ("FP8_PER_CHANNEL_PER_TOKEN", Scheme("fp8_channel", "fp8_token", "float-quantized")),
    ],
)
def test_modelopt_in_fp8(tmp_path, algorithm, expected):
    older = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    placed(tmp_path, {"model_type": "qwen3_moe"})
    placed(tmp_path, {"producer": {"name": "modelopt"}, "quantization": older}, "hf_quant_config.json")
    quantization = read_quantization(tmp_path)
    assert quantization.scheme(EXPERT) == expected
    assert quantization.kv_cache


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, None),
        (PER_CHANNEL | {"is_dynamic": True, "ch_axis": 1}, "fp8_token"),
        ({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}, "fp8_static"),
        (MX | {"dtype": "fp8_e4m3", "is_dynamic": True}, "mxfp8"),
        (MX | {"is_dynamic": True}, "mxfp4"),
    ],
)
def test_quark(tmp_path, inputs, expected):
    contents = QUARK | {"global_quant_config": QUARK["global_quant_config"] | {"input_tensors": inputs}}
    quantization = read_quantization(placed(tmp_path, {"quantization_config": contents}))
    assert quantization.scheme(EXPERT) == Scheme("mxfp4", expected, "quark")
    assert quantization.scheme("model.layers.3.self_attn.q_proj") is None
    assert quantization.scheme("model.layers.3.mlp.gate") is None


def test_quark_by_layer(tmp_path):
    attention = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}, "input_tensors": None}
    layers = {"*.layers.3.self_attn.*": attention, "*.layers.4.*": {"weight": None}}
    contents = QUARK | {"exclude": ["lm_head"], "layer_quant_config": layers}
    quantization = read_quantization(placed(tmp_path, {"quantization_config": contents}))
    assert quantization.scheme(EXPERT) == Scheme("mxfp4", "mxfp4", "quark")
    assert quantization.scheme("model.layers.3.self_attn.q_proj") == Scheme("fp8_tensor", None, "float-quantized")
    assert quantization.scheme("model.layers.4.mlp.experts.0.up_proj") is None


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.3.mlp.gate", "shared_head"],
}


def test_fp8_in_blocks_as_models_are_published(tmp_path):
    quantization = read_quantization(placed(tmp_path, {"quantization_config": FP8}))
    assert quantization.scheme(EXPERT) == Scheme("fp8_block", "fp8_block", "fp8")
    assert quantization.scheme("model.layers.3.mlp.gate_proj") is not None
    for ignored in ("lm_head", "model.layers.3.mlp.gate", "model.layers.61.shared_head.head"):
        assert quantization.scheme(ignored) is None
    assert not quantization.kv_cache
    assert read_quantization(placed(tmp_path, {"quantization_config": FP8 | {"kv_cache_scheme": "static"}})).kv_cache
    without = {key: value for key, value in FP8.items() if key != "modules_to_not_convert"}
    assert read_quantization(placed(tmp_path, {"quantization_config": without})).scheme("lm_head") is not None


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn", None, ...])
@pytest.mark.parametrize(
    ("scale_fmt", "inputs", "storage"),
    [
        (..., "fp8_block", "fp8"),
        (None, "fp8_block", "fp8"),
        ("float", "fp8_block", "fp8"),
        ("ue8m0", "fp8_block_ue8m0", "fp8_ue8m0"),
    ],
)
def test_fp8_in_blocks_says_the_same_in_several_ways(fmt, scale_fmt, inputs, storage):
    said = FP8 | {"fmt": fmt, "scale_fmt": scale_fmt}
    said = {key: value for key, value in said.items() if value is not ...}
    expected = Scheme("fp8_block", inputs, storage)
    assert scheme({"quantization_config": said}) == scheme(nested({"quantization_config": said})) == expected
    more = {"expert_dtype": "fp8", "modules_to_convert": None, "dequantize": False}  # as transformers writes it
    assert scheme({"quantization_config": said | more}) == expected
    static = said | {"activation_scheme": "static"}
    assert scheme({"quantization_config": static}) == Scheme("fp8_block", "static e4m3", storage)


@pytest.mark.parametrize(
    "inputs",
    [PER_CHANNEL | {"is_dynamic": True}, MX, MX | {"group_size": 64, "is_dynamic": True}, MX | {"dtype": "fp6_e2m3"}],
)
def test_quarks_inputs_of_no_format_that_is_known_are_put_in_words(inputs):
    contents = QUARK | {"global_quant_config": QUARK["global_quant_config"] | {"input_tensors": inputs}}
    found = scheme({"quantization_config": contents})
    assert found is not None
    assert found.weights == "mxfp4"
    assert str(inputs["dtype"]) in str(found.inputs)
    assert found.inputs not in INPUT_FORMATS


def test_other_tools_configs_are_refused_by_name(tmp_path):
    weight = {"weight": MX | {"group_size": 64}}
    for contents, message in (
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "`quantization_config.quant_algo` (='W4A8_AWQ') must be one of"),
        (MODELOPT | {"quant_algo": "FP8"}, "config_groups.group_0.weights.num_bits` (=4) must be one of [8]"),
        (MODELOPT | {"quant_algo": "FP8", "group_size": 16}, "`quantization_config.group_size` (=16) must be one of"),
        (MODELOPT | {"group_size": 32}, "`quantization_config.group_size` (=32) must be one of"),
        (MODELOPT | {"kv_cache_quant_algo": "BOGUS"}, "`quantization_config.kv_cache_quant_algo` (='BOGUS') must be"),
        (MODELOPT | {"kv_cache_scheme": "x"}, "`quantization_config.kv_cache_scheme` (='x') must be an object"),
        (MODELOPT | {"rotate": True}, "`quantization_config.rotate` (=True) is not a known key"),
        (MODELOPT | {"ignore": [""]}, "`quantization_config.ignore`: a target must have 1 to 1000 characters"),
        (MODELOPT | {"config_groups": {}}, "`quantization_config.config_groups` must hold one group, but holds 0"),
        (
            MODELOPT | {"config_groups": {"a": {"weights": NVFP4 | {"num_bits": 8}}}},
            "`quantization_config.config_groups.a.weights.num_bits` (=8) must be one of [4]",
        ),
        (QUARK | {"global_quant_config": weight}, "('fp4', 'per_group', 64, 'e8m0', False, None)) must be one of"),
        (
            QUARK | {"global_quant_config": {"weight": PER_CHANNEL | {"ch_axis": 1}}},
            "global_quant_config.weight` (=('fp8_e4m3', 'per_channel', None, None, False, 1)) must be one of",
        ),
        (QUARK | {"layer_quant_config": {"*gate*": 1}}, "`quantization_config.layer_quant_config.*gate*` (=1) must be"),
        (QUARK | {"layer_quant_config": {"": {}}}, "`quantization_config.layer_quant_config`: a target must have"),
        (QUARK | {"layer_quant_config": {"a": {"strange": 1}}}, "`quantization_config.layer_quant_config.a.strange`"),
        (
            QUARK | {"layer_quant_config": {"a": {"input_tensors": MX}}},
            "`quantization_config.layer_quant_config.a.input_tensors` (={",
        ),
        (QUARK | {"layer_type_quant_config": {"a": {}}}, "`quantization_config.layer_type_quant_config` (={"),
        (
            QUARK | {"global_quant_config": {"weight": None}},
            "`quantization_config.global_quant_config.weight` must not",
        ),
        ({"quant_method": "mxfp4"}, "must be one of ['compressed-tensors', "),
        (QUARK | {"algo_config": [{"name": "rotation"}]}, "must be of algorithms that are done"),
        (QUARK | {"quant_mode": "later"}, "`quantization_config.quant_mode` (='later') must be one of"),
        (QUARK | {"export": {"weight_format": "fake_quantized"}}, "`quantization_config.export.weight_format` (="),
        (QUARK | {"export": {"rotate": True}}, "`quantization_config.export.rotate` (=True) is not a known key"),
        (
            QUARK | {"global_quant_config": {"weight": MX | {"symmetric": False}}},
            "`quantization_config.global_quant_config.weight.symmetric` (=False) must be one of",
        ),
        (QUARK | {"scheme": 1}, "`quantization_config.scheme` (=1) is not a known key"),
        (FP8 | {"activation_scheme": "none"}, "`quantization_config.activation_scheme` (='none') must be one of"),
        (FP8 | {"fmt": "e5m2"}, "`quantization_config.fmt` (='e5m2') must be one of"),
        (FP8 | {"expert_dtype": "fp6"}, "`quantization_config.expert_dtype` (='fp6') must be one of"),
        (FP8 | {"weight_block_size": [64]}, "`quantization_config.weight_block_size` (=[64]) must be two positive"),
        (FP8 | {"scale_fmt": "e5m3"}, "`quantization_config.scale_fmt` (='e5m3') must be one of"),
        (FP8 | {"modules_to_not_convert": [""]}, "a target must have 1 to 1000 characters, not 0"),
        (FP8 | {"rotate": 1}, "`quantization_config.rotate` (=1) is not a known key"),
        (
            {"quant_method": "hqq"},
            "`quantization_config.quant_method` (='hqq') must be one of ['comp",
        ),
    ):
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_quantization(placed(tmp_path, {"quantization_config": contents}))
    with pytest.raises(CheckpointError, match=re.escape("must be a JSON object, not list")):
        read_quantization(placed(tmp_path, []))
    placed(tmp_path, {})
    placed(tmp_path, [], "hf_quant_config.json")
    with pytest.raises(CheckpointError, match=re.escape("config.json: `quantization` (=None) must be an object")):
        read_quantization(tmp_path)


VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(
            ["group", "token", "local", "Linear", "re:.*", "re:(", "float", "int", "channel", "block", "tensor"]
        ),
        st.sampled_from([-1, 4, 8, 16, 32, 128]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["num_bits", "type", "strategy", "group_size", "targets"]), inner, max_size=3),
    ),
    max_leaves=6,
)


def paths(entries: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = entries.items() if isinstance(entries, dict) else enumerate(entries) if isinstance(entries, list) else ()
    return [here, *(path for key, value in inner for path in paths(value, (*here, key)))]


# What a field means that is missing or null, where that is another format of inputs: the tools' own defaults.
DEFAULTS = {
    "input_activations": {None},
    "input_tensors": {None},
    "type": {"int8_token"},  # an integer
    "num_bits": {"mxfp8"},  # 8
    "strategy": {"fp8_tensor"},  # one scale, as compressed-tensors infers it
    "weight_block_size": {"fp8_tensor"},  # likewise, under other names of tensors
    "scale_fmt": {"fp8_block"},
}
GOLDEN_CONFIGS = {
    **{name: json.loads((GOLDEN / name / "config.json").read_text()) for name in (SCHEMES | OTHERS)},
    "fp8": {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}},
}


def with_one_other_value(contents: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of a config null, missing and of other types: its key, and the config."""
    for *parents, key in paths(contents["quantization_config"])[1:]:
        for value in (None, ..., 7, "seven", [], {}, True, False):
            changed = copy.deepcopy(contents)
            entries: Any = changed["quantization_config"]
            for parent in parents:
                entries = entries[parent]
            if value is ...:
                del entries[key]
            elif type(value) is type(entries[key]) and value is not None:
                continue
            else:
                entries[key] = value
            yield key, changed


@pytest.mark.parametrize("name", GOLDEN_CONFIGS)
def test_a_field_that_is_null_missing_or_of_another_type_changes_no_number_in_silence(tmp_path, name):
    wanted, others = scheme(GOLDEN_CONFIGS[name]), set()
    assert wanted is not None
    for key, contents in with_one_other_value(GOLDEN_CONFIGS[name]):
        try:
            found = scheme(contents)
        except CheckpointError:
            continue
        if found is None or found == wanted:  # None: no module is selected, and its tensors are refused
            continue
        if found.inputs in (None, *INPUT_FORMATS) and found.inputs != wanted.inputs:
            assert found.inputs in DEFAULTS[key], (key, contents)
        if found.weights != wanted.weights and found.weights not in others:
            others.add(found.weights)
            files = GOLDEN.parent / "qwen3_moe" / "fp8_block" if name == "fp8" else GOLDEN / name
            check_weights_are_refused_or_equal(tmp_path / found.weights, files, contents)


def check_weights_are_refused_or_equal(directory: Path, golden: Path, contents: dict[str, Any]) -> None:
    shutil.copytree(golden, directory)
    placed(directory, contents)
    with contextlib.suppress(CheckpointError):
        layers, expected = (Reader(path, "interleaved").layers for path in (directory, golden))
        for layer, its in zip(layers.values(), expected.values(), strict=True):
            for module, other in zip(layer.quantized, its.quantized, strict=True):
                values, wanted = (dequantize(m.weight(), np.float32, m.format) for m in (module, other))
                np.testing.assert_array_equal(values, wanted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutated")


@hypothesis.given(st.sampled_from(sorted(SCHEMES | OTHERS)), st.data())
@examples(300)
def test_mutated_configs_are_understood_or_refused(folder, name, data):
    contents = json.loads((GOLDEN / name / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(paths(contents["quantization_config"])))
        entries: Any = contents
        for key in ("quantization_config", *path)[:-1]:
            entries = entries[key]
        key = ("quantization_config", *path)[-1]
        change = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if change == "remove":
            del entries[key]
            break
        if change == "add" and isinstance(entries[key], dict):
            entries[key][data.draw(st.text(max_size=5))] = data.draw(VALUES)
        else:
            entries[key] = data.draw(VALUES)
        if not isinstance(contents["quantization_config"], dict):
            break
    with contextlib.suppress(CheckpointError):  # and no other error
        found = read_quantization(placed(folder, contents)).scheme(EXPERT)
        assert found is None or isinstance(found, Scheme)
