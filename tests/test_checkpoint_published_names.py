"""Golden files under the names and configs of published checkpoints, as their pages show them: read as they are."""

import copy
import json
import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_checkpoint_compressed_tensors import LAYER, golden, reader, same, wholes, write

from jmx.checkpoint import CheckpointError, compressed_tensors

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")
FP8_BLOCKS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
KIMI = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
LLAMA_4 = ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model.*", "Llama4TextAttention"]


class Published(NamedTuple):
    """A checkpoint: the golden file that it is like, what its tensors and keys are called, and what it is read as."""

    like: str
    experts: str
    quantization: dict[str, Any] | None = None  # entries beside the golden file's
    parts: tuple[str, str, str] = GATE_UP_DOWN
    others: dict[str, Any] | None = None  # instead of the golden file's quantization
    inner: bool = False  # in `text_config`
    inputs: str | None = None


PUBLISHED = {
    "Kimi-K2-Thinking": Published("w4a16_g32", "model.layers.1.mlp.experts", {"ignore": KIMI}),
    "Kimi-K2.5": Published("w4a16_g32", "language_model.model.layers.1.mlp.experts", {"ignore": KIMI}, inner=True),
    "Llama-4-Scout-FP8-dynamic": Published(
        "fp8_channel_dynamic", "language_model.model.layers.0.feed_forward.experts", {"ignore": LLAMA_4}
    ),
    "GLM-4.5-FP8": Published(
        "fp8_channel_dynamic",
        "model.layers.3.mlp.experts",
        {"ignore": ["lm_head", "model.layers.3.mlp.gate"], "sparsity_config": {}, "transform_config": {}},
    ),
    "Qwen3-Next-NVFP4": Published("nvfp4", "model.layers.0.mlp.experts", {"ignore": ["lm_head", "re:.*linear_attn.*"]}),
    "Mistral-Large-3-NVFP4": Published("nvfp4", "layers.3.experts", parts=W1_W3_W2),
    "DeepSeek-V3": Published("fp8_block_groups", "model.layers.3.mlp.experts", others=FP8_BLOCKS, inputs="fp8_block"),
    "DeepSeek-V3.1": Published(
        "fp8_block_groups",
        "model.layers.3.mlp.experts",
        others=FP8_BLOCKS | {"scale_fmt": "ue8m0"},
        inputs="fp8_block_ue8m0",
    ),
    "MiniMax-M2": Published(
        "fp8_block_groups",
        "model.layers.0.block_sparse_moe.experts",
        parts=W1_W3_W2,
        others=FP8_BLOCKS
        | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        inputs="fp8_block",
    ),
    "Qwen3-VL-FP8": Published(
        "fp8_block_groups",
        "model.language_model.layers.0.mlp.experts",
        others=FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.visual.blocks.0.attn.proj"]},
        inputs="fp8_block",
    ),
    "MiMo-V2-Flash": Published(
        "fp8_block_groups",
        "model.layers.1.mlp.experts",
        others=FP8_BLOCKS | {"ignored_layers": ["model.layers.0.self_attn.o_proj"]},
        inputs="fp8_block",
    ),
    "Hunyuan-A13B-FP8": Published(
        "fp8_tensor_static",
        "model.layers.0.mlp.experts",
        others={
            "activation_scheme": "static",
            "ignored_layers": ["lm_head", "model.layers.0.mlp.gate.wg"],
            "kv_cache_scheme": "static",
            "quant_method": "fp8",
        },
    ),
    "DeepSeek-R1-FP4": Published("modelopt_nvfp4", "model.layers.3.mlp.experts"),
    "Jamba-GPTQ": Published("gptq_g32", "model.layers.1.feed_forward.experts"),
    "Phi-3.5-MoE-GPTQ": Published("gptq_g32", "model.layers.0.block_sparse_moe.experts", parts=W1_W3_W2),
    "Mixtral-AWQ": Published("awq_g32", "model.layers.0.block_sparse_moe.experts", parts=W1_W3_W2),
    "Qwen3-Coder-AutoRound": Published("auto_round_g32", "model.layers.0.mlp.experts"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_are_read_as_golden_ones(name, tmp_path):
    its = PUBLISHED[name]
    arrays, config = golden(its.like)
    scale = "weight_scale_inv" if its.others is not None and "weight_block_size" in its.others else "weight_scale"

    def renamed(key: str) -> str:
        key = key.replace(LAYER, its.experts).replace("weight_scale", scale) if key.startswith(LAYER) else key
        for ours, theirs in zip(GATE_UP_DOWN, its.parts, strict=True):
            key = re.sub(rf"(?<=experts\.\d\.){ours}", theirs, key)
        return key

    quantization = copy.deepcopy(config.pop("quantization_config")) | (its.quantization or {})
    entries = {"quantization_config": quantization if its.others is None else its.others}
    config = {"model_type": "some"} | ({"text_config": config | entries} if its.inner else config | entries)
    files = {renamed(key): array for key, array in arrays.items()}
    found = compressed_tensors.Reader(write(tmp_path / "published", files, config))
    (layer,) = found.layers.values()
    assert layer.name == its.experts
    like = reader(its.like).layers[LAYER]
    assert layer.scheme.inputs == (its.inputs or like.scheme.inputs)
    want, got = wholes(like), wholes(layer)
    assert want.keys() == got.keys()
    assert all(same(got[key], array) for key, array in want.items())


OWN_FILES = {
    "quantize_config.json": ("gptq_g32", {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False}),
    "quant_config.json": ("awq_g32", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    "quantization_config.json": ("gptq_g16_asym", {"bits": 4, "group_size": 16, "sym": False, "quant_method": "gptq"}),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", OWN_FILES)
def test_the_tools_own_files_are_read_where_config_json_has_nothing(name, tmp_path):
    like, contents = OWN_FILES[name]
    arrays, config = golden(like)
    path = write(tmp_path / "own", arrays, {key: v for key, v in config.items() if key != "quantization_config"})
    with pytest.raises(CheckpointError, match=r"config\.json: has no `quantization_config`"):
        compressed_tensors.Reader(path)
    assert not compressed_tensors.is_quantized(path)
    (path / name).write_text(json.dumps(contents))
    assert compressed_tensors.is_quantized(path)
    layer, want = compressed_tensors.Reader(path).layers[LAYER], wholes(reader(like).layers[LAYER])
    got = wholes(layer)
    assert want.keys() == got.keys()
    assert all(same(got[key], array) for key, array in want.items())
    (path / name).write_text(json.dumps(contents | {"version": "gemv", "bits": 3, "w_bit": 3}))
    with pytest.raises(CheckpointError, match=rf"{name}: `(w_)?bits?` \(=3\) must be one of"):
        compressed_tensors.Reader(path)


def test_gptq_names_how_zero_points_are_stored_under_two_keys(tmp_path):
    arrays, config = golden("gptq_g16_asym")
    quantization = {k: v for k, v in config["quantization_config"].items() if k != "checkpoint_format"}

    def read(number, **keys):
        entries = config | {"quantization_config": quantization | keys}
        return compressed_tensors.Reader(write(tmp_path / str(number), arrays, entries)).layers[LAYER].scheme.storage

    assert (
        read(1, format="gptq_v2")
        == read(2, checkpoint_format="gptq_v2")
        == read(3, format="gptq_v2", checkpoint_format=None)
    )
    assert read(4, format="gptq") == read(5) != read(7, format="gptq_v2")
    with pytest.raises(CheckpointError, match=r"`quantization_config.format` \(='gptq'\) must be that of"):
        read(6, format="gptq", checkpoint_format="gptq_v2")


@pytest.mark.parametrize(
    "method",
    ["aqlm", "bitnet", "bitsandbytes", "eetq", "fbgemm_fp8", "gguf", "higgs", "hqq", "mxfp4", "quanto", "torchao"],
)
def test_other_methods_are_refused_by_name(method, tmp_path):
    arrays, config = golden("w4a16_g32")
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    known = r"must be one of \['compressed-tensors', 'modelopt', .* 'auto-round'\]"
    with pytest.raises(CheckpointError, match=rf"`quantization_config.quant_method` \(='{method}'\) {known}"):
        compressed_tensors.Reader(write(tmp_path / method, arrays, config))


def test_experts_under_unknown_names_are_refused_by_one_of_them(tmp_path):
    arrays, config = golden("fp8_channel_dynamic")
    files = {key.replace("mlp.experts.", "moe.").replace("experts", "moe"): array for key, array in arrays.items()}
    with pytest.raises(CheckpointError, match=r"must hold tensors of experts, .* such as 'model\.layers\.0\.moe\.0\."):
        compressed_tensors.Reader(write(tmp_path / "moe", {k: np.asarray(a) for k, a in files.items()}, config))


def test_gguf_is_named(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(
        CheckpointError, match=r"config\.json: the file is missing, and 'model\.gguf' beside it is GGUF"
    ):
        compressed_tensors.Reader(tmp_path)
