"""`jmx explain --checkpoint`: what it finds in checkpoints whose experts are floats, of each family and form."""

import json

import ml_dtypes
import numpy as np
import pytest

from jmx import cli
from jmx.checkpoint import quantizing
from tests.float_checkpoints import TINY, float_gpt_oss, write

# Names and config keys of families, of 5 experts of sizes (64, 96), 3 a token.
FAMILIES = {
    "qwen3_moe": (
        "model.layers.2.mlp.experts",
        ("gate_proj", "up_proj", "down_proj"),
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "intermediate_size": 7777},
    ),
    "mixtral": (
        "model.layers.2.block_sparse_moe.experts",
        ("w1", "w3", "w2"),
        {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 96},
    ),
    "deepseek_v3": (
        "model.layers.2.mlp.experts",
        ("gate_proj", "up_proj", "down_proj"),
        {"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
    ),
    "kimi_k25": (
        "language_model.model.layers.2.mlp.experts",
        ("gate_proj", "up_proj", "down_proj"),
        {"text_config": {"n_routed_experts": 5, "num_experts_per_tok": 3, "hidden_act": "silu", "hidden_size": 64}},
    ),
}
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


def made(path, family, rng, dtype="BF16", **more):
    prefix, names, config = FAMILIES[family]
    tensors = {
        f"{prefix}.{expert}.{name}.weight": rng.standard_normal(shape).astype(DTYPES[dtype])
        for expert in range(5)
        for name, shape in zip(names, ((96, 64), (96, 64), (64, 96)), strict=True)
    }
    tensors["model.layers.0.mlp.gate_proj.weight"] = rng.standard_normal((64, 64), np.float32)  # a dense layer
    inner = {} if "text_config" in config else {"hidden_size": 64, "hidden_act": "silu"}
    return write(path, tensors, {"model_type": family} | inner | config | more)


@pytest.fixture
def explain(capsys):
    def run(path, *flags):
        capsys.readouterr()
        code = cli.main(["explain", "--checkpoint", str(path), *flags])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("format", [None, "nvfp4", "int4_g32", "fp8_channel", "mxint4", "mxfp4:fp8_token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_float_experts_are_explained_as_rounded(family, format, tmp_path, rng, explain):
    dtype = str(rng.choice([*DTYPES]))
    path = made(tmp_path / "in", family, rng, dtype)
    flags = ["--device", "h200", *(() if format is None else ("--format", format))]
    code, out, err = explain(path, *flags, "--json")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)
    weights, _, inputs = (format or "mxfp4").partition(":")
    expected = {"hidden_size": 64, "intermediate_size": 96, "num_experts": 5, "top_k": 3, "bias": False}
    expected |= {"format": weights, "input_format": inputs or None, "activation": "SiLUAndMul()"}
    assert expected.items() <= found["problem"].items()
    assert found["rounded_from"] == dtype
    assert found["chosen"] is not None
    reason = "shape, intermediate_size (=96) must be a multiple of 64, a tile"
    assert found["unquantized"] == f"xla (mosaic_float: {reason})"
    code, out, err = explain(path, *flags)
    assert (code, err) == (0, "")
    first = out.splitlines()[0]
    assert first.startswith(f"the checkpoint's experts are {dtype}: explained as quantized to {weights}")
    assert (f"jmx convert --quantize {weights}" in first) == (weights in quantizing.WRITABLE)
    assert f"as floats they run on {found['unquantized']}" in out.splitlines()
    assert "top-3 of 5 experts, H=64, I=96" in out


@pytest.mark.parametrize(
    ("device", "engine"),
    [("h200", "mosaic_float"), ("cpu", "xla (mosaic_float: platform, platform is 'cpu', not 'gpu')")],
)
def test_what_runs_experts_that_stay_floats(device, engine, tmp_path, rng, explain):
    path = made(tmp_path / "in", "qwen3_moe", rng)
    (found,) = json.loads(explain(path, "--device", device, "--intermediate", "128", "--json")[1])
    assert found["unquantized"] == engine
    flags = ["--device", device, "--intermediate", "128", "--format", "bfloat16", "--json"]
    assert json.loads(explain(path, *flags)[1])[0]["chosen"] == engine.partition(" ")[0]


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", None])
def test_what_is_explained_is_what_convert_writes(format, tmp_path, rng, explain):
    """The sizes, formats and order of rows are those of the converted checkpoint, of gpt-oss in floats too."""
    gpt_oss, _ = float_gpt_oss(tmp_path / "gpt_oss", num_layers=1)
    for path in (gpt_oss, made(tmp_path / "qwen", "qwen3_moe", rng)):
        flags = [] if format is None else ["--format", format]
        before = json.loads(explain(path, *flags, "--json")[1])[0]
        assert cli.main(["convert", str(path), f"{path}-out", "--quantize", format or "mxfp4", "--json"]) == 0
        after = json.loads(explain(f"{path}-out", "--json")[1])[0]
        assert before["problem"] == after["problem"]
        assert (before["rounded_from"], after["rounded_from"]) == ("BF16", None)


def test_what_a_config_does_not_say_can_be_given(tmp_path, rng, explain):
    path = made(tmp_path / "in", "qwen3_moe", rng, num_experts_per_tok=None, hidden_act="xielu")
    code, out, err = explain(path, "--top-k", "2")
    assert (code, out) == (2, "")
    assert "`hidden_act` (='xielu') of the checkpoint is not known: give --activation" in err
    code, out, err = explain(path, "--activation", "siluandmul")
    assert (code, out) == (2, "")
    assert "give --top-k" in err
    code, out, _ = explain(path, "--activation", "geluandmul:approximate=true", "--top-k", "2", "--json")
    assert code == 0
    assert json.loads(out)[0]["problem"]["activation"] == "GELUAndMul(approximate=True)"


@pytest.mark.parametrize(
    ("name", "activation"),
    [("gelu", "GELUAndMul(approximate=False)"), ("gelu_pytorch_tanh", "GELUAndMul(approximate=True)")],
)
def test_the_activation_is_the_configs(name, activation, tmp_path, rng, explain):
    path = made(tmp_path / "in", "mixtral", rng, hidden_act=name)
    assert json.loads(explain(path, "--json")[1])[0]["problem"]["activation"] == activation


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok"])
def test_sizes_that_no_model_has_are_refused(key, tmp_path, explain):
    config = json.loads((TINY / "config.json").read_text()) | {key: 32 * 10**400}
    if key == "num_experts_per_tok":
        config["num_local_experts"] = config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = explain(tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "must be at most 2147483647" in err


def test_errors_name_what_is_wrong_and_not_another_model(tmp_path, rng, explain):
    dense = write(tmp_path / "dense", {"a.weight": rng.standard_normal((4, 4), np.float32)}, {"model_type": "qwen3"})
    few = made(tmp_path / "few", "mixtral", rng, num_local_experts=6)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "mixtral"}')
    for path, flags, message in [
        (dense, [], "must hold tensors of experts, such as 'experts.0.up_proj.weight'"),
        (few, [], "`num_local_experts` (=6) must be 5"),
        (empty, [], "must hold *.safetensors files, but holds none"),
    ]:
        code, out, err = explain(path, *flags)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err
        assert "gpt_oss" not in err
