"""The prompts of `jmx generate`: from arguments, files and stdin; what is not one."""

import io
from pathlib import Path
from typing import Any

import pytest

from jmx import cli
from jmx.cli import prompts
from jmx.cli.random_model import PUBLISHED
from jmx.models import FAMILIES

LINES = "one\n two \nthree\n"


def parsed(*arguments: str | Path) -> Any:
    return cli.parser().parse_args(["generate", "model", *map(str, arguments)])


def given(text: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts text, or bytes of any kind, on stdin."""
    data = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "-b c", "--seed", "1"],
        ["--seed", "1", "a", "-b c"],
        ["a", "--seed", "1", "-b c"],
        ["--seed", "1", "--", "a", "-b c"],
        ["a", "--logprobs", "--seed", "1", "-b c"],
    ],
)
def test_options_may_come_between_prompts(arguments: list[str]) -> None:
    found = parsed(*arguments)
    assert (found.model, found.prompts, found.seed) == ("model", ["a", "-b c"], 1)


def test_options_that_do_not_exist_are_no_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("a", "--sed", "1")
    assert "--sed" in capsys.readouterr().err


def test_prompts_are_read_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole := tmp_path / "whole.txt").write_bytes("漢字\r\nsecond\n\n".encode())
    (lines := tmp_path / "lines.txt").write_text(LINES)
    (strings := tmp_path / "lines.jsonl").write_text('"a\\nb"\n  "\\u00e9" \n')
    assert prompts.read_texts(parsed("a", "", "b")) == ["a", "", "b"]
    assert prompts.read_texts(parsed("--prompt-file", whole, "--prompt-file", lines)) == [
        "漢字\r\nsecond\n",
        "one\n two \nthree",
    ]
    assert prompts.read_texts(parsed("--prompts-file", lines)) == ["one", " two ", "three"]
    assert prompts.read_texts(parsed("--prompts-file", strings)) == ["a\nb", "é"]
    for arguments, expected in (
        (["a", "-"], ["a", "x\ny é"]),
        (["--prompt-file", "-"], ["x\ny é"]),
        (["--prompts-file", "-"], ["x", "y é"]),
    ):
        given("x\ny é\n", monkeypatch)
        assert prompts.read_texts(parsed(*arguments)) == expected
    monkeypatch.setattr("sys.stdin", None)
    assert prompts.read_texts(parsed("-")) == [""]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"a\xff", "a.txt must be UTF-8"),
        ("a.txt", b"", "must have a line for each prompt, and is empty"),
        ("a.txt", b"\n", "must have a line for each prompt, and is empty"),
        ("a.txt", b"a\n\nb\n", "a.txt, line 2 is empty"),
        ("a.txt", b"a\n \t\n", "a.txt, line 2 is empty"),
        ("a.jsonl", b'"a"\nb\n', "a.jsonl, line 2 must be a string of JSON: "),
        ("a.jsonl", b'{"prompt": "a"}', "line 1 must be a string of JSON, and is of type dict"),
        ("a.jsonl", b"[" * 100_000, "line 1 must be a string of JSON"),
        ("a.jsonl", b"9" * 5000, "line 1 must be a string of JSON"),
        ("a.jsonl", b'"\\ud800"', "line 1 must be UTF-8"),
    ],
)
def test_lines_that_are_no_prompts_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (file := tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="must") as raised:
        prompts.read_texts(parsed("--prompts-file", file))
    assert message in str(raised.value)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ("--prompt-file", "--prompts-file"):
        with pytest.raises(ValueError, match=rf"`{option}` \(='.*none'\) cannot be read: No such file"):
            prompts.read_texts(parsed(option, tmp_path / "none"))
        with pytest.raises(ValueError, match=rf"`{option}` .* cannot be read: Is a directory"):
            prompts.read_texts(parsed(option, tmp_path))
        given(b"\xff", monkeypatch)
        with pytest.raises(ValueError, match="stdin must be UTF-8"):
            prompts.read_texts(parsed(option, "-"))


KINDS = {
    "PROMPT": ["a"],
    "--prompt-file": ["--prompt-file", "f"],
    "--prompts-file": ["--prompts-file", "f"],
    "--prompt-ids": ["--prompt-ids", "1"],
}


@pytest.mark.parametrize("one", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_prompts_are_of_one_kind(one: str, other: str) -> None:
    if one == other:
        prompts.check(parsed(*KINDS[one]))
        return
    with pytest.raises(ValueError, match=r"give one of .*, and not ") as raised:
        prompts.check(parsed(*KINDS[one], *KINDS[other]))
    assert {one, other} <= {*str(raised.value).split("not ")[1].split(" and ")}


def test_ids_are_given_several_times() -> None:
    assert parsed("--prompt-ids", "1,2", "--prompt-ids", "3").prompt_ids == [[1, 2], [3]]


def test_random_models_are_those_that_families_publish() -> None:
    assert [*PUBLISHED] == [name for family in FAMILIES.values() for name in family.published]
