"""`jmx.training.Text`: tokens, the part that is held out, windows, and texts that are refused."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from jmx.training import Text

LICENSE = Path(__file__).parents[1] / "LICENSE"
SPECIAL = ["<|start|>", "<|end|>"]


@pytest.fixture(scope="module")
def text() -> Text:
    return Text(LICENSE, 400, SPECIAL)


def test_both_parts_are_the_whole_text(text: Text) -> None:
    parts = [text.tokenizer.decode(tokens.tolist()) for tokens in (text.tokens, text.held_out)]
    data = LICENSE.read_bytes()
    assert "".join(parts).encode() == data
    assert parts[0].endswith("\n")
    assert [text.num_bytes, text.held_out_bytes] == [len(part.encode()) for part in parts]
    assert 0 <= len(data) * 19 // 20 - text.num_bytes < 100
    assert text.sha256 == hashlib.sha256(parts[0].encode()).hexdigest()
    assert text.tokenizer.get_vocab_size() == 400
    assert [text.tokenizer.token_to_id(name) for name in SPECIAL] == [398, 399]
    assert text.tokens.dtype == text.held_out.dtype == np.int32


def test_windows_are_parts_of_the_text_and_follow_from_the_step(text: Text) -> None:
    draw, length = text.windows(5, 16), 16
    first, again, second = (np.asarray(draw(step)) for step in (1, 1, 2))
    assert first.shape == (5, length + 1)
    assert (first == again).all()
    assert (first != second).any()
    assert (np.asarray(text.windows(5, length)(2)) == second).all()
    assert (np.asarray(text.windows(5, length, seed=1)(2)) != second).any()
    parts = np.lib.stride_tricks.sliding_window_view(text.tokens, length + 1)
    assert all((parts == row).all(axis=1).any() for row in first)


def test_the_longest_window_is_the_whole_text(text: Text) -> None:
    longest = len(text.tokens) - 1
    assert (np.asarray(text.windows(1, longest)(1))[0] == text.tokens).all()
    with pytest.raises(ValueError, match=rf"`length` \(={longest + 1}\) must be less than the {longest + 1} tokens"):
        text.windows(1, longest + 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a text of several lines"),
        (b"one line", "must be a text of several lines"),
        (b"few words\n" * 9, r"must be a longer text: it gives a vocabulary of \d+ tokens, and `vocab_size` is 400"),
        (b"\xff\n" * 99, "must be a text in UTF-8: "),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"^`path` \(=.*text.txt\) {message}"):
        Text(tmp_path / "text.txt", 400)
