"""What configs of every tool may declare of inputs: experts load so, or an error names the file, the layer and what
`inputs=False` is for; and with that they always load."""

import copy
import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from input_formats import worth
from test_checkpoint_compressed_tensors import LAYER, floats, golden, read, reader, reader_at, same, write

import jmx
from jmx import cli
from jmx.checkpoint import CheckpointError, compressed_tensors, quantizing, shards
from jmx.numerics.input_formats import FP8_BLOCK_UE8M0, INPUT_FORMATS

pytestmark = pytest.mark.sampled(3)

WHOLE = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}  # what sizes must be a multiple of
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT4 = FLOAT8 | {"num_bits": 4}
INT8 = FLOAT8 | {"type": "int"}
GROUPS = {"strategy": "group", "dynamic": True}

# `input_activations` of compressed-tensors, and the format that they are, or in words what they are.
DECLARED: list[tuple[dict[str, Any] | None, str | None]] = [
    (None, None),
    (FLOAT8 | {"strategy": "tensor", "dynamic": False}, "fp8_static"),
    (FLOAT8 | {"strategy": "token", "dynamic": True}, "fp8_token"),
    (FLOAT8 | GROUPS | {"group_size": 128}, "fp8_block"),
    (FLOAT8 | GROUPS | {"group_size": 32, "scale_dtype": "torch.uint8"}, "mxfp8"),
    (FLOAT4 | GROUPS | {"group_size": 32}, "mxfp4"),
    (FLOAT4 | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"}, "nvfp4"),
    (INT8 | {"strategy": "token", "dynamic": True}, "int8_token"),
    (FLOAT8 | GROUPS | {"group_size": 64}, "float8 by group of 64, dynamic"),
    (FLOAT8 | GROUPS | {"group_size": 128, "scale_dtype": "torch.uint8"}, "float8 by group of 128, dynamic, torch.ui"),
    (FLOAT8 | {"strategy": "tensor", "dynamic": True}, "fp8_tensor"),
    (FLOAT8 | {"num_bits": 6, "group_size": 32, "dynamic": True}, "float6 by group of 32, dynamic"),
    (INT8 | {"strategy": "token", "dynamic": True, "symmetric": False}, "asymmetric int8 by token, dynamic"),
    (INT8 | {"strategy": "tensor", "dynamic": False}, "int8 by tensor, static"),
    (INT8 | {"strategy": "tensor", "dynamic": False, "symmetric": False}, "asymmetric int8 by tensor, static"),
    (INT8 | {"num_bits": 4, "strategy": "token", "dynamic": True}, "int4 by token, dynamic"),
]
STATIC = {"fp8_static": ["input_scale"], "nvfp4": ["input_global_scale"], "int8 by tensor, static": ["input_scale"]}
STATIC["asymmetric int8 by tensor, static"] = ["input_scale", "input_zero_point"]

# Of sizes that 16, 32 and 128 divide, or not.
NAMES = ["w4a16_channel", "w4a16_g32", "w4a8_g32", "w8a8_channel", "mxfp4a16", "nvfp4a16", "w4a16_g128"]
NAMES += ["fp8_tensor_dynamic", "fp8_channel_dynamic", "fp8_block_dynamic"]


def with_inputs(arrays: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """The same tensors, with those `names` of inputs."""
    bare = {name: array for name, array in arrays.items() if ".input_" not in name}
    modules = {name.rpartition(".")[0] for name in arrays if ".experts." in name}
    return bare | {f"{module}.{name}": np.full(1, 0.5, np.float32) for module in modules for name in names}


def assert_loads_or_says_why(path: Path, name: str, expected: str | None, *, layer: str = LAYER) -> bool:
    """Whether they load as they are declared. Without, they always do, and are those of the golden file `name`."""
    ours = reader_at(path, name)
    plain = ours.experts(layer, "packed", inputs=False)
    assert plain.input_format is None
    assert all(same(array, plain.arrays()[key]) for key, array in reader(name).arrays(LAYER).items())
    its = ours.layers[layer]
    whole = WHOLE.get(str(expected), 1)
    size = next((s for s in (its.hidden_size, its.intermediate_size) if s % whole), None)
    if expected in (None, *INPUT_FORMATS) and size is None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "static input scales differ")
            experts = ours.experts(layer, "packed")
        assert experts.input_format == ours.declared_inputs(layer) == expected
        return True
    wrong = rf"\(={size}\) must be a multiple of {whole} for" if size else re.escape(str(expected))
    for load in (lambda: ours.experts(layer), lambda: ours.declared_inputs(layer)):
        with pytest.raises(CheckpointError, match=wrong) as raised:
            load()
        assert str(raised.value).startswith(f"{ours.quantization.file}: ")
        assert f"'{layer}'" in str(raised.value)
        assert "`inputs=False` loads the experts" in str(raised.value)
    return False


@pytest.mark.parametrize("name", NAMES)
def test_whatever_inputs_compressed_tensors_declares(tmp_path, name):
    arrays, config = golden(name)
    loaded = 0
    for i, (declared, expected) in enumerate(DECLARED):
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = declared
        its = with_inputs(arrays, STATIC.get(str(expected), []))
        path = write(tmp_path / str(i), its, config)
        loaded += assert_loads_or_says_why(path, name, expected)
        compressed_tensors.convert(reader_at(path, name), tmp_path / f"{i} again")
        again = read(tmp_path / f"{i} again" / shards.SINGLE)
        assert again.keys() == its.keys()
        assert all(same(array, its[key]) for key, array in again.items())
    assert loaded == 9 - {"w4a16_channel": 3, "fp8_block_dynamic": 3}.get(name, 0)


MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": True}
PER_CHANNEL = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}


@pytest.mark.parametrize("name", ["quark_gpt_oss", "quark_gpt_oss_fp8"])
def test_whatever_inputs_quark_declares(tmp_path, name):
    arrays, config = golden(name)
    loaded = 0
    for i, (declared, expected) in enumerate(
        [
            (None, None),
            (PER_CHANNEL, "fp8_token"),
            ({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}, "fp8_static"),
            (MX | {"dtype": "fp8_e4m3"}, "mxfp8"),
            (MX, "mxfp4"),
            (PER_CHANNEL | {"ch_axis": 0}, "('fp8_e4m3', 'per_channel', None, None, True, 0)"),
            (MX | {"dtype": "fp6_e2m3"}, "('fp6_e2m3', 'per_group', 32, 'e8m0', True, None)"),
            ({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True}, "fp8_tensor"),
            ({"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": False}, "('int8', 'per_tensor', None"),
        ]
    ):
        config["quantization_config"]["global_quant_config"]["input_tensors"] = declared
        static = declared is not None and not declared["is_dynamic"]
        path = write(tmp_path / str(i), with_inputs(arrays, ["input_scale"] * static), config)
        loaded += assert_loads_or_says_why(path, name, expected)
    assert loaded == 6


@pytest.mark.parametrize("place", ["config.json", "text_config", "hf_quant_config.json"])
@pytest.mark.parametrize(
    ("name", "algorithm", "expected"), [("modelopt_nvfp4", "NVFP4", "nvfp4"), ("modelopt_fp8", "FP8", "fp8_static")]
)
def test_whatever_inputs_modelopt_declares(tmp_path, name, algorithm, expected, place):
    arrays, config = golden(name)
    said = config.pop("quantization_config")
    if place == "config.json":
        config["quantization_config"] = said
    elif place == "text_config":
        config[place] = {"quantization_config": said}
    path = write(tmp_path / name, arrays, config)
    if place == "hf_quant_config.json":
        older = {"quant_algo": algorithm, "exclude_modules": said["ignore"]}
        (path / place).write_text(json.dumps({"quantization": older}))
    assert assert_loads_or_says_why(path, name, expected)


# As DeepSeek has FP8 in blocks


def as_deepseek(arrays: dict[str, np.ndarray], scales: Any) -> dict[str, np.ndarray]:
    """Under its names, with scales that are powers of two in the dtype `scales`; "u8": e8m0 as bytes."""
    found = {}
    for name, array in arrays.items():
        if name.endswith(".weight_scale"):
            array = np.exp2(np.round(np.log2(array.astype(np.float64)))).astype(ml_dtypes.float8_e8m0fnu)
            array = array.view(np.uint8) if scales == "u8" else array.astype(scales)
        found[name.replace("weight_scale", "weight_scale_inv")] = array
    return found


DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SCALES = {"F32": np.float32, "BF16": jnp.bfloat16, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "U8": "u8"}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Directories of one checkpoint, by the dtype of scales."""
    arrays, _ = golden("fp8_block_dynamic")
    made = {name: tmp_path_factory.mktemp(name) for name in SCALES}
    return {name: write(path, as_deepseek(arrays, SCALES[name]), {}) for name, path in made.items()}


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("scale_fmt", [..., "float", "ue8m0"])
def test_whatever_deepseek_declares(deepseek, scales, scale_fmt):
    expected = deepseek["F32"]
    for fmt, scheme, place in itertools.product(
        ("e4m3", "float8_e4m3fn", ...), ("dynamic", "static"), ("outer", "inner", "both")
    ):
        said = DEEPSEEK | {"activation_scheme": scheme, "fmt": fmt, "scale_fmt": scale_fmt}
        said = {key: value for key, value in said.items() if value is not ...}
        config: dict[str, Any] = {"text_config": {"n_routed_experts": 2, "hidden_size": 160}}
        if place != "inner":
            config["quantization_config"] = said
        if place != "outer":
            config["text_config"]["quantization_config"] = copy.deepcopy(said)
        for path in (deepseek[scales], expected):
            (path / "config.json").write_text(json.dumps(config))
        if scales == "U8" and scale_fmt != "ue8m0":
            with pytest.raises(
                CheckpointError, match=r"weight_scale_inv' is U8 \(.*must be BF16 or F16 or F32 or F8_E8M0"
            ):
                compressed_tensors.Reader(deepseek[scales])
            continue
        ours = compressed_tensors.Reader(deepseek[scales])
        arrays = compressed_tensors.Reader(expected).arrays(LAYER)
        found = ours.experts(LAYER, "packed", inputs=False).arrays()
        for key, array in arrays.items():
            np.testing.assert_array_equal(found[key].astype(np.float32), array.astype(np.float32))
            assert found[key].dtype == array.dtype or scales == "BF16"
        if scheme == "dynamic":
            declared = "fp8_block_ue8m0" if scale_fmt == "ue8m0" else "fp8_block"
            assert ours.experts(LAYER, "packed").input_format == ours.declared_inputs(LAYER) == declared
            continue
        with pytest.raises(CheckpointError, match=rf"inputs of experts '{LAYER}' are static e4m3, which is none of"):
            ours.experts(LAYER)


@pytest.mark.parametrize("scales", SCALES)
def test_deepseeks_scales_come_back_to_the_bit(deepseek, scales, tmp_path):
    said = DEEPSEEK | {"scale_fmt": "ue8m0"}
    (deepseek[scales] / "config.json").write_text(json.dumps({"quantization_config": said}))
    compressed_tensors.convert(compressed_tensors.Reader(deepseek[scales]), tmp_path / "again")
    given, again = (shards.read_headers(path) for path in (deepseek[scales], tmp_path / "again"))
    assert {tensor.dtype for name, tensor in again.items() if name.endswith("_inv")} == {scales}
    assert all(same(tensor.view(), again[name].view()) for name, tensor in given.items())


@pytest.mark.parametrize("scales", ["F8_E8M0", "U8"])
def test_an_exponent_of_255_is_no_scale(scales, tmp_path):
    arrays = as_deepseek(golden("fp8_block_dynamic")[0], SCALES[scales])
    arrays[f"{LAYER}.1.up_proj.weight_scale_inv"].view(np.uint8)[1, 0] = 255
    path = write(tmp_path / "nan", arrays, {"quantization_config": DEEPSEEK | {"scale_fmt": "ue8m0"}})
    with pytest.raises(CheckpointError, match=r"1.up_proj.weight_scale_inv' must hold finite scales above 0, but"):
        compressed_tensors.Reader(path).arrays(LAYER)


def test_a_layer_of_deepseeks_is_what_numpy_makes_of_it(deepseek, rng):
    (deepseek["F8_E8M0"] / "config.json").write_text(
        json.dumps({"quantization_config": DEEPSEEK | {"scale_fmt": "ue8m0"}})
    )
    ours = compressed_tensors.Reader(deepseek["F8_E8M0"])
    layer, experts = ours.layers[LAYER], ours.experts(LAYER, "packed")
    x = rng.standard_normal((5, layer.hidden_size)).astype(np.float32)
    gate_up, down = floats(layer, "gate_up"), floats(layer, "down")
    ids = rng.integers(0, 2, (5, 1)).astype(np.int32)
    expected = []
    for token, (expert,) in enumerate(ids):
        gate, up = np.split(gate_up[expert] @ worth(x[token], FP8_BLOCK_UE8M0), 2)
        h = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
        expected.append(down[expert] @ worth(h, FP8_BLOCK_UE8M0))
    routing = jmx.Routing(ids, np.ones((5, 1), np.float32))
    found = jmx.moe(x, routing, experts, activation=jmx.SiLUAndMul())
    plain = jmx.moe(x, routing, ours.experts(LAYER, "packed", inputs=False), activation=jmx.SiLUAndMul())
    error, rounding = (np.linalg.norm(y - np.array(expected)) / np.linalg.norm(expected) for y in (found, plain))
    assert error < 1e-3 < 1e-2 < rounding < 0.1  # an h between two elements may go to either


# What commands make of it


def explained(capsys: Any, path: Path) -> tuple[int, str, str]:
    return cli.main(["explain", "--checkpoint", str(path), "--top-k", "2", "--json"]), *capsys.readouterr()


def test_explain_finds_what_the_config_of_the_text_model_declares(tmp_path, capsys):
    arrays, config = golden("fp8_channel_dynamic")
    nested = {"model_type": "kimi_k25", "text_config": config}
    code, out, _ = explained(capsys, write(tmp_path / "nested", arrays, nested))
    (found,) = json.loads(out)
    assert (code, found["problem"]["format"], found["problem"]["input_format"]) == (0, "fp8_channel", "fp8_token")
    quantizing.convert(tmp_path / "nested", tmp_path / "out", jmx.MXFP4)
    assert compressed_tensors.Reader(tmp_path / "out").layers[LAYER].scheme.weights == "mxfp4"


def test_explain_says_which_inputs_no_format_is(tmp_path, capsys):
    arrays, config = golden("w8a8_channel")
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    code, out, err = explained(capsys, write(tmp_path / "unknown", arrays, config))
    assert (code, out) == (2, "")
    assert f"inputs of experts '{LAYER}' are asymmetric int8 by token, dynamic, which is none of" in err
    assert "of `jmx.models.load` `declared_inputs=False`, of commands `--inputs float`" in err
    assert "Traceback" not in err


# Static scales that no inputs have


@pytest.mark.parametrize("bad", [np.nan, 0.0, -1.0, 1e38])
@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensor_static", "modelopt_nvfp4", "quark_gpt_oss"])
def test_bad_static_scales_have_a_way_out(tmp_path, name, bad):
    arrays, config = golden(name)
    key = next(key for key in sorted(arrays) if re.search(r"experts\.1\..*input_(global_)?scale$", key))
    arrays[key] = np.full_like(arrays[key], bad)
    ours = reader_at(write(tmp_path / name, arrays, config), name)
    assert ours.experts(LAYER, "packed", inputs=False).input_format is None
    with pytest.raises(CheckpointError, match=re.escape(f"tensor '{key}' ")) as raised:
        ours.experts(LAYER, "packed")
    assert str(raised.value).startswith(str(tmp_path / name / "model.safetensors"))
    assert "`inputs=False` loads the experts" in str(raised.value)
