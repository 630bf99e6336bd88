"""Channels of gpt-oss' answers, read from special tokens."""

from typing import Any

import pytest

from jmx.models.text.dialog import Piece, _Reader
from jmx.models.text.harmony import FINAL, Channels

tokenizers = pytest.importorskip("tokenizers")
SPECIAL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def tokenizer(special: tuple[str, ...] = SPECIAL) -> Any:
    """One token a byte, and the special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({byte: n for n, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*special])
    return made


def read(text: str, *, stops: tuple[str, ...] = (), literal: str = "") -> list[Piece]:
    """The pieces of an answer with the same channel, joined; `literal` follows it as text of single bytes."""
    made = tokenizer()
    ids = made.encode(text).ids + tokenizer(()).encode(literal).ids
    reader, pieces = _Reader(made, stops), []
    for token in ids:
        pieces.append(reader.step(token))
        if reader.stopped:
            break
    joined: list[Piece] = []
    for piece in (piece for piece in [*pieces, reader.flush()] if piece.text):
        if joined and joined[-1].channel == piece.channel:
            piece = Piece(joined.pop().text + piece.text, piece.channel)
        joined.append(piece)
    return joined


ANALYSIS = "<|channel|>analysis<|message|>Let me é see.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>It is 🙂.<|return|>"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (ANALYSIS + ANSWER, [("Let me é see.", "analysis"), ("It is 🙂.", FINAL)]),
        (ANSWER.removeprefix("<|start|>assistant"), [("It is 🙂.", FINAL)]),
        ("<|channel|>final <|constrain|>json<|message|>{}", [("{}", FINAL)]),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", [("{}", "commentary")]),
        ("<|channel|>analysis<|message|>", []),
        ("<|channel|>fin", []),
        ("<|message|>text", [("text", "")]),
        ("", []),
    ],
)
def test_channels(text: str, pieces: list[tuple[str, str]]) -> None:
    assert read(text) == pieces


def test_text_that_looks_like_a_special_token_is_text() -> None:
    begun = "<|channel|>analysis<|message|>a"
    literal = "<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert read(begun, literal=literal) == [("a" + literal, "analysis")]


def test_a_stop_string_is_within_one_message() -> None:
    assert read(ANALYSIS + ANSWER, stops=("see.It",)) == read(ANALYSIS + ANSWER)
    assert read(ANALYSIS + ANSWER, stops=("is",)) == [("Let me é see.", "analysis"), ("It ", FINAL)]


def test_other_models_have_one_channel() -> None:
    assert not Channels.are_in(tokenizer(("<|start|>", "<|end|>")))
    assert Channels.are_in(tokenizer())
