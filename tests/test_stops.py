"""Stop strings: what is shown, and when, however the text is divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmx.models.text.stops import StopStrings


@pytest.mark.parametrize(
    ("strings", "pieces", "shown", "found"),
    [
        ((), ["a", "b"], ["a", "b", ""], None),
        (("END",), ["a E", "N", "Dx", "y"], ["a ", "", "", "", ""], "END"),
        (("END",), ["a E", "N", "x"], ["a ", "", "ENx", ""], None),
        (("END",), ["a EN"], ["a ", "EN"], None),
        (("aab",), ["a", "a", "a", "b"], ["", "", "a", "", ""], "aab"),
        (("\n\n", "User:"), ["Hi\nU", "ser", ": x"], ["Hi\n", "", "", ""], "User:"),
        (("abcd", "c"), ["abcd"], ["ab", ""], "c"),  # complete first
        (("c", "bc"), ["abc"], ["a", ""], "bc"),  # both complete there: the longest
        (("🙂",), ["a🙂b"], ["a", ""], "🙂"),
    ],
)
def test_text_is_shown_up_to_the_first_stop_string(
    strings: tuple[str, ...], pieces: list[str], shown: list[str], found: str | None
) -> None:
    stops = StopStrings(strings)
    assert [*map(stops.step, pieces), stops.flush()] == shown
    assert stops.found == found


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=4), max_size=8))
def test_pieces_do_not_matter(strings: list[str], pieces: list[str]) -> None:
    """What is shown is the text before the stop string that ends first, and no stop string is in it."""
    text = "".join(pieces)
    stops = StopStrings(strings)
    shown = "".join([*map(stops.step, pieces), stops.flush()])
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(string) for string in strings)]
    if not ends:
        assert (shown, stops.found) == (text, None)
        return
    longest = max((string for string in strings if text[: ends[0]].endswith(string)), key=len)
    assert (shown, stops.found) == (text[: ends[0] - len(longest)], longest)


@given(st.text("ab", min_size=1, max_size=4), st.lists(st.text("abc", max_size=4), max_size=8))
def test_nothing_is_held_back_that_begins_no_stop_string(string: str, pieces: list[str]) -> None:
    stops = StopStrings([string])
    shown, text = "", ""
    for piece in pieces:
        text += piece
        shown += stops.step(piece)
        if stops.found is None:
            assert text.startswith(shown)
            held = text[len(shown) :]
            assert string.startswith(held)
            assert held != string


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`strings\[1\]` \(=''\) must have at least one character"):
        StopStrings(["a", ""])
