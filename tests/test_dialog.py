"""Dialogs with a tiny model: answers with a kept cache are those without one; `jmx chat` around them."""

import io
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jmx import cli
from jmx.cli import conversation
from jmx.models import Runner, Sampler, load
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.dialog import Dialog, Piece
from jmx.models.text.stream import read_tokenizer

pytestmark = pytest.mark.costly

TINY = Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny"
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
NEW = 12


def put_template(folder: Path) -> Path:
    """The tiny checkpoint with a chat template."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Any, ChatTemplate]:
    folder = put_template(tmp_path_factory.mktemp("tiny"))
    return Runner(load(folder, dtype=jnp.float32)), read_tokenizer(folder), ChatTemplate.read(folder)


def dialog(parts: tuple[Runner, Any, ChatTemplate], **arguments: Any) -> Dialog:
    return Dialog(*parts, **{"sampler": Sampler(0.9, seed=3), "max_new_tokens": NEW} | arguments)


def joined(answer: Iterator[Piece]) -> str:
    return "".join(piece.text for piece in answer)


def test_answers_with_a_kept_cache_are_those_without(parts: tuple[Runner, Any, ChatTemplate]) -> None:
    kept, in_cache = dialog(parts, system="Be brief."), 0
    for message in ("Hello", "and more", "Licensed <b>", "漢字 🙂"):
        fresh = dialog(parts)
        fresh.messages = [*kept.messages]
        assert joined(kept.answer(message)) == joined(fresh.answer(message))
        assert kept.messages == fresh.messages
        assert fresh.reused == 0
        assert kept.reused >= in_cache
        prompt = parts[2].render(kept.messages[:-1])
        in_cache = len(parts[1].encode(prompt).ids) - 1  # the last token may become one with the answer
    assert [message["role"] for message in kept.messages] == ["system", *["user", "assistant"] * 4]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_answer_that_is_given_up_stays_in_part(count: int, parts: tuple[Runner, Any, ChatTemplate]) -> None:
    talk = dialog(parts)
    answer = talk.answer("Hello")
    given = [next(answer).text for _ in range(count)]
    answer.close()
    if count == 0:  # it never began
        assert talk.messages == []
        return
    assert talk.messages[-1] == {"role": "assistant", "content": "".join(given)}
    fresh = dialog(parts)
    fresh.messages = [*talk.messages]
    assert joined(talk.answer("More")) == joined(fresh.answer("More"))
    assert talk.reused > 0


def test_an_answer_ends_before_a_stop_string(parts: tuple[Runner, Any, ChatTemplate]) -> None:
    whole = joined(dialog(parts).answer("Hello"))
    stop = whole[2:4]
    talk = dialog(parts, stops=[stop])
    assert joined(talk.answer("Hello")) == whole[: whole.index(stop)] == talk.messages[-1]["content"]


def test_a_rejected_message_leaves_the_dialog_as_it_was(parts: tuple[Runner, Any, ChatTemplate]) -> None:
    talk = dialog(parts)
    list(talk.answer("Hello"))
    before = [*talk.messages]
    with pytest.raises(ValueError, match="cannot be applied: no"):
        list(talk.answer("bad"))
    assert talk.messages == before
    list(talk.answer("Hello"))
    assert talk.reused > 0


def test_a_dialog_ends_with_the_context_and_begins_again(parts: tuple[Runner, Any, ChatTemplate]) -> None:
    length = len(parts[1].encode("user: Hello\nassistant:", add_special_tokens=False).ids)
    talk = dialog(parts, context_length=length + 3)
    assert joined(talk.answer("Hello")) == joined(dialog(parts, max_new_tokens=3).answer("Hello"))
    assert talk.finish_reason == "context"
    before = [*talk.messages]
    with pytest.raises(ValueError, match=rf"and the model's context of {length + 3} leaves none for an answer"):
        list(talk.answer("More"))
    with pytest.raises(ValueError, match="the message must be text"):
        list(talk.answer("\udcff"))
    assert talk.messages == before
    talk.clear()
    assert talk.messages == []
    list(talk.answer("Hello"))
    assert talk.messages == before


def test_only_the_final_channel_is_kept_and_the_other_shown_apart(
    parts: tuple[Runner, Any, ChatTemplate], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [Piece("Hm", "analysis"), Piece("", "analysis"), Piece("Y"), Piece("es")]

    def texts(*_: object) -> Iterator[Piece]:
        yield from pieces

    monkeypatch.setattr(Dialog, "_texts", texts)
    talk = dialog(parts)
    conversation._answer(talk, "Hello")
    assert capsys.readouterr() == ("Yes\n", "Hm\n")
    assert talk.messages[-1] == {"role": "assistant", "content": "Yes"}


# The command


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str | Path) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return cli.main(["chat", *map(str, arguments)])


def test_each_line_is_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk: list[Dialog] = []
    start = conversation._start
    monkeypatch.setattr(conversation, "_start", lambda arguments: talk.append(start(arguments)) or talk[0])
    arguments = [put_template(tmp_path), "--max-new-tokens", "4", "--system", "s", "--dtype", "float32"]
    assert chat(monkeypatch, "Old\n/clear\n/help\nHello\n\nbad\nMore\n/exit\nNot read\n", *arguments) == 0
    out, err = capsys.readouterr()
    roles = [(message["role"], message["content"]) for message in talk[0].messages]
    assert [role for role, _ in roles] == ["system", "user", "assistant", "user", "assistant"]
    assert out.endswith(f"\n{roles[2][1]}\n{roles[4][1]}\n")
    assert "/clear  forgets the conversation" in err
    (error,) = [line for line in err.splitlines() if "error" in line]
    assert error.endswith("cannot be applied: no")
    assert err.count("the answer was ended by --max-new-tokens") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TINY], "has no chat template"),
        ([TINY, "--max-new-tokens", "0"], "`--max-new-tokens` (=0) must be at least 1"),
        ([TINY, "--stop", ""], "`--stop` (='') must have at least one character"),
        ([TINY, "--temperature", "-1"], "`temperature` (=-1.0)"),
        ([TINY, "--format", "fp3"], "`--format` (='fp3') must be one of"),
        ([TINY, "--backend", "none"], "`--backend` (='none') must be one of"),
        (["/none/model"], "is not a directory"),
        (["gpt-oss"], "`model` (='gpt-oss') must be a directory, or owner/name"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "Hello\n", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err


def pressing(times: int) -> Iterator[Piece]:
    """An answer during which Ctrl-C is pressed."""
    yield Piece("a")
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    yield Piece("b")
    yield Piece("c")


def test_the_first_ctrl_c_ends_an_answer_and_the_second_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    talk: Any = SimpleNamespace(answer=lambda message: pressing(int(message)), finish_reason=None)
    conversation._answer(talk, "0")
    conversation._answer(talk, "1")
    with pytest.raises(KeyboardInterrupt):
        conversation._answer(talk, "2")
    assert capsys.readouterr().out == "abc\nab\na"
    assert signal.getsignal(signal.SIGINT) is before


def test_on_a_terminal_ctrl_c_begins_a_line_again_and_ctrl_d_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[str | BaseException] = ["one", KeyboardInterrupt(), "two", EOFError()]

    def read(_: str) -> str:
        event = typed.pop(0)
        if isinstance(event, BaseException):
            raise event
        return event

    monkeypatch.setattr("builtins.input", read)
    assert [*conversation._lines(True)] == ["one", "two"]


def test_generate_applies_the_template_to_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put_template(tmp_path)
    arguments = ["--max-new-tokens", "1", "--json"]
    assert cli.main(["generate", str(folder), "Hello", "--chat", *arguments]) == 0
    ids = json.loads(capsys.readouterr().out)["prompt_ids"]
    assert read_tokenizer(folder).decode(ids) == "user: Hello\nassistant:"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(TINY), "a"], "has no chat template"),
        ([str(TINY), "--prompt-ids", "1"], "`--chat` needs PROMPT"),
        (["--random", "gpt-oss-20b"], "`--chat` needs PROMPT"),
    ],
)
def test_generate_with_a_template_needs_one_and_a_prompt(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "--chat", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err
