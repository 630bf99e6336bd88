"""`Continuation`: where a row of a batch ends, by every rule, with and without a tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from tokenizers import Tokenizer, decoders, models, processors

from jmx.cli import prompts
from jmx.models.text.beginning import beginning_of_texts
from jmx.models.text.continuation import Continuation
from jmx.models.text.stream import read_tokenizer

TOKENIZER = read_tokenizer(Path(__file__).parents[1] / "tests" / "data" / "gpt_oss_tiny")
TEXT = "Licensed under 漢字 the 🙂 License"
IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids


def run(ids: list[int], tokenizer: Any = TOKENIZER, most: int = 1000, **ends: Any) -> tuple[Continuation, str]:
    """A row that is given all ids, as a batch does that goes on, and what its steps returned."""
    row = Continuation(tokenizer, most, **ends)
    return row, "".join(row.step(id) for id in ids)


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None])
@pytest.mark.parametrize(
    ("ends", "reason", "count"),
    [
        ({"eos_ids": (319,)}, "eos", 4),
        ({"stop_ids": [319, 319]}, "stop_id", 4),
        ({"eos_ids": (319,), "stop_ids": [319]}, "eos", 4),
        ({"eos_ids": (319,), "most": 4}, "eos", 4),
        ({"eos_ids": (319,), "most": 3}, "length", 3),
        ({"most": 1}, "length", 1),
        ({}, None, 6),
    ],
)
def test_a_row_ends_at_the_first_reason(tokenizer: Any, ends: dict[str, Any], reason: str | None, count: int) -> None:
    ids = [*IDS[:3], 319, *IDS[3:5]]
    row, shown = run(ids, tokenizer, **ends)
    assert (row.finish_reason, row.ids) == (reason, ids[:count])
    assert row.text == shown
    shorter = count if reason in ("length", None) else count - 1  # an id that ends the row has no text
    assert shown == ("" if tokenizer is None else TOKENIZER.decode(ids[:shorter], skip_special_tokens=False))


@pytest.mark.parametrize("stop", ["under", "der 漢", "🙂", "e", "L", "License", "none", "License and more"])
def test_a_row_ends_before_a_stop_string(stop: str) -> None:
    row, shown = run(IDS, stops=[stop, stop], most=len(IDS))
    assert row.text == shown == TEXT.partition(stop)[0]
    assert row.finish_reason == ("stop_string" if stop in TEXT else "length")
    assert TEXT.partition(stop)[0] in TOKENIZER.decode(row.ids)


@given(st.lists(st.integers(0, 316), max_size=12), st.lists(st.text("aeu \ufffd", min_size=1, max_size=3), max_size=2))
@examples(50)
def test_the_text_is_that_of_all_ids_up_to_the_first_stop_string(ids: list[int], stops: list[str]) -> None:
    row, shown = run(ids, stops=stops, most=max(1, len(ids)))
    whole = TOKENIZER.decode(ids, skip_special_tokens=False)
    ends = [whole.index(stop) + len(stop) for stop in stops if stop in whole]
    assert (row.finish_reason == "stop_string") == bool(ends)
    assert whole.startswith(shown)
    assert row.text == shown
    if ends:
        assert any(whole.startswith(shown + stop) for stop in stops)
    else:
        assert shown == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TOKENIZER, 0, ()), r"`max_new_tokens` \(=0\) must be at least 1"),
        ((TOKENIZER, 1, [""]), r"`strings\[0\]` \(=''\) must have"),
        ((None, 1, ["a"]), r"`stops` \(=\['a'\]\) need a tokenizer"),
        ((TOKENIZER, "1", ()), r"`max_new_tokens` \(='1', a str\)"),
        ((TOKENIZER, 1, "ab"), r"`strings` \(='ab'\) must be a list of strings"),
        ((TOKENIZER, 1, [3]), r"`strings\[0\]` \(=3, an int\) must be a string"),
    ],
)
def test_what_cannot_be_is_an_error(arguments: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Continuation(*arguments[:2], stops=arguments[2])


def words(tmp_path: Path) -> Any:
    """A tokenizer as Llama's and Mixtral's, which leaves out the space before the first word of a text."""
    vocabulary = ["<unk>", "<s>", "▁Hello", "▁world"]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(vocabulary)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("before", "text"), [((), "world Hello"), ((2,), " world Hello"), ((1, 2) * 9, " world Hello")]
)
def test_a_text_that_continues_a_prompt_keeps_its_space(before: tuple[int, ...], text: str, tmp_path: Path) -> None:
    row = Continuation(words(tmp_path), 10, before=before)
    assert "".join([row.step(3), row.step(2)]) == row.text == text


def test_texts_are_encoded_whole_whatever_length_a_file_has(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    assert tokenizer.encode("<s>" * 7, add_special_tokens=False).ids == [1] * 7
    assert tokenizer.encode("<s>", add_special_tokens=False).ids == [1]


@pytest.mark.parametrize(
    ("processor", "settings", "ids"),
    [
        (True, None, [1]),
        (False, {"add_bos_token": True, "bos_token": {"content": "<s>"}}, [1]),
        (False, {"add_bos_token": True, "bos_token": "<s>"}, [1]),
        (False, {"add_bos_token": False, "bos_token": "<s>"}, []),
        (False, {"add_bos_token": True, "bos_token": None}, []),
        (False, {"add_bos_token": True, "bos_token": "<none>"}, []),
        (False, None, []),
    ],
)
def test_the_beginning_of_texts(
    processor: bool,
    settings: dict[str, Any] | None,
    ids: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = words(tmp_path)
    if processor:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert beginning_of_texts(tmp_path, tokenizer) == ids
    prompts.warn_of_beginning([prompts.Prompt([1, 2], "<s> Hello"), prompts.Prompt([2], " Hello")], ids, tokenizer)
    said = capsys.readouterr().err
    assert ("begin with '<s>', and prompt 2 does not" in said) == bool(ids)
    assert bool(said) == bool(ids)
