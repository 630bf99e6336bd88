"""`jmx generate`: tokens of reference models, and what it refuses."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from child_environment import importing
from flax import nnx
from model_steps import relative_error
from safetensors.numpy import load_file

from jmx import cli
from jmx.cli import generation, model_arguments
from jmx.cli.generation_report import Timing
from jmx.ffi.cpu import library as ffi
from jmx.models import Model, Runner, load, memory
from jmx.models.runner import CHUNK

pytestmark = pytest.mark.costly

ROOT = Path(__file__).parents[1]
TINY = ROOT / "tests" / "data" / "gpt_oss_tiny"
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
    assert result.keys() == {"prompt_ids", "ids", "text", "finish_reason", "backend"} | numbers
    assert (result["text"], result["finish_reason"]) == (None, "length")
    assert result["prompt_ids"] == GOLDEN["input_ids"][0].tolist()
    assert result["ids"] == GOLDEN["greedy"][0].tolist()
    assert result["backend"] == ("cpu" if jax.default_backend() == "cpu" and ffi.library().fault is None else "xla")
    assert result["prefill_ms"] > 0
    assert result["decode_tokens_per_s"] > 0
    weights = nnx.state(load(TINY, dtype=jnp.float32))
    assert 0 < result["weight_bytes_a_token"] < sum(array.nbytes for array in jax.tree.leaves(weights))
    assert "chosen" in err  # the explain table
    assert relative_error(np.load(file), GOLDEN["logits"][0]) <= 1e-4


@pytest.mark.parametrize(
    ("further", "chunks"), [(0, 0), (1, 1), (CHUNK - 1, 1), (CHUNK, 1), (CHUNK + 1, 2), (3 * CHUNK, 3)]
)
def test_the_rate_counts_every_step_that_was_computed(further: int, chunks: int) -> None:
    arrivals = [2.0 + 0.25 * (1 + number // CHUNK) for number in range(further)]  # a chunk takes 0.25 s
    step = Timing(1.0, [2.0, *arrivals]).seconds_a_step
    assert step == (pytest.approx(0.25 / CHUNK) if chunks else None)


def test_the_command_stops_at_an_eos_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(TINY, "--prompt-ids", IDS[0], "--dtype", "float32") == 0  # the reference's first token is an EOS id
    out, err = capsys.readouterr()
    assert out == "319 \n"
    assert "48 ids given, new ones: " in err
    assert "ended by: eos" in err
    assert "decode: 1 tokens, - a second" in err


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
        env=importing(ROOT),  # where jmx is not installed
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
    for file in (TINY / "config.json", *TINY.glob("model*")):
        (folder / file.name).write_bytes(file.read_bytes())
    return [str(folder)]


def without_a_shard(folder: Path) -> list[str]:
    arguments = without_tokenizer(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    return arguments


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
        (lambda folder: [*without_a_shard(folder), "a"], "model-00001-of-00002.safetensors: the shard is missing"),
        (lambda folder: [str(folder), "a"], "config.json: the file is missing"),
        (lambda folder: [str(TINY), "--prompt-ids", "1,400"], "has the id 400, which must be in 0..319"),
        (lambda folder: [str(TINY), ""], "prompt 1 (='') must have at least one token"),
        (lambda folder: [str(TINY), "a", "--max-new-tokens", "0"], "`--max-new-tokens` (=0) must be at least 1"),
        (lambda folder: [str(TINY), "a", "--temperature", "-1"], "`temperature` (=-1.0)"),
        (lambda folder: [str(TINY), "a", "--top-p", "0"], "`top_p` (=0.0)"),
        (lambda folder: [str(TINY), "a", "--top-p", "0.9"], "`--top-p` (=0.9) needs a --temperature above 0"),
        (lambda folder: [str(TINY), "a", "--top-k", "4"], "`--top-k` (=4) needs a --temperature above 0"),
        (lambda folder: [str(TINY), "a", "--min-p", "0.1"], "`--min-p` (=0.1) needs a --temperature above 0"),
        (lambda folder: ["--random", "gpt-oss-20b", str(TINY)], "give either MODEL or --random"),
        (lambda folder: [], "give either MODEL or --random"),
        (lambda folder: [str(TINY)], "give one of PROMPT, --prompt-file, --prompts-file and --prompt-ids"),
        (lambda folder: [str(TINY), "a", "--prompt-ids", "1"], "and not PROMPT and --prompt-ids"),
        (
            lambda folder: ["--random", "gpt-oss-20b", "--prompt-file", "a"],
            "`--random` has no tokenizer for --prompt-f",
        ),
        (lambda folder: [str(TINY), "-", "-"], "stdin (-) must be given once"),
        (lambda folder: [str(TINY), "\udcff"], "PROMPT must be UTF-8"),
        (lambda folder: [str(TINY), "--prompt-file", "none"], "`--prompt-file` (='none') cannot be read: No such file"),
        (lambda folder: [str(TINY), "--prompts-file", str(folder)], ") cannot be read: Is a directory"),
        (lambda folder: [str(TINY), "a", "--stop", ""], "`--stop` (='') must have at least one character"),
        (lambda folder: [str(TINY), "--prompt-ids", "1", "--stop", "a"], "with --prompt-ids give --stop-id"),
        (lambda folder: [str(TINY), "a", "--stop-id", "320"], "`--stop-id` (=320) must be in 0..319"),
        (lambda folder: [str(TINY), "a", "--logprobs", "-1"], "`--logprobs` (=-1) must be at least 0"),
        (lambda folder: [str(TINY), "a", "--logprobs", "321"], "`logprobs` (=321)"),
        (lambda folder: [str(TINY), "a", "b", "--logits", str(folder / "x")], "`--logits` is of one prompt, and there"),
        (lambda folder: [str(TINY), "a b " * 4000], "tokens, and the model's context 4096: it must be shorter"),
        (
            lambda folder: [str(TINY), "a", "--max-new-tokens", "4096"],
            "it leaves 4095 new tokens, and --max-new-tokens",
        ),
        (lambda folder: ["--random", "gpt-oss-7b"], "`--random` (='gpt-oss-7b') must be one of"),
        (lambda folder: [str(TINY), "a", "--backend", "none"], "`--backend` (='none') must be one of"),
        (lambda folder: [str(TINY), "a", "--format", "fp3"], "`--format` (='fp3') must be one of"),
        (lambda folder: [str(QWEN3 / "bf16"), "a"], "tokenizer.json is missing"),
        (lambda folder: [str(QWEN3 / "w4a16"), "--format", "nvfp4", "--prompt-ids", "1"], "quantized already"),
        (lambda folder: [str(QWEN3 / "none"), "--prompt-ids", "1"], "none') is not a directory"),
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
    assert result["backend"] == "xla"
    assert "weights are 'float32'" in err


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


# Batches. All runs share a model and a runner, so that each shape is compiled once.

BATCH = [GOLDEN["input_ids"][0].tolist(), [40], GOLDEN["input_ids"][0].tolist()[:20], [43, 307, 67] * 30]


@pytest.fixture(scope="module")
def shared() -> Runner:
    return Runner(load(TINY, dtype=jnp.float32))


@pytest.fixture
def run(shared: Runner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command on the shared model; returns stdout and stderr, or the objects of --json."""
    monkeypatch.setattr(generation, "make_model", lambda *_: shared.model)
    monkeypatch.setattr(generation, "Runner", lambda *_, **__: shared)

    def run(*arguments: str | Path) -> Any:
        assert generate(TINY, *arguments, "--max-new-tokens", "17") == 0
        out, err = capsys.readouterr()
        return [json.loads(line) for line in out.splitlines()] if "--json" in arguments else (out, err)

    return run


def of_ids(rows: list[list[int]]) -> list[str]:
    return [part for ids in rows for part in ("--prompt-ids", ",".join(map(str, ids)))]


def test_rows_of_a_batch_are_those_of_each_prompt_alone(run: Callable[..., Any]) -> None:
    together = run(*of_ids(BATCH), "--json")
    assert [row["prompt_ids"] for row in together] == BATCH
    for ids, row in zip(BATCH, together, strict=True):
        (alone,) = run(*of_ids([ids]), "--json")
        assert {name: alone[name] for name in ("ids", "finish_reason", "text")} == {
            name: row[name] for name in ("ids", "finish_reason", "text")
        }
    assert together[0]["ids"] == [319]  # and none after it
    assert {row["finish_reason"] for row in together} == {"eos", "length"}
    assert all((row["ids"][-1] == 319) == (row["finish_reason"] == "eos") for row in together)
    assert all(319 not in row["ids"][:-1] for row in together)
    onwards = run(*of_ids(BATCH), "--json", "--ignore-eos")
    assert [row["finish_reason"] for row in onwards] == ["length"] * 4
    assert onwards[0]["ids"] == GOLDEN["greedy"][0, :17].tolist()
    for one, other in zip(together, onwards, strict=True):
        assert other["ids"][: len(one["ids"])] == one["ids"]


def test_stdout_is_the_text_alone(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = run("Licensed", "--json")
    out, err = run("Licensed")
    assert out == row["text"] + "\n"
    assert err.startswith("Licensed\n")
    assert "decode: 17 tokens" in err
    (file := tmp_path / "prompts").write_text("Licensed\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("Licensed\n"))
    for others in (["-"], ["--prompt-file", file], ["--prompts-file", file]):
        assert run(*others)[0] == out


def test_rows_of_several_prompts_are_labelled_and_in_order(run: Callable[..., Any]) -> None:
    prompts = ["Licensed", "the", "a", "License"]
    rows = run(*prompts, "--json")
    stop = str(rows[2]["ids"][0])  # the third ends first
    rows = run(*prompts, "--stop-id", stop, "--json")
    assert rows[2]["finish_reason"] == "stop_id"
    assert rows[2]["text"] == ""
    out, err = run(*prompts, "--stop-id", stop)
    assert out == "".join(f"==> {number} <==\n{row['text']}\n" for number, row in enumerate(rows, 1))
    assert f"ended by: {', '.join(row['finish_reason'] for row in rows)}\n" in err


def test_rows_end_at_stop_strings(run: Callable[..., Any]) -> None:
    prompts = ["Licensed", "the", "a", "License"]
    before = run(*prompts, "--json")
    stop = before[0]["text"][3:5]
    after = run(*prompts, "--stop", stop, "--stop", stop, "--stop", "\0 never", "--json")
    assert (after[0]["finish_reason"], after[0]["text"]) == ("stop_string", before[0]["text"].partition(stop)[0])
    assert after[0]["ids"] == before[0]["ids"][: len(after[0]["ids"])]
    for one, other in zip(before[1:], after[1:], strict=True):
        assert other["text"] == one["text"].partition(stop)[0]


def test_log_probabilities_are_those_of_each_token(run: Callable[..., Any]) -> None:
    (plain,) = run("--prompt-ids", IDS[0], "--ignore-eos", "--json")
    assert "logprobs" not in plain
    (row,) = run("--prompt-ids", IDS[0], "--ignore-eos", "--json", "--logprobs", "3")
    assert row["ids"] == plain["ids"]
    expected = jax.nn.log_softmax(GOLDEN["logits"][0, -1])
    first = row["logprobs"][0]
    assert first["logprob"] == pytest.approx(float(expected[319]), rel=1e-3)
    assert [entry["id"] for entry in first["top"]] == np.argsort(-expected)[:3].tolist()
    for id, entry in zip(row["ids"], row["logprobs"], strict=True):
        assert (entry["id"], entry["text"]) == (id, None)
        assert entry["top"][0] == {"id": id, "text": None, "logprob": entry["logprob"]}  # greedy
        assert [its["logprob"] for its in entry["top"]] == sorted(its["logprob"] for its in entry["top"])[::-1]
    rows = run("Licensed", "the", "a", "License", "--logprobs", "--json", "--stop-id", str(plain["ids"][3]))
    assert all([its["id"] for its in row["logprobs"]] == row["ids"] for row in rows)
    assert all(its["top"] == [] for row in rows for its in row["logprobs"])
    assert rows[0]["logprobs"][0]["text"] == rows[0]["text"][:1]
    assert "log probabilities of row 1" in run("--prompt-ids", IDS[0], "--logprobs", "3")[1]


# Memory


@pytest.mark.parametrize(
    ("has", "prompts", "parts"),
    [
        (100_000, ["a"], ["weights 0.62 MB, the cache 0.03 MB", "has 0.10 MB free", "a smaller model, or a --format"]),
        (630_000, ["a"], ["has 0.63 MB free; what helps: a smaller --max-new-tokens or a shorter prompt"]),
        (
            630_000,
            ["a", "b c"],
            ["the cache of 2 rows 0.07 MB", "a smaller --max-new-tokens or fewer or shorter prompts"],
        ),
    ],
)
def test_what_does_not_fit_is_an_error_before_weights_are_read(
    has: int, prompts: list[str], parts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: has)
    monkeypatch.setattr("jmx.models.from_source", lambda *_, **__: pytest.fail("read"))
    assert generate(TINY, *prompts, "--max-new-tokens", "2") == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("jmx: error: the model needs at least 0.6")
    for part in parts:
        assert part in err


def test_memory_that_is_not_known_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Model] = []
    monkeypatch.setattr(memory, "available", lambda device: None)
    monkeypatch.setattr("jmx.models.from_source", lambda source, **_: made.append(source) or source)
    arguments = cli.parser().parse_args(["generate", str(TINY), "a"])
    source = model_arguments.source(arguments, TINY)
    assert model_arguments.make(arguments, source, None, [1]) is source
    assert made == [source]
