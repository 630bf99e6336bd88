"""`jmx generate` and `jmx chat` on a complete small checkpoint of every family: tokenizer, chat template, EOS ids."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from child_environment import importing
from text_checkpoints import CHECKPOINTS, write
from tokenizers import Tokenizer

from jmx import cli
from jmx.cli import conversation, generation
from jmx.models import FAMILIES, Runner, family_of, load
from jmx.models.text.chat_template import ChatTemplate

pytestmark = pytest.mark.costly

ROOT = Path(__file__).parents[1]
GOLDEN = json.loads((ROOT / "tests/data/chat_templates/prompts.json").read_text(encoding="utf-8"))
NEW = 10


class Case(NamedTuple):
    """A checkpoint, and what runs it: every command of a test shares it."""

    name: str
    folder: Path
    runner: Runner
    tokenizer: Tokenizer


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = write(tmp_path_factory.mktemp("models") / request.param, request.param)
    runner = Runner(load(folder, dtype=jnp.float32))
    return Case(request.param, folder, runner, Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.fixture
def run(case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command with the shared runner; returns its stdout."""
    for module in generation, conversation:
        monkeypatch.setattr(module, "make_model", lambda *_: case.runner.model)
        monkeypatch.setattr(module, "Runner", lambda *_, **__: case.runner)

    def run(command: str, *arguments: str, given: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(given))
        assert cli.main([command, str(case.folder), *arguments, "--max-new-tokens", str(NEW)]) == 0
        return capsys.readouterr().out

    return run


def rows(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_every_family_has_a_checkpoint() -> None:
    found = {family_of(checkpoint.folder).name for checkpoint in CHECKPOINTS.values()}
    assert found == {*FAMILIES}


def test_a_message_is_answered_as_the_whole_model_continues_the_prompt_of_transformers(
    case: Case, run: Callable[..., str]
) -> None:
    prompt = GOLDEN["prompts"][CHECKPOINTS[case.name].template]["one"]
    prompt = prompt.replace(GOLDEN["now"][:10], datetime.now().date().isoformat())
    (row,) = rows(run("generate", "Hello", "--chat", "--json", "--ignore-eos"))
    assert row["prompt_ids"] == case.tokenizer.encode(prompt, add_special_tokens=False).ids
    assert row["text"] == case.tokenizer.decode(row["ids"])
    model, ids = case.runner.model, jnp.array([row["prompt_ids"] + row["ids"]])
    x, _ = model(ids, None, model.empty_cache(*ids.shape).layers)  # all tokens at once, without a cache
    likeliest = np.asarray(model.logits(x))[0, -NEW - 1 : -1].argmax(axis=-1)
    assert row["ids"] == likeliest.tolist()


def test_a_batch_has_the_answers_of_its_prompts(case: Case, run: Callable[..., str]) -> None:
    prompts = ["Hello", "A lake"]
    together = rows(run("generate", *prompts, "--json"))
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = rows(run("generate", prompt, "--json"))
        assert [row[key] for key in ("prompt_ids", "ids", "text")] == [
            alone[key] for key in ("prompt_ids", "ids", "text")
        ]


def test_every_eos_id_ends_an_answer(case: Case, run: Callable[..., str]) -> None:
    (row,) = rows(run("generate", "Hello", "--json", "--ignore-eos"))
    end, first, second = case.tokenizer.token_to_id("</s>"), row["ids"][2], row["ids"][5]
    file = case.folder / "generation_config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps({"eos_token_id": [second, end, first]}))
        (ended,) = rows(run("generate", "Hello", "--json"))
    finally:
        file.write_text(before)
    at = min(row["ids"].index(id) for id in (first, second, end) if id in row["ids"])
    assert (ended["ids"], ended["finish_reason"]) == (row["ids"][: at + 1], "eos")


def test_a_chat_goes_on_as_its_template_writes_the_turns(case: Case, run: Callable[..., str]) -> None:
    out = run("chat", given="Hello\nAnd?\n")
    if case.name == "gpt_oss":  # random weights name no channel, and text without one is not the answer
        assert out == "\n\n"
        return
    template, messages, expected = ChatTemplate.read(case.folder), [], ""
    for message in ("Hello", "And?"):
        messages.append({"role": "user", "content": message})
        (row,) = rows(run("generate", template.render(messages), "--json"))
        messages.append({"role": "assistant", "content": row["text"]})
        expected += row["text"] + "\n"
    assert out == expected


def test_a_chat_runs_as_a_program(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "qwen2_moe")
    done = subprocess.run(
        [sys.executable, "-m", "jmx.cli", "chat", folder, "--max-new-tokens", "3", "--no-compilation-cache"],
        cwd=tmp_path,
        env=importing(ROOT, JAX_PLATFORMS="cpu"),
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
