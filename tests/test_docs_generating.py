"""docs/generating.md: its commands run, on the tiny checkpoint in place of the model that they name."""

import io
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jmx import cli
from jmx.checkpoint import gpt_oss, peft
from jmx.cli import conversation, generation
from jmx.lora import LoRA
from jmx.models import Runner, load

pytestmark = pytest.mark.costly

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "gpt_oss_tiny"
MODEL = "openai/gpt-oss-20b"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
COMMANDS = re.findall(r"^    (jmx .*)$", (ROOT / "docs" / "generating.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the commands read, and the model."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(TINY, folder / MODEL)
    (folder / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "prompts.txt").write_text("The sea is\nA river\n")
    (folder / "letter.txt").write_text("Dear reader,\n")
    (folder / "questions.txt").write_text("Why?\nHow?\n")
    reader = gpt_oss.Reader(TINY)
    experts, layers = reader.experts(0), range(reader.config.num_hidden_layers)
    adapters = LoRA(2, 3).random(jax.random.key(0), experts)
    (folder / "path" / "to").mkdir(parents=True)
    peft.save(folder / "path/to/adapter", dict.fromkeys(layers, adapters), dict.fromkeys(layers, experts))
    return folder


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(load(TINY, dtype=jnp.float32))


@pytest.fixture
def run(folder: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs a line of a shell, with < and >, by the shared runner; returns its stdout."""
    monkeypatch.chdir(folder)
    for module in generation, conversation:
        monkeypatch.setattr(module, "make_model", lambda *_: runner.model)
        monkeypatch.setattr(module, "Runner", lambda *_, **__: runner)

    def run(line: str) -> str:
        words = shlex.split(line, comments=True)[1:]
        given = words[words.index("<") + 1] if "<" in words else None
        target = words[words.index(">") + 1] if ">" in words else None
        arguments = words[: min(words.index(sign) for sign in "<>" if sign in words)] if given or target else words
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n" if given is None else (folder / given).read_text()))
        out = io.StringIO()
        monkeypatch.setattr("sys.stdout", out)
        assert cli.main(arguments) == 0
        if target is not None:
            (folder / target).write_text(out.getvalue())
        return out.getvalue()

    return run


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 15
    assert all(MODEL in line for line in COMMANDS)


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: re.sub(r"\W+", "-", line.partition("#")[0])[4:60])
def test_every_command_runs(line: str, run: Callable[[str], str], folder: Path) -> None:
    if "--mesh" in line and jax.device_count() < 8:
        pytest.skip("needs 8 devices")
    out = run(line)
    assert out.endswith("\n")
    if "sea.txt" in line:
        assert (folder / "sea.txt").read_text() == run(line.partition(">")[0]) == out
    if line.count('"') > 2 and "generate" in line and "--" not in line:
        assert re.findall(r"^==> (\d) <==$", out, re.MULTILINE) == ["1", "2", "3"]
