"""The command line: stdout, stderr and exit codes."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest

from jmx import cli
from jmx._version import __version__
from jmx.checkpoint import gpt_oss, shards
from jmx.perf import bench, doctor, roofline, shapes
from jmx.selection.backend import Reason, Rejection
from jmx.selection.environment import Environment
from jmx.selection.registry import Registry

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECKPOINT = str(ROOT / "tests" / "data" / "gpt_oss_tiny")
SIZES = ["--hidden", "64", "--intermediate", "96", "--experts", "8", "--top-k", "2"]


@pytest.fixture
def jmx(capsys, monkeypatch):
    """Runs the command line, as wide as it writes into files; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "140")

    def run(*argv):
        try:
            code = cli.main(argv)
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()

    return run


def assert_one_line_error(stderr, *parts):
    assert stderr.startswith("jmx: error: ")
    assert stderr.count("\n") == 1
    for part in parts:
        assert part in stderr


def test_version_and_help(jmx):
    assert jmx("--version") == (0, f"jmx {__version__}\n", "")
    for argv in [], ["explain"], ["doctor"], ["convert"], ["bench"], ["tune"], ["build"]:
        code, out, _ = jmx(*argv, "--help")
        assert code == 0
        assert "exit codes:" in out


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--compilation-cache", "x"], ["a COMMAND is required"]),
        (["explan"], ["'explan'", "'explain'"]),
        (["explain", *SIZES, "--hiden", "3"], ["--hiden 3; did you mean --hidden? (see `jmx explain --help`)"]),
        (
            ["generate", "a", "b", "--max-tokens=5"],
            ["--max-tokens=5; did you mean --max-new-tokens? (see `jmx generate --help`)"],
        ),
        (["doctor", "x"], ["unrecognized arguments: x (see `jmx doctor --help`)"]),
        (["--quick", "doctor"], ["unrecognized arguments: --quick (see `jmx --help`)"]),
        (["explain", *SIZES, "--tokens", "1,x"], ["'1,x' must be whole numbers"]),
        (["explain", *SIZES, "--tokens", "0"], ["`--tokens` (=0) must be at least 1"]),
        (["explain"], ["--hidden, --intermediate, --experts, --top-k", "--checkpoint"]),
        (["explain", *SIZES, "--hidden", "2870"], ["`hidden_size` (=2870) must be a multiple of 32 for MXFP4"]),
        (["explain", *SIZES, "--experts", "0"], ["`num_experts` (=0) must be at least 1"]),
        (["explain", *SIZES, "--top-k", "9"], ["`--top-k` (=9) must be in 1..8"]),
        (["explain", *SIZES, "--device", "h20"], ["`--device` (='h20')", "a100", "did you mean 'h200'?"]),
        (["explain", *SIZES, "--backend", "xlaa"], ["`--backend` (='xlaa')", "did you mean 'xla'?"]),
        (["explain", *SIZES, "--dtype", "bf16"], ["`--dtype` (='bf16')", "bfloat16"]),
        (["explain", *SIZES, "--layout", "canonica"], ["did you mean 'canonical'?"]),
        (["explain", *SIZES, "--format", "mxfp5"], ["(='mxfp5')", "did you mean 'mxfp"]),
        (["explain", *SIZES, "--format", "mxfp4:fp8_tokn"], ["`--format` (='fp8_tokn')", "did you mean 'fp8_token'?"]),
        (["explain", *SIZES, "--format", "mxfp4:"], ["`--format` (='') must be one of fp4, fp8, fp8_block"]),
        (
            ["explain", *SIZES, "--hidden", "100", "--format", "fp8_channel:mxfp8"],
            ["`hidden_size` (=100) must be a multiple of 32 for mxfp8 inputs"],
        ),
        (["explain", *SIZES, "--activation", "swigul"], ["did you mean 'swiglu'?"]),
        (["explain", *SIZES, "--activation", "swiglu:alfa=1"], ["it takes alpha, beta, limit"]),
        (["explain", *SIZES, "--activation", "gelu"], ["it takes approximate"]),
        (["explain", *SIZES, "--activation", "gelu:approximate=3"], ["approximate (=3.0) must be true or false"]),
        (["explain", *SIZES, "--activation", "gelu:approximate=none"], ["approximate (=None) must be true or false"]),
        (["explain", *SIZES, "--activation", "swiglu:alpha=true"], ["alpha (=True) must be a number"]),
        (["explain", *SIZES, "--activation", "swiglu:limit=-1"], ["`limit` (=-1.0) must be positive"]),
        (["explain", *SIZES, "--activation", "swiglu:limit=big"], ["limit (='big') must be a number"]),
        (["explain", *SIZES, "--activation", "relu", "--gate-up-order", "concatenated"], ["has no gate"]),
        (["explain", "--model", "gpt-oss-12b"], ["did you mean 'gpt-oss-120b'?"]),
        (["explain", "--checkpoint", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["explain", "--checkpoint", CHECKPOINT, "--model", "small"], ["not allowed with"]),
        (["convert", CHECKPOINT, "/tmp"], ["--to", "--quantize"]),
        (["convert", CHECKPOINT, "/tmp", "--to", "hf", "--quantize", "nvfp4"], ["not allowed with"]),
        (
            ["convert", CHECKPOINT, "/tmp/a", "--to", "hf", "--overwrite"],
            ["`--overwrite` requires `--quantize`"],
        ),
        (
            ["convert", CHECKPOINT, "/tmp/a", "--quantize", "nvpf4"],
            ["(='nvpf4')", "did you mean 'nvfp4'?"],
        ),
        (
            ["convert", CHECKPOINT, "/tmp/a", "--quantize", "mxint4"],
            ["(='mxint4') cannot be written", "nvfp4"],
        ),
        (["convert", CHECKPOINT, "/tmp/a", "--quantize", "nvfp4"], ["`quantization_config` must not be there"]),
        (["convert", CHECKPOINT, "/tmp", "--to", "torch"], ["'torch'", "original"]),
        (["bench", "--model", "smal"], ["did you mean 'small'?"]),
        (["bench", "--backends", "xla,ragged"], ["`--backends` (='ragged')", "did you mean 'ragged_dot'?"]),
        (["bench", "--routing", "zip"], ["did you mean 'zipf'?"]),
        (["bench", "--layers", "0"], ["`layers` (=0) must be at least 1"]),
        (["bench", "--seed", "99999999999999999999"], ["`seed` (=99999999999999999999) must be in 0..4294967295"]),
        (["bench", "--png", "/nowhere/at/all.png"], ["/nowhere/at/all.png cannot be written"]),
        (["bench", "--from", "/nowhere/at/all.json"], ["/nowhere/at/all.json"]),
        (["tune", "--backend", "xla"], ["`backend` (='xla') has nothing to tune; these have: mosaic"]),
        (["tune", "--backend", "xlaa"], ["`--backend` (='xlaa')", "did you mean 'xla'?"]),
        (["tune", "--shape", "gpt-oss-12b"], ["`--shape` (='gpt-oss-12b')", "did you mean 'gpt-oss-120b'?"]),
        (["tune", "--shape", "8,2,64"], ["`--shape` (='8,2,64') must be a name, or four whole numbers E,k,H,I"]),
        (["tune", "--shape", "8,9,64,64"], ["`--shape` (='8,9,64,64') has k (=9) outside 1..8"]),
        (["tune", "--shape", "8,2,65,64"], ["`hidden_size` (=65) must be a multiple of 32"]),
        (
            ["tune", "--shape", "8,2,64,100", "--format", "fp8_channel:nvfp4"],
            ["`intermediate_size` (=100) must be a multiple of 16 for nvfp4 inputs"],
        ),
        (["tune", "--tokens", "4,0"], ["`--tokens` (=0) must be positive"]),
        (["tune", "--seconds", "nan"], ["`--seconds` (=nan) must be positive"]),
        (["tune", "--output", "/nowhere/at/all.json"], ["/nowhere/at/all.json cannot be written"]),
    ],
)
def test_usage_errors_are_one_line_and_exit_with_2(argv, parts, jmx):
    code, out, err = jmx(*argv)
    assert (code, out) == (2, "")
    assert_one_line_error(err, *parts)


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["explain", *SIZES, "--device", "cuda"], None),
        (["explain", *SIZES, "--device", "H20"], "h200"),
        (["explain", *SIZES, "--device", "mi300x"], None),
        (["explain", *SIZES, "--format", "NVFP4"], "nvfp4"),
        (["explain", *SIZES, "--format", "gguf"], None),
        (["explain", *SIZES, "--backend", "vllm"], None),
        (["explain", *SIZES, "--layout", "rowmajor"], None),
        (["bench", "--model", "llama"], None),
        (["bench", "--model", "GPT-OSS-20B"], "gpt-oss-20b"),
        (["bench", "--routing", "random"], None),
        (["tune", "--shape", "tiny"], None),
    ],
)
def test_only_names_that_are_near_are_suggested(argv, near, jmx):
    code, out, err = jmx(*argv)
    assert (code, out) == (2, "")
    assert_one_line_error(err, f"(={argv[-1]!r}) must be one of ")
    assert ("did you mean" in err) == (near is not None)
    assert near is None or err.endswith(f"; did you mean {near!r}?\n")


@pytest.mark.parametrize("name", ["h200", "H200", "GB200", "Gb200", "L40s", "CPU"])
def test_devices_are_named_in_any_case(name, jmx):
    code, out, _ = jmx("explain", *SIZES, "--device", name, "--json")
    expected = Environment.named(name.lower())
    assert (code, json.loads(out)[0]["device"]) == (0, expected.device_kind)
    assert Environment.named(name) == expected


@pytest.mark.parametrize("argv", [["tune"], ["tune", "--backend", "mosaic"], ["tune", "--shape", "8,2,64,64"]])
def test_tune_exits_with_1_where_nothing_can_be_tuned_here(argv, jmx, monkeypatch):
    environment = Environment.named("cpu")
    monkeypatch.setattr(Environment, "probe", classmethod(lambda cls, *arguments: environment))
    code, out, err = jmx(*argv)
    assert (code, out) == (1, "")
    assert_one_line_error(err, "platform is 'cpu', not 'gpu'")


def test_explain_of_flags(jmx):
    flags = ["--tokens", "1,64", "--device", "h200", "--dtype", "float32", "--weights-on", "input", "--bias"]
    activation = ["--activation", "swiglu:alpha=1.5,limit=7", "--gate-up-order", "interleaved"]
    code, out, err = jmx("explain", *SIZES, *flags, *activation, "--layout", "packed", "--json")
    assert (code, err) == (0, "")
    one, many = json.loads(out)
    assert (one["problem"]["num_tokens"], many["problem"]["num_tokens"]) == (1, 64)
    expected = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_experts": 8,
        "top_k": 2,
        "dtype": "float32",
        "activation": "SwiGLU(alpha=1.5, beta=0.0, limit=7.0)",
        "gate_up_order": "interleaved",
        "bias": True,
        "layout": "packed",
        "weights_on": "input",
    }
    assert expected.items() <= one["problem"].items()
    assert one["device"] == "NVIDIA H200"
    assert one["chosen"] is not None
    assert one["floor_us"] < many["floor_us"]


def test_explain_takes_the_devices_own_layout_and_prints_a_table(jmx):
    code, out, _ = jmx("explain", *SIZES, "--device", "h200", "--activation", "gelu:approximate=true")
    assert code == 0
    assert "mxfp4 (mosaic_sm90) x bfloat16 on NVIDIA H200" in out
    assert "chosen" in out
    assert "mxfp4 (packed) x bfloat16 on NVIDIA A100" in jmx("explain", *SIZES, "--device", "a100")[1]


def test_explain_tells_what_would_run_on_a_hopper_gpu_that_is_not_here(jmx):
    argv = ["explain", "--model", "gpt-oss-120b", "--device", "h200", "--tokens", "1,64,8192"]
    code, out, err = jmx(*argv, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [each["problem"]["num_tokens"] for each in found] == [1, 64, 8192]
    assert {(each["chosen"], each["problem"]["layout"]) for each in found} == {("mosaic", "mosaic_sm90")}
    blocks = [each["configuration"]["values"]["block_n"] for each in found]
    assert blocks[0] < blocks[2]  # rows of an expert: one, and some hundred
    code, out, _ = jmx(*argv)
    assert code == 0
    assert all(f"Config(block_n={block}, warpgroups_m=" in out for block in blocks)


@pytest.mark.parametrize(("family", "variant"), [("fp8", "fp8_token"), ("fp4", "mxfp4"), ("int8", "int8_token")])
def test_a_family_of_inputs_is_its_first_variant(family, variant, jmx):
    code, out, _ = jmx("explain", *SIZES, "--format", f"mxfp4:{family}", "--json")
    (found,) = json.loads(out)
    assert (code, found["problem"]["input_format"]) == (0, variant)


@pytest.mark.parametrize(
    ("device", "format", "layout", "chosen"),
    [
        ("h200", "mxfp4:fp8_token", "mosaic_sm90_fp8", "mosaic_fp8"),
        ("h200", "mxfp4", "mosaic_sm90", "mosaic"),
        ("h200", "mxfp4:int8_token", "mosaic_sm90", "mosaic"),
        ("a100", "mxfp4:fp8_token", "packed", "xla"),
    ],
)
def test_explain_takes_an_input_format_and_the_layout_that_goes_with_it(device, format, layout, chosen, jmx):
    argv = ["explain", "--model", "gpt-oss-120b", "--device", device, "--format", format]
    code, out, err = jmx(*argv, "--json")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)
    weights, _, inputs = format.partition(":")
    assert (found["problem"]["format"], found["problem"]["input_format"]) == (weights, inputs or None)
    assert (found["problem"]["layout"], found["chosen"]) == (layout, chosen)
    out = jmx(*argv)[1]
    assert f"{weights} ({layout}) x {inputs or 'bfloat16'} on NVIDIA" in out
    assert (f"inputs: {inputs}, asked for" in out) == bool(inputs)


def test_explain_of_a_checkpoint_and_of_a_named_shape(jmx):
    config = json.loads((pathlib.Path(CHECKPOINT) / "config.json").read_text())
    code, out, _ = jmx("explain", "--checkpoint", CHECKPOINT, "--json")
    (found,) = [explanation["problem"] for explanation in json.loads(out)]
    assert code == 0
    assert found["hidden_size"] == config["hidden_size"]
    assert found["num_experts"] == config["num_local_experts"]
    assert found["gate_up_order"] == "interleaved"
    assert f"limit={float(config['swiglu_limit'])}" in found["activation"]
    code, out, _ = jmx("explain", "--model", "gpt-oss-120b", "--experts", "64", "--json")
    (found,) = [explanation["problem"] for explanation in json.loads(out)]
    assert (found["num_experts"], found["hidden_size"], found["top_k"]) == (64, 2880, 4)


def test_explain_of_gpt_oss_that_a_tool_quantized_and_of_older_files(jmx, tmp_path):
    data = pathlib.Path(__file__).parent / "data" / "compressed_tensors"

    def explained(name, config):
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        code, out, _ = jmx("explain", "--checkpoint", str(tmp_path / name), "--json")
        assert code == 0
        (found,) = json.loads(out)
        return found["problem"]

    for name in ("quark_gpt_oss", "modelopt_nvfp4"):
        shutil.copytree(data / name, tmp_path / name)
    quark, modelopt = (json.loads((data / n / "config.json").read_text()) for n in ("quark_gpt_oss", "modelopt_nvfp4"))

    published = json.loads((pathlib.Path(CHECKPOINT) / "config.json").read_text())
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2}
    found = explained("quark_gpt_oss", published | sizes | {"quantization_config": quark["quantization_config"]})
    assert (found["format"], found["input_format"], found["num_experts"]) == ("mxfp4", "fp8_static", 3)
    assert (found["gate_up_order"], found["bias"]) == ("interleaved", True)
    assert "limit=" in found["activation"]

    older = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "exclude_modules": ["*.mlp.gate"]}
    (tmp_path / "modelopt_nvfp4" / "hf_quant_config.json").write_text(json.dumps({"quantization": older}))
    found = explained("modelopt_nvfp4", {key: modelopt[key] for key in modelopt if key != "quantization_config"})
    assert (found["format"], found["input_format"]) == ("nvfp4", "nvfp4")


@pytest.mark.parametrize("name", ["qwen3_moe/nvfp4", "qwen3_moe/fp8_block", "compressed_tensors/nvfp4"])
def test_explain_of_a_checkpoint_with_quantized_experts(jmx, name):
    path = pathlib.Path(__file__).parent / "data" / name
    config = json.loads((path / "config.json").read_text())
    given = [] if "num_experts_per_tok" in config else ["--top-k", "2"]
    code, out, _ = jmx("explain", "--checkpoint", str(path), *given, "--device", "h200", "--json")
    (found,) = json.loads(out)
    declared = "nvfp4" if name == "compressed_tensors/nvfp4" else None
    assert code == 0
    assert found["problem"]["format"] == name.rpartition("/")[2]
    assert found["problem"]["input_format"] == declared
    assert found["inputs_declared"] == (declared is not None)
    assert found["problem"]["top_k"] == config.get("num_experts_per_tok", 2)
    if declared:
        assert f"inputs: {declared}, declared" in jmx("explain", "--checkpoint", str(path), *given)[1]
        other = jmx("explain", "--checkpoint", str(path), *given, "--format", "mxfp4", "--json")[1]
        assert json.loads(other)[0]["problem"]["input_format"] is None


def test_explain_exits_with_1_where_nothing_runs(jmx):
    code, out, err = jmx("explain", *SIZES, "--dtype", "float64")
    assert (code, err) == (1, "")
    assert "float64" in out


def test_doctor_tells_versions_devices_and_backends(jmx):
    code, out, _ = jmx("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["healthy"] is True
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["jmx"] == __version__
    assert [device["kind"] for device in found["devices"]] == [device.device_kind for device in jax.devices()]
    assert [backend["runs"] for backend in found["backends"] if backend["name"] == "xla"] == [True]
    code, out, _ = jmx("doctor")
    assert code == 0
    assert all(reported in out for reported in (jax.__version__, jax.devices()[0].device_kind, "xla"))


@pytest.mark.parametrize(
    ("device", "layout", "mosaic"),
    [
        ("h200", "mosaic_sm90", {"runs": True, "layout": "mosaic_sm90"}),
        ("a100", "packed", {"reason": "compute capability", "detail": "(8, 0) is not (9, 0)"}),
        ("cpu", "packed", {"reason": "platform", "detail": "platform is 'cpu', not 'gpu'"}),
    ],
)
def test_doctor_says_whether_the_hopper_kernels_run_here_and_why_not(device, layout, mosaic, jmx, monkeypatch):
    environment = Environment.named(device)
    monkeypatch.setattr(Environment, "probe", classmethod(lambda cls, *arguments: environment))
    code, out, _ = jmx("doctor", "--json")
    found = json.loads(out)
    assert (code, found["layout"]) == (0, layout)
    reported = {backend["name"]: backend for backend in found["backends"]}
    assert ({"runs": False} | mosaic).items() <= reported["mosaic"].items()
    assert reported["xla"]["runs"]


def test_doctor_tells_what_is_missing_and_how_to_get_it(jmx, monkeypatch):
    class Lacking:
        name, summary = "lacking", "a backend that was not built"

        def supports(self, problem, environment):
            return Rejection(Reason.NOT_BUILT, "no kernels here", "run `make kernels`")

    versions = doctor._version_of
    monkeypatch.setattr(doctor, "_version_of", lambda name: None if name == "tokenizers" else versions(name))
    monkeypatch.setattr("jmx.backends.REGISTRY", Registry((Lacking(),)))  # pyright: ignore[reportArgumentType]
    code, out, _ = jmx("doctor")
    assert code == 1
    assert "not built: no kernels here; run `make kernels`" in out
    assert "without tokenizers: pip install 'jmx-moe[hf]'" in out


def test_doctor_looks_for_what_pyproject_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}  # pyright: ignore

    assert names(project["dependencies"]) <= {*doctor.NEEDED}
    of_extras = project["optional-dependencies"]
    assert {extra: {*its} for extra, (_, its) in doctor.EXTRAS.items()} == {
        extra: names(of_extras[extra]) for extra in doctor.EXTRAS
    }


@pytest.mark.parametrize("name", ["jax", "scipy", "uvicorn"])
def test_doctor_names_the_distribution_to_install(name, monkeypatch):
    versions = doctor._version_of
    monkeypatch.setattr(doctor, "_version_of", lambda its: None if its == name else versions(its))
    found = doctor.examine()
    assert found["healthy"] == (name == "uvicorn")
    of_name = [line for line in found["advice"] if name in line]
    assert len(of_name) == 1
    assert re.search(r"pip install ('jmx-moe\[serve\]'|jmx-moe)$", of_name[0])


def test_convert_there_and_back_gives_the_same_experts(jmx, tmp_path):
    there, back = str(tmp_path / "original"), str(tmp_path / "hf")
    code, out, _ = jmx("convert", CHECKPOINT, there, "--to", "original")
    assert (code, out) == (0, f"wrote {there} in the form 'original'\n")
    code, out, err = jmx("convert", there, back, "--to", "hf", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"source": there, "target": back, "form": "hf"}
    before, after = (gpt_oss.load(directory, layer=1).arrays() for directory in (CHECKPOINT, back))
    assert before.keys() == after.keys()
    assert all(np.asarray(before[name]).tobytes() == np.asarray(after[name]).tobytes() for name in before)
    code, out, err = jmx("convert", CHECKPOINT, back, "--to", "hf")
    assert (code, out) == (2, "")
    assert_one_line_error(err, back)


def test_convert_quantizes_and_reports(jmx, tmp_path, rng):
    source, target, file = tmp_path / "in", str(tmp_path / "out"), tmp_path / "errors.json"
    source.mkdir()
    weight = rng.standard_normal((32, 32)).astype(np.float32)
    names = [f"model.layers.3.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down")]
    shards.write(source, [shards.Output(name, "F32", weight.shape, lambda: [weight]) for name in names], 10**6)
    (source / "config.json").write_text("{}")
    flags = ["--quantize", "fp8_channel", "--report", str(file)]
    code, out, err = jmx("convert", str(source), target, *flags)
    assert (code, err) == (0, "")
    assert "experts in fp8_channel" in out
    assert out.endswith(f"wrote {target} as compressed-tensors, experts in fp8_channel\n")
    report = json.loads(file.read_text())
    assert 0.02 < report["layers"]["model.layers.3.mlp.experts"]["up"]["relative_error"] < 0.03
    code, out, err = jmx("convert", str(source), target, *flags)
    assert (code, out) == (2, "")
    assert_one_line_error(err, "must not exist yet")
    code, out, err = jmx("convert", str(source), target, *flags, "--overwrite", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"source": str(source), "target": target, **report}


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_convert_draws_the_errors(jmx, tmp_path, rng, ending):
    source, picture = tmp_path / "in", tmp_path / f"errors.{ending}"
    source.mkdir()
    weight = rng.standard_normal((32, 32)).astype(np.float32)
    names = [f"model.layers.3.mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down")]
    shards.write(source, [shards.Output(name, "F32", weight.shape, lambda: [weight]) for name in names], 10**6)
    (source / "config.json").write_text("{}")
    flags = ["--quantize", "fp8_channel", "--picture"]
    for wrong, message in [
        (tmp_path / "errors.pdf", "must end with .svg or .png"),
        (source / f"errors.{ending}", "must not be, hold or lie in"),
        (tmp_path / "none" / f"errors.{ending}", "its directory does not exist"),
    ]:
        code, out, err = jmx("convert", str(source), str(tmp_path / "out"), *flags, str(wrong))
        assert code == 2
        assert "wrote" not in out
        assert_one_line_error(err, message)
        assert not (tmp_path / "out").exists()
    code, _, err = jmx("convert", str(source), str(tmp_path / "out"), *flags, str(picture))
    assert (code, err) == (0, "")
    drawn = picture.read_bytes()
    assert drawn.startswith({"svg": b"<?xml", "png": b"\x89PNG"}[ending])
    code, out, err = jmx("convert", str(source), str(tmp_path / "other"), *flags, str(picture))
    assert (code, out) == (2, "")
    assert_one_line_error(err, "must not exist yet")
    assert not (tmp_path / "other").exists()
    assert picture.read_bytes() == drawn
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", picture.name}


def test_bench_saves_prints_and_draws(jmx, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure_limits", lambda repeats: roofline.Limits(1e9, 1e10))
    monkeypatch.setitem(shapes.MODELS, "tiny", dataclasses.replace(shapes.MODELS["small"], num_experts=2))
    file, picture = str(tmp_path / "report.json"), str(tmp_path / "roof.png")
    flags = ["--model", "tiny", "--tokens", "2", "--layers", "1", "--repeats", "1", "--backends", "ragged_dot"]
    code, out, err = jmx("bench", *flags, "--json", file)
    assert code == 0
    assert "tiny, uniform routing" in out
    assert "ragged_dot, 2 tokens: " in err
    code, out, err = jmx("bench", "--from", file, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads(pathlib.Path(file).read_text())
    pytest.importorskip("matplotlib")
    assert jmx("bench", "--from", file, "--png", picture)[0] == 0
    assert pathlib.Path(picture).read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_benchmark_that_is_interrupted_are_kept(jmx, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure_limits", lambda repeats: roofline.Limits(1e9, 1e10))
    monkeypatch.setitem(shapes.MODELS, "tiny", dataclasses.replace(shapes.MODELS["small"], num_experts=2))
    file, part = tmp_path / "r.json", tmp_path / "r.json.part"
    before = roofline.Report({"device": "a device"}, roofline.Limits(1.0, 1.0), {"model": "tiny", "routing": "r"}, ())
    before.save(str(file))
    measured = bench._measure_row

    def cut(name, shape, case, *others):
        if case.num_tokens == 2:
            raise KeyboardInterrupt
        return measured(name, shape, case, *others)

    flags = ["bench", "--model", "tiny", "--backends", "ragged_dot", "--layers", "1", "--repeats", "1"]
    flags += ["--json", str(file)]
    monkeypatch.setattr(bench, "_measure_row", cut)
    code, _, _ = jmx(*flags, "--tokens", "1,2")
    assert (code, roofline.Report.load(str(file))) == (130, before)
    monkeypatch.setattr(bench, "_measure_row", measured)
    code, out, _ = jmx("bench", "--from", str(part), "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["tokens"]) == (0, 1)
    code, _, _ = jmx(*flags, "--tokens", "1")
    assert (code, part.exists()) == (0, False)
    assert len(json.loads(file.read_text())["rows"]) == 1


@pytest.mark.parametrize(
    ("flags", "mine", "part"),
    [
        (["--json", "it"], "it", "it must be a saved report of the benchmark, to be replaced, but "),
        (["--json", "it"], "it.part", "it.part must be a saved report of the benchmark, to be replaced, but "),
        (["--png", "it"], "it", "it must be a picture that `jmx bench` drew, to be replaced, but it is another file"),
        (["--json", "new", "--png", "new"], "it", "`json` (='new') must not be, hold or lie in `png` (='new')"),
        (["--json", "new", "--png", "new.part"], "it", "must not be, hold or lie in `png`"),
        (["--json", "it/new"], "it", "it/new cannot be written: its directory does not exist"),
    ],
)
def test_bench_refuses_what_it_would_not_replace_before_it_measures(flags, mine, part, jmx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "run", lambda *arguments, **options: pytest.fail("measured"))
    pathlib.Path(mine).write_text("mine")
    code, out, err = jmx("bench", *flags)
    assert (code, out) == (2, "")
    assert_one_line_error(err, part)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {mine: "mine"}


@pytest.mark.parametrize("command", ["doctor", "explain"])
def test_a_compilation_cache_at_a_file_is_one_line(command, jmx, tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, out, err = jmx(command, "--compilation-cache", str(tmp_path / "mine"))
    assert (code, out) == (2, "")
    assert_one_line_error(err, "mine")
    assert (tmp_path / "mine").read_text() == "mine"


def test_bench_exits_with_1_where_a_row_is_wrong_or_none_is_measured(jmx, tmp_path):
    machine, settings = {"device": "a device"}, {"model": "tiny", "routing": "uniform"}
    right = roofline.Row("xla", 1, "packed", 1, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-3, 0)
    wrong = dataclasses.replace(right, error="wrong result")
    for rows, expected in [((right,), 0), ((right, wrong), 1), ((roofline.Row("xla", 1, error="no memory"),), 1)]:
        roofline.Report(machine, roofline.Limits(1.0, 1.0), settings, rows).save(str(tmp_path / "r.json"))
        assert jmx("bench", "--from", str(tmp_path / "r.json"))[0] == expected


@pytest.mark.parametrize(
    ("error", "code", "reported"),
    [
        (KeyboardInterrupt(), 130, "jmx: interrupted\n"),
        (RuntimeError("out of\nmemory"), 1, "jmx: error: out of memory\n"),
        (ModuleNotFoundError("no matplotlib"), 1, "jmx: error: no matplotlib\n"),
        (OSError(28, "No space left on device"), 1, "jmx: error: [Errno 28] No space left on device\n"),
        (PermissionError(13, "Permission denied", "x"), 2, "jmx: error: [Errno 13] Permission denied: 'x'\n"),
    ],
)
def test_what_goes_wrong_in_a_command_is_one_line_and_a_code(error, code, reported, jmx, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    assert jmx("doctor") == (code, "", reported)


@pytest.mark.parametrize("flag_first", [True, False])
def test_the_compilation_cache_is_where_it_was_asked_for(flag_first, jmx, tmp_path):
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    flag = ["--compilation-cache", str(tmp_path / "a" / "cache")]
    argv = [*flag, "doctor", "--json"] if flag_first else ["doctor", "--json", *flag]
    try:
        code, out, _ = jmx(*argv)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert code == 0
    assert json.loads(out)["compilation_cache"] == flag[1]
    assert (tmp_path / "a" / "cache").is_dir()


def test_the_benchmark_script_runs_from_anywhere(tmp_path):
    report = roofline.Report({"device": "a device"}, roofline.Limits(1.0, 1.0), {"model": "m", "routing": "r"}, ())
    report.save(str(tmp_path / "r.json"))
    command = [sys.executable, str(ROOT / "benchmarks" / "layer.py"), "--from", "r.json", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")  # a report without a row answers nothing
    assert json.loads(done.stdout) == json.loads((tmp_path / "r.json").read_text())
