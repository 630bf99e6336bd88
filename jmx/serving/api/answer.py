"""Answers of chat models: which part of what a model generates is content, reasoning, or a call of a function."""

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

from jmx.models.text.harmony import ANALYSIS, Channels
from jmx.models.text.harmony_package import channels_of
from jmx.models.text.stops import overlap
from jmx.models.text.stream import TextStream

_FUNCTIONS = "functions."  # what a recipient begins with in the Harmony format

# Of Qwen3's answers, what begins a part that is not content, and what ends it.
_OPENING: dict[str, "Kind"] = {"<think>": "reasoning", "<tool_call>": "arguments"}
_CLOSING = {"reasoning": "</think>", "arguments": "</tool_call>"}

# "call": a call begins, and the text is the function's name; "arguments": of the last call.
Kind = Literal["content", "reasoning", "call", "arguments"]


class Piece(NamedTuple):
    """Some text of an answer, and what it is."""

    kind: Kind
    text: str


class Parser(Protocol):
    """Takes the tokens of an answer one by one."""

    @property
    def kind(self) -> Kind | None:
        """What the next token is, as far as that is known before it; None: none of these."""
        ...

    def step(self, token: int) -> list[Piece]:
        """The text that a token completes."""
        ...

    def flush(self) -> list[Piece]:
        """The text that was held back, when no token follows."""
        ...


class PlainParser:
    """All is content. `before`: ids that it continues, see `TextStream`."""

    kind: Kind | None = "content"

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()):
        self._stream = TextStream(tokenizer, before)

    def step(self, token: int) -> list[Piece]:
        return _pieces("content", self._stream.step(token))

    def flush(self) -> list[Piece]:
        return _pieces("content", self._stream.flush())


class HarmonyParser:
    """gpt-oss' answers: messages in channels, see `Channels`. Messages to functions are calls."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._channels = tokenizer, channels_of(tokenizer)
        self._stream = TextStream(tokenizer)
        self._called = False  # the message's call has begun

    @property
    def kind(self) -> Kind | None:
        if not self._channels.in_body:
            return None
        if self._channels.recipient.startswith(_FUNCTIONS):
            return "arguments"
        return "reasoning" if self._channels.name == ANALYSIS else "content"

    def step(self, token: int) -> list[Piece]:
        kind = self.kind
        if self._channels.step(token):
            return self._begun(kind) + _pieces(kind, self._stream.step(token))
        held = [] if kind is None else self._begun(kind) + _pieces(kind, self._stream.flush())
        self._stream, self._called = TextStream(self._tokenizer), False
        return held

    def flush(self) -> list[Piece]:
        return [] if self.kind is None else _pieces(self.kind, self._stream.flush())

    def _begun(self, kind: Kind | None) -> list[Piece]:
        if kind != "arguments" or self._called:
            return []
        self._called = True
        return [Piece("call", self._channels.recipient.removeprefix(_FUNCTIONS))]


class TagParser:
    """Qwen3's answers: thoughts in `<think>`, and calls as JSON in `<tool_call>`.

    A call that is not an object with a name and arguments is content.

    Args:
        tokenizer: of the model.
        thinks: whether the prompt ended within thoughts.
    """

    def __init__(self, tokenizer: Any, *, thinks: bool = False):
        self._stream = TextStream(tokenizer)
        self.kind: Kind | None = "reasoning" if thinks else "content"
        self._held = ""
        self._strips = True  # newlines at the beginning of a part are not its own

    def step(self, token: int) -> list[Piece]:
        self._held += self._stream.step(token)
        return self._parsed()

    def flush(self) -> list[Piece]:
        self._held += self._stream.flush()
        found = self._parsed()
        rest, self._held = self._held, ""
        return found + (_pieces("content", f"<tool_call>{rest}") if self.kind == "arguments" else self._shown(rest))

    def _parsed(self) -> list[Piece]:
        found: list[Piece] = []
        while True:
            tags = [_CLOSING[self.kind]] if self.kind in _CLOSING else [*_OPENING]
            starts = {tag: at for tag in tags if (at := self._held.find(tag)) >= 0}
            if not starts:
                break
            tag = min(starts, key=lambda tag: starts[tag])
            before, self._held = self._held[: starts[tag]], self._held[starts[tag] + len(tag) :]
            found += _call(before) if self.kind == "arguments" else self._shown(before)
            self.kind, self._strips = _OPENING.get(tag, "content"), True
        if self.kind != "arguments":
            at = len(self._held) - max(overlap(self._held, tag) for tag in tags)
            shown, self._held = self._held[:at], self._held[at:]
            found += self._shown(shown)
        return found

    def _shown(self, text: str) -> list[Piece]:
        text = text.lstrip("\n") if self._strips else text
        self._strips = self._strips and not text
        return _pieces(self.kind, text)


def parser_of(tokenizer: Any, prompt: str) -> Parser:
    """The parser of a model's answers to a prompt, by the special tokens of its tokenizer."""
    if Channels.are_in(tokenizer):
        return HarmonyParser(tokenizer)
    if any(tokenizer.token_to_id(tag) is not None for tag in ("<tool_call>", "<think>")):
        return TagParser(tokenizer, thinks=prompt.rstrip("\n").endswith("<think>"))
    return PlainParser(tokenizer)


def _pieces(kind: Kind | None, text: str) -> list[Piece]:
    return [Piece(kind, text)] if kind is not None and text else []


def _call(text: str) -> list[Piece]:
    """A call from its JSON; the text as content if it is none."""
    try:
        call = json.loads(text)
        name, arguments = call["name"], call["arguments"]
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        return [Piece("content", f"<tool_call>{text}</tool_call>")]
    return [Piece("call", name), Piece("arguments", json.dumps(arguments, ensure_ascii=False))]
