"""`Continuation`: where a row of a batch ends, by every rule, with and without a tokenizer."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

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
