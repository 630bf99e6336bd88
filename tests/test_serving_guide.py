"""Guides: of each token of an answer, which ones a schema allows, in the content only."""

import re
from typing import Any

import numpy as np
import pytest
from text_checkpoints import make_tokenizer

from jmx.serving.engine.guide import Guide, Guides, check_schema

pytest.importorskip("llguidance")
SPECIAL = ("<s>", "</s>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "</think>")
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"], "additionalProperties": False}


def walk(special: tuple[str, ...], text: str, *, in_thoughts: bool = False) -> list[set[int]]:
    """What may follow before each token of a text, and after it; all of its tokens may."""
    tokenizer = make_tokenizer(special)
    size = tokenizer.get_vocab_size() + 40  # a model's vocabulary can be larger
    ends: list[Any] = [tokenizer.token_to_id(name) for name in ("</s>", "<|return|>") if tokenizer.token_to_id(name)]
    guide = Guides(tokenizer, size, ends).start(check_schema(SCHEMA), in_thoughts=in_thoughts)
    found = [allowed(guide, size)]
    for id in tokenizer.encode(text, add_special_tokens=False).ids:
        assert id in found[-1]
        guide.step(id)
        found.append(allowed(guide, size))
    return found


def allowed(guide: Guide, size: int) -> set[int]:
    words = guide.allowed()
    assert len(words) == -(-size // 32)
    return {*np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()}


def test_an_answer_fits_and_then_ends() -> None:
    tokenizer = make_tokenizer(SPECIAL[:2])
    found = walk(SPECIAL[:2], '{"é":-12}')
    assert found[0] == {tokenizer.encode("{", add_special_tokens=False).ids[0]}
    assert found[-1] == {tokenizer.token_to_id("</s>")}


def all_but(special: tuple[str, ...], *names: str) -> set[int]:
    """All ids of a model's vocabulary but those of some tokens."""
    tokenizer = make_tokenizer(special)
    return {*range(tokenizer.get_vocab_size() + 40)} - {tokenizer.token_to_id(name) for name in names}


def test_analysis_is_free_but_does_not_end_the_answer() -> None:
    before = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>"
    count = len(make_tokenizer(SPECIAL).encode(before, add_special_tokens=False).ids)
    found = walk(SPECIAL, before + '{"é":1}<|return|>')
    assert found[:count] == [all_but(SPECIAL, "</s>", "<|return|>")] * count
    assert len(found[count]) == 1


def test_other_channels_fit() -> None:
    """The API takes all messages for content but those in the analysis channel."""
    before = "<|channel|>commentary<|message|>"
    count = len(make_tokenizer(SPECIAL).encode(before, add_special_tokens=False).ids)
    assert len(walk(SPECIAL, before + '{"é":1}<|return|>')[count]) == 1


def test_thoughts_are_free_but_do_not_end_the_answer() -> None:
    special = ("<s>", "</s>", "</think>")
    found = walk(special, 'hm</think>{"é":1}', in_thoughts=True)
    assert found[:3] == [all_but(special, "</s>")] * 3
    assert len(found[3]) == 1


@pytest.mark.parametrize("schema", [{"type": "objct"}, {"type": 3}, {"minimum": "a", "type": "integer"}])
def test_wrong_schemas_are_errors(schema) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": "a" * 70_000}, "(of 70013 characters) must have at most 65536"),
        ({"type": "array", "items": [{"type": "integer", "multipleOf": 10_001}]}, "`multipleOf` (=10001) must be at"),
        ({"type": "number", "multipleOf": float("inf")}, "`multipleOf` (=inf)"),
        ({"type": "integer", "minimum": "é" * 200}, "must be"),  # llguidance panics
    ],
    ids=["long", "multiple", "infinite", "panic"],
)
def test_schemas_that_would_take_long_or_end_the_process_are_errors(schema, message: str, capfd) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_schema(schema)
    capfd.readouterr()
