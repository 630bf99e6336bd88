"""Checkpoints of GPTQ, AWQ and AutoRound: configs, what is refused, and whole experts. Golden files are among those of
`test_checkpoint_compressed_tensors.py`, which compares weights with those that the packages make."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint_compressed_tensors import GOLDEN, LAYER, golden, read, write

from jmx.checkpoint import CheckpointError, compressed_tensors
from jmx.checkpoint.compressed_tensors import Scheme, read_quantization
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors

NAMES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name[:4] in ("gptq", "awq_", "auto"))
EXPERT = f"{LAYER}.0.gate_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "packing_format": "auto_round:auto_gptq",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def quantization(directory: Path, entries: Mapping[str, object]) -> compressed_tensors.Quantization:
    (directory / "config.json").write_text(json.dumps({"quantization_config": entries}))
    return read_quantization(directory)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (GPTQ, Scheme("int4_g128", None, "gptq")),
        (GPTQ | {"bits": 8, "group_size": 16, "sym": False}, Scheme("int8_g16_asym", None, "gptq")),
        (GPTQ | {"desc_act": True, "sym": False}, Scheme("int4_g128_asym_order", None, "gptq")),
        (GPTQ | {"desc_act": True, "group_size": -1}, Scheme("int4_channel", None, "gptq")),  # one group has no order
        (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 48}, Scheme("int4_g48", None, "gptq_v2")),
        (
            GPTQ | {"damp_percent": 0.1, "true_sequential": True, "meta": {"quantizer": ["x"]}},
            Scheme("int4_g128", None, "gptq"),
        ),
        (AWQ, Scheme("int4_g128_asym", None, "awq")),
        (GPTQ | {"autoround_version": "0.5", "data_type": "int", "iters": 200}, Scheme("int4_g128", None, "gptq")),
        (AUTO_ROUND | {"act_bits": 16, "data_type": "int", "lr": 1e-3}, Scheme("int4_g128", None, "auto_round")),
        (
            AUTO_ROUND | {"packing_format": "auto_round", "sym": False},
            Scheme("int4_g128_asym", None, "auto_round_v2"),
        ),
        (AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "bits": 8}, Scheme("int8_g128", None, "gptq_v2")),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, Scheme("int4_g128_asym", None, "awq")),
        (AWQ | {"version": "GEMM", "group_size": -1, "do_fuse": False}, Scheme("int4_channel_asym", None, "awq")),
    ],
)
def test_the_config_gives_the_format(tmp_path, entries, expected):
    assert quantization(tmp_path, entries).scheme(EXPERT) == expected


def test_modules_that_are_not_quantized(tmp_path):
    found = quantization(tmp_path, AWQ | {"modules_to_not_convert": ["gate", "visual"]})
    assert found.scheme("model.layers.0.mlp.gate") is None
    assert found.scheme("visual.blocks.3.qkv") is None
    assert found.scheme(EXPERT) is not None
    extra = {"model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 32}, r".*\.layers\.0\..*": {"bits": 16}}
    found = quantization(tmp_path, AUTO_ROUND | {"extra_config": extra})
    assert found.scheme(EXPERT) is None
    assert found.scheme("model.layers.1.mlp.up_proj") == Scheme("int8_g32", None, "auto_round")
    assert found.scheme("model.layers.1.mlp.down_proj") == Scheme("int4_g128", None, "auto_round")
    found = quantization(tmp_path, GPTQ | {"dynamic": {r"-:.*\.layers\.0\..*": {}}})
    assert found.scheme(EXPERT) is None
    assert found.scheme("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (GPTQ | {"bits": 3}, "`quantization_config.bits` (=3) must be one of [4, 8]"),
        (GPTQ | {"group_size": 0}, "`quantization_config.group_size` (=0) must be positive and below"),
        (GPTQ | {"group_size": "128"}, "`quantization_config.group_size` (='128') must be positive and below"),
        (GPTQ | {"checkpoint_format": "marlin"}, "`quantization_config.checkpoint_format` (='marlin') must be one of"),
        (GPTQ | {"pack_dtype": "int16"}, "`quantization_config.pack_dtype` (='int16') must be one of"),
        (GPTQ | {"desc_act": 1}, "`quantization_config.desc_act` (=1) must be one of [True, False]"),
        (GPTQ | {"strange": 1}, "`quantization_config.strange` (=1) is not a known key"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "must only name modules that are not quantized"),
        (GPTQ | {"dynamic": {"-:(a+)+": {}}}, "`quantization_config.dynamic`: pattern '(a+)+' must have"),
        ({k: v for k, v in GPTQ.items() if k != "bits"}, "`quantization_config.bits` is missing"),
        (GPTQ | {"act_bits": 8}, "`quantization_config.act_bits` (=8) must be one of [16, 32, None]"),
        (AUTO_ROUND | {"bits": 3}, "`quantization_config.bits` (=3) must be one of [4, 8]"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "`quantization_config.data_type` (='mx_fp') must be one of ['int'"),
        (AUTO_ROUND | {"packing_format": "auto_round:llm_compressor"}, "`quantization_config.packing_format` (="),
        (AUTO_ROUND | {"extra_config": {"x": {"bits": 2}}}, "`quantization_config.extra_config.x.bits` (=2) must be"),
        (AUTO_ROUND | {"extra_config": {"x": {"y": 2}}}, "`quantization_config.extra_config.x.y` (=2) is not a known"),
        (AUTO_ROUND | {"rotation_config": {"a": 1}}, "`quantization_config.rotation_config` (={'a': 1}) must be one"),
        (AUTO_ROUND | {"strange": 1}, "`quantization_config.strange` (=1) is not a known key"),
        (AWQ | {"bits": 8}, "`quantization_config.bits` (=8) must be one of [4]"),
        (AWQ | {"zero_point": False}, "`quantization_config.zero_point` (=False) must be one of [True]"),
        (AWQ | {"version": "gemv"}, "`quantization_config.version` (='gemv') must be one of ['gemm'"),
        (AWQ | {"strange": None}, "`quantization_config.strange` (=None) is not a known key"),
    ],
)
def test_other_configs_are_refused_by_key_and_value(tmp_path, entries, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        quantization(tmp_path, entries)


def changed(directory: Path, name: str, tensor: str, change) -> compressed_tensors.Reader:
    """A golden file in which `change` has been made to a tensor; None removes it."""
    arrays, config = golden(name)
    removed = {key: array for key, array in arrays.items() if key != tensor}
    arrays = removed if change is None else removed | {tensor: change(arrays[tensor])}
    return compressed_tensors.Reader(write(directory / name, arrays, config))


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("gptq_g32", "qweight", None, f"tensor '{EXPERT}.qweight' is missing, for int4_g32"),
        (
            "gptq_g32",
            "qweight",
            lambda a: a[:-1],
            f"tensor '{EXPERT}.g_idx' is I32 (96,), but must be I32 (88,) for int4_g32 of (64, 88)",
        ),
        (
            "gptq_g32",
            "qweight",
            lambda a: a.astype(np.int64),
            f"tensor '{EXPERT}.qweight' is I64 (12, 64), but must be I32",
        ),
        ("gptq_g32", "qzeros", None, f"tensor '{EXPERT}.qzeros' is missing"),
        ("gptq_g32", "qzeros", lambda a: a[:, :-1], f"tensor '{EXPERT}.qzeros' is I32 (3, 7), but must be I32 (3, 8)"),
        ("gptq_g32", "scales", lambda a: a.T.copy(), f"tensor '{EXPERT}.scales' is F16 (64, 3), but must be"),
        ("gptq_g32", "g_idx", lambda a: a[1:], f"tensor '{EXPERT}.g_idx' is I32 (95,), but must be I32 (96,)"),
        ("gptq_g32_asym_order", "g_idx", None, f"tensor '{EXPERT}.g_idx' is missing, for int4_g32_asym_order"),
        (
            "awq_g32",
            "qweight",
            lambda a: a[:, :-1],
            f"tensor '{EXPERT}.scales' is F16 (3, 64), but must be BF16 or F16 or F32 (3, 56)",
        ),
    ],
)
def test_headers_that_do_not_fit_are_refused(tmp_path, name, tensor, change, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        changed(tmp_path, name, f"{EXPERT}.{tensor}", change)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        (
            "gptq_g32",
            "qzeros",
            lambda a: a ^ 1 << 4,
            "must hold zero points of 8 for symmetric weights, but has 7 for row 1",
        ),
        (
            "gptq_g32",
            "g_idx",
            lambda a: a[::-1].copy(),
            "must hold groups in order, as the config's `desc_act` is false",
        ),
        ("gptq_g32_asym_order", "g_idx", lambda a: a * 0, "must put 32 columns into each of the groups 0 to 2"),
        ("gptq_g32", "scales", lambda a: a * 0, "must hold finite scales above 0, but has 0.0 at (0, 0)"),
        ("awq_g32", "scales", lambda a: a * np.float16(np.nan), "must hold finite scales above 0, but has nan"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(tmp_path, name, tensor, change, message):
    tensor = f"{EXPERT}.{tensor}"
    reader = changed(tmp_path, name, tensor, change)
    with pytest.raises(CheckpointError, match=re.escape(f"tensor {tensor!r} {message}")):
        [array.whole() for array in reader.layers[LAYER].arrays().values()]


def test_a_tensor_of_no_quantized_module_is_refused(tmp_path):
    arrays, config = golden("awq_g32")
    arrays["model.layers.0.mlp.gate.qweight"] = arrays[f"{EXPERT}.qweight"]
    with pytest.raises(CheckpointError, match=r"mlp\.gate\.qweight' is of a quantized module, but no target"):
        compressed_tensors.Reader(write(tmp_path / "more", arrays, config))


@pytest.mark.parametrize("name", NAMES)
def test_a_module_outside_experts_is_dequantized(tmp_path, name):
    arrays, config = golden(name)
    expert = max(int(key.split(".")[5]) for key in arrays if ".experts." in key)
    moved = f"{LAYER}.{expert}.up_proj"
    arrays |= {k.replace(moved, "model.layers.1.mlp.up_proj"): a for k, a in arrays.items() if k.startswith(moved)}
    reader = compressed_tensors.Reader(write(tmp_path / name, arrays, config))
    answer = read(GOLDEN / f"{name}.safetensors")[f"{moved}.weight"]
    np.testing.assert_allclose(reader.dense("model.layers.1.mlp.up_proj.weight"), answer, rtol=2e-7)


def test_zero_points_are_one_more_than_older_files_say(tmp_path):
    """14 means 15 in the older form, and 14 in the newer one; 15, which tools read differently, is an error there."""
    points = {}
    for storage in ("gptq", "gptq_v2"):
        arrays, config = golden("gptq_g32_asym_order")
        arrays[f"{EXPERT}.qzeros"] = np.full_like(arrays[f"{EXPERT}.qzeros"], 0x6E)
        config["quantization_config"] |= {"checkpoint_format": storage}
        module = compressed_tensors.Reader(write(tmp_path / storage, arrays, config)).layers[LAYER].quantized[0]
        weight = module.weight()
        points[storage] = set(np.asarray(weight.zero_points).flat)
        again = module_tensors(module.scheme, weight, module.kept())
        np.testing.assert_array_equal(again["weight_zero_point"], arrays[f"{EXPERT}.qzeros"])
    assert points == {"gptq": {7, -1, -7}, "gptq_v2": {6, -2, -8}}
    reader = changed(tmp_path, "gptq_g32_asym_order", f"{EXPERT}.qzeros", lambda a: a | 15 << 8)
    with pytest.raises(
        CheckpointError, match="less one below 15, which some tools read as 0 and others as 16, but has one"
    ):
        reader.layers[LAYER].arrays()["gate_up_zero_points"].whole()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("gptq")])
def test_the_newer_form_of_each_golden_file_has_the_same_weights(name, tmp_path):
    """In "gptq_v2" each zero point is one more than in the older form, and nothing else differs (GPTQModel's
    `convert_gptq_v1_to_v2_format`), so that the answers of the older files are those of the newer ones."""
    arrays, config = golden(name)
    bits = config["quantization_config"]["bits"]
    ones = sum(1 << bits * element for element in range(32 // bits))
    for key, array in arrays.items():
        if key.endswith(".qzeros"):
            arrays[key] = (array.view(np.uint32) + np.uint32(ones)).view(np.int32)  # no zero point of 0 carries
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    newer = compressed_tensors.Reader(write(tmp_path / name, arrays, config))
    older = compressed_tensors.Reader(GOLDEN / name)
    assert newer.layers[LAYER].scheme.storage == "gptq_v2"
    for key, array in older.layers[LAYER].arrays().items():
        np.testing.assert_array_equal(newer.layers[LAYER].arrays()[key].whole(), array.whole(), err_msg=key)
    compressed_tensors.convert(newer, tmp_path / "again")
    again = compressed_tensors.Reader(tmp_path / "again")
    assert all(np.array_equal(again.view(key), array) for key, array in arrays.items())
