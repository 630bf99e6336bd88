"""Answers of chat models, taken apart: content, reasoning and calls, wherever tokens begin and end in them."""

from typing import Any

import pytest
from text_checkpoints import make_tokenizer

from jmx.serving.api.answer import HarmonyParser, Parser, Piece, PlainParser, TagParser, parser_of

SPECIAL = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")


def read(parser: Parser, tokenizer: Any, text: str) -> list[tuple[str, str]]:
    """The pieces of an answer, those of the same kind joined, but for calls."""
    pieces = [piece for id in tokenizer.encode(text).ids for piece in parser.step(id)] + parser.flush()
    joined: list[Piece] = []
    for piece in pieces:
        assert piece.text
        if joined and joined[-1].kind == piece.kind != "call":
            piece = Piece(piece.kind, joined.pop().text + piece.text)
        joined.append(piece)
    return [(piece.kind, piece.text) for piece in joined]


THOUGHT = "<|channel|>analysis<|message|>Let me é see.<|end|>"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (
            THOUGHT + "<|start|>assistant<|channel|>final<|message|>It is 🙂.",
            [("reasoning", "Let me é see."), ("content", "It is 🙂.")],
        ),
        (
            THOUGHT + "<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{'a': 1}",
            [("reasoning", "Let me é see."), ("call", "get"), ("arguments", "{'a': 1}")],
        ),
        (
            " to=functions.get<|channel|>commentary json<|message|>{}<|call|>",
            [("call", "get"), ("arguments", "{}")],
        ),
        (
            "<|channel|>commentary to=functions.a<|message|>1<|call|><|start|>assistant to=functions.b<|channel|>"
            "commentary<|message|>2<|call|><|start|>assistant<|channel|>final<|message|>c",
            [("call", "a"), ("arguments", "1"), ("call", "b"), ("arguments", "2"), ("content", "c")],
        ),
        ("<|channel|>commentary<|message|>I call.<|end|>", [("content", "I call.")]),
        ("<|channel|>fin", []),
        ("", []),
    ],
)
def test_harmony(text: str, pieces: list[tuple[str, str]]) -> None:
    tokenizer = make_tokenizer(SPECIAL)
    assert read(HarmonyParser(tokenizer), tokenizer, text) == pieces


CALL = '<tool_call>\n{"name": "get", "arguments": {"é": [1]}}\n</tool_call>'
CALLED = [("call", "get"), ("arguments", '{"é": [1]}')]


@pytest.mark.parametrize("special", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<think>\nHm.\n</think>\n\nYes, 1 < 2.", [("reasoning", "Hm.\n"), ("content", "Yes, 1 < 2.")]),
        (f"Now.\n{CALL}", [("content", "Now.\n"), *CALLED]),
        (f"{CALL}\n{CALL}", [*CALLED, *CALLED]),
        ("<think>never ends", [("reasoning", "never ends")]),
        ("<tool_call>never ends", [("content", "<tool_call>never ends")]),
        ("<tool_call>[1]</tool_call>.", [("content", "<tool_call>[1]</tool_call>.")]),
        (
            '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
            [("content", '<tool_call>{"name": 3, "arguments": {}}</tool_call>')],
        ),
        ("a </think> b <tool", [("content", "a </think> b <tool")]),
        ("", []),
    ],
)
def test_tags(text: str, pieces: list[tuple[str, str]], special: tuple[str, ...]) -> None:
    """Whether tags are tokens or texts of several."""
    tokenizer = make_tokenizer(special)
    assert read(TagParser(tokenizer), tokenizer, text) == pieces


def test_thoughts_that_the_prompt_began() -> None:
    tokenizer = make_tokenizer(("<think>",))
    assert read(parser_of(tokenizer, "a<think>\n"), tokenizer, "b</think>c") == [("reasoning", "b"), ("content", "c")]
    assert read(parser_of(tokenizer, "a"), tokenizer, "b</think>c") == [("content", "b</think>c")]


def test_the_tokenizer_decides_about_the_parser() -> None:
    found = [type(parser_of(make_tokenizer(special), "")) for special in (SPECIAL, ("<tool_call>",), ("<s>",))]
    assert found == [HarmonyParser, TagParser, PlainParser]
    tokenizer = make_tokenizer(())
    assert read(PlainParser(tokenizer), tokenizer, "é<think>") == [("content", "é<think>")]
