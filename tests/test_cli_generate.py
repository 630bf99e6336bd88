"""`jmx generate`: tokens of reference models, and what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import relative_error
from safetensors.numpy import load_file

from jmx import cli
from jmx.ffi.cpu import library as ffi
from jmx.models import load

pytestmark = pytest.mark.costly

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "gpt_oss_tiny"
QWEN3 = Path(__file__).parent / "data" / "qwen3_moe"
GOLDEN = load_file(ROOT / "tests/data/gpt_oss_tiny_golden.safetensors")
IDS = [",".join(map(str, row)) for row in GOLDEN["input_ids"].tolist()]


def generate(*arguments: str | Path) -> int:
    return cli.main(["generate", *map(str, arguments)])


def test_the_command_gives_the_references_tokens_and_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logits"
    arguments = ["--prompt-ids", IDS[0], "--dtype", "float32", "--logits", file]
    assert generate(TINY, *arguments, "--max-new-tokens", "32", "--ignore-eos", "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    numbers = {"prefill_ms", "decode_tokens_per_s", "weight_bytes_a_token", "peak_device_bytes"}
    assert result.keys() == {"prompt_ids", "ids", "backend"} | numbers
    assert result["prompt_ids"] == GOLDEN["input_ids"][0].tolist()
    assert result["ids"] == GOLDEN["greedy"][0].tolist()
    assert result["backend"] == ("cpu" if jax.default_backend() == "cpu" and ffi.library().fault is None else "xla")
    assert result["prefill_ms"] > 0
    assert result["decode_tokens_per_s"] > 0
    weights = nnx.state(load(TINY, dtype=jnp.float32))
    assert 0 < result["weight_bytes_a_token"] < sum(array.nbytes for array in jax.tree.leaves(weights))
    assert "chosen" in err  # the explain table
    assert relative_error(np.load(file), GOLDEN["logits"][0]) <= 1e-4


def test_the_command_stops_at_an_eos_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(TINY, "--prompt-ids", IDS[0], "--dtype", "float32") == 0  # the reference's first token is an EOS id
    out, err = capsys.readouterr()
    assert "48 ids given, new ones: 319 \n" in out
    assert "decode: 1 tokens, - a second" in out
    assert not err


def test_the_command_runs_from_anywhere(tmp_path: Path) -> None:
    arguments = [
        TINY,
        "Licensed under the Apache License",
        "--max-new-tokens",
        "6",
        "--logits",
        "prompt.npy",
        "--temperature",
        "0.8",
        "--top-p",
        "0.9",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "jmx.cli", "generate", *arguments, "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # where jmx is not installed
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["ids"]) == 6
    logits = np.load(tmp_path / "prompt.npy")
    assert logits.dtype == np.float32
    assert logits.shape == (len(result["prompt_ids"]), 320)
    assert "Licensed under the Apache License" in done.stderr


def without_tokenizer(folder: Path) -> list[str]:
    for name in ("config.json", "model.safetensors.index.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return [str(folder)]


def with_broken_tokenizer(folder: Path) -> list[str]:
    (folder / "tokenizer.json").write_text('{"model": 3}')
    return without_tokenizer(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda folder: [str(folder / "none"), "a"], "none"),
        (
            lambda folder: [*with_broken_tokenizer(folder), "a"],
            "tokenizer.json: must be a file of the tokenizers package",
        ),
        (
            lambda folder: [str(TINY), "a", "--seed", "99999999999999999999"],
            "`seed` (=99999999999999999999) must be in",
        ),
        (lambda folder: [*without_tokenizer(folder), "a"], "tokenizer.json is missing"),
        (lambda folder: [*without_tokenizer(folder), "--prompt-ids", "1"], "model-00001-of-00002.safetensors"),
        (lambda folder: [str(TINY), "--prompt-ids", "1,400"], "has the id 400, which must be in 0..319"),
        (lambda folder: [str(TINY), ""], "at least one token"),
        (lambda folder: [str(TINY), "a", "--max-new-tokens", "0"], "`--max-new-tokens` (=0) must be at least 1"),
        (lambda folder: [str(TINY), "a", "--temperature", "-1"], "`temperature` (=-1.0)"),
        (lambda folder: [str(TINY), "a", "--top-p", "0"], "`top_p` (=0.0)"),
        (lambda folder: ["--random", "gpt-oss-20b", str(TINY)], "give either MODEL or --random"),
        (lambda folder: [], "give either MODEL or --random"),
        (lambda folder: [str(TINY)], "give PROMPT, or --prompt-ids"),
        (lambda folder: [str(TINY), "a", "--prompt-ids", "1"], "give either PROMPT or --prompt-ids"),
        (lambda folder: ["--random", "gpt-oss-7b"], "`--random` (='gpt-oss-7b') must be one of"),
        (lambda folder: [str(TINY), "a", "--backend", "none"], "`--backend` (='none') must be one of"),
        (lambda folder: [str(TINY), "a", "--format", "fp3"], "`--format` (='fp3') must be one of"),
        (lambda folder: [str(QWEN3 / "bf16"), "a"], "tokenizer.json is missing"),
        (lambda folder: [str(QWEN3 / "w4a16"), "--format", "nvfp4", "--prompt-ids", "1"], "quantized already"),
        (lambda folder: [str(QWEN3 / "none"), "--prompt-ids", "1"], "config.json: the file is missing"),
        (lambda folder: [str(TINY), "a", "--logits", str(folder / "none" / "x.npy")], "--logits"),
        (lambda folder: [str(TINY), "a", "--logits", str(folder)], "must not exist yet: nothing is overwritten"),
    ],
)
def test_the_command_tells_in_one_line_what_cannot_be(
    arguments: Callable[[Path], list[str]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(*arguments(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("jmx: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not out


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile loading"), MemoryError()]
)
def test_the_command_tells_in_one_line_what_the_machine_cannot_do(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("jmx.cli.generation.make_model", fail)
    assert generate(TINY, "a") == 1
    _, err = capsys.readouterr()
    assert err.startswith("jmx: error: " + (str(error).split("\n")[0] or "MemoryError"))
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--prompt-ids", "1,x"], ["--dtype", "float16"]])
def test_the_command_refuses_flags_that_do_not_parse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        generate(TINY, *arguments)
    assert stopped.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_tokens_of_qwen3_are_the_references(capsys: pytest.CaptureFixture[str]) -> None:
    golden = load_file(QWEN3 / "other.safetensors")
    ids = ",".join(map(str, golden["input_ids"][0]))
    arguments = [QWEN3 / "other", "--prompt-ids", ids, "--dtype", "float32", "--ignore-eos"]
    assert generate(*arguments, "--max-new-tokens", "5", "--json") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["ids"] == golden["greedy"][0, :5].tolist()
    assert result["backend"] == "ragged_dot"
    assert "experts are not quantized" in err


def test_the_command_rounds_experts_to_a_format(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        QWEN3 / "other",
        "--format",
        "nvfp4",
        "--prompt-ids",
        "1,2",
        "--dtype",
        "float32",
    ]
    assert generate(*arguments, "--max-new-tokens", "1", "--json", "--backend", "xla") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["backend"] == "xla"
    assert "nvfp4" in err
