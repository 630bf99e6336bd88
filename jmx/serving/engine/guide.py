"""Answers that fit a JSON schema: of each token, which ones may follow. By the llguidance package."""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from jmx.models.text.harmony import ANALYSIS, Channels
from jmx.models.text.harmony_package import channels_of

# The engine makes a schema's grammar between two steps, for which all requests wait: 64 KiB take it some 0.2 s, and
# multiples of 10,000 some 0.1 s.
_MOST_CHARACTERS = 1 << 16
_MOST_MULTIPLE = 10_000


def check_schema(schema: Mapping[str, Any]) -> str:
    """The schema as a grammar for `Guides.start`.

    Raises:
        ValueError: it is no schema, one with parts that llguidance does not know, or one that would take the engine
            long.
        ImportError: llguidance is not installed.
    """
    from llguidance import LLMatcher  # pyright: ignore[reportMissingImports]

    text = json.dumps(schema)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"the schema (of {len(text)} characters) must have at most {_MOST_CHARACTERS}")
    _check_multiples(schema)
    with _panics_are_errors():
        grammar = LLMatcher.grammar_from_json_schema(text)
        if fault := LLMatcher.validate_grammar(grammar):
            raise ValueError(fault)
    return grammar


def _check_multiples(schema: Any) -> None:
    """ValueError for a `multipleOf` that is large: an automaton has a state for each remainder."""
    left = [schema]
    while left:
        node = left.pop()
        left += node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else []
        multiple = node.get("multipleOf") if isinstance(node, Mapping) else None
        if isinstance(multiple, int | float) and not abs(multiple) <= _MOST_MULTIPLE:
            raise ValueError(f"`multipleOf` (={multiple}) must be at most {_MOST_MULTIPLE}")


@contextlib.contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Raises ValueError where llguidance panics: what it raises then is no Exception, and would end the process."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("the schema must be one that llguidance takes: it failed") from None


class Guides:
    """Makes guides for one model.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, that of the model.
        vocab_size: of the model.
        eos_ids: ids that end an answer.

    Raises:
        ImportError: llguidance is not installed.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Collection[int]):
        from llguidance import LLTokenizer  # pyright: ignore[reportMissingImports]

        self._tokenizer = tokenizer
        self._of_matchers = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=[*eos_ids])
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[:vocab_size] = 1
        bits[[*eos_ids]] = 0
        self._goes_on = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def start(self, grammar: str, *, in_thoughts: bool = False) -> "Guide":
        """The guide of an answer whose content fits a grammar of `check_schema`.

        Args:
            grammar: of the content.
            in_thoughts: whether the prompt ends within thoughts, which `</think>` ends.

        Raises:
            ValueError: llguidance does not take the grammar.
        """
        from llguidance import LLMatcher  # pyright: ignore[reportMissingImports]

        channels = channels_of(self._tokenizer) if Channels.are_in(self._tokenizer) else None
        after = self._tokenizer.token_to_id("</think>") if in_thoughts else None
        with _panics_are_errors():
            return Guide(LLMatcher(self._of_matchers, grammar, log_level=0), self._goes_on, channels, after)


class Guide:
    """Which tokens may follow in an answer. What comes before the content is free, but the answer must not end there.

    Args:
        matcher: of the content.
        goes_on: a bit for each token that does not end an answer, uint32 (vocab_size / 32, rounded up).
        channels: of gpt-oss' answers, or None. Messages in the analysis channel are no content.
        after: the id of the token that comes before the content, or None.
    """

    def __init__(self, matcher: Any, goes_on: np.ndarray, channels: Channels | None, after: int | None):
        self._matcher, self._goes_on, self._channels, self._after = matcher, goes_on, channels, after

    def allowed(self) -> np.ndarray:
        """A bit for each token that may follow, uint32 (vocab_size / 32, rounded up)."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32) if self._is_content() else self._goes_on

    def step(self, token: int) -> None:
        """Takes the next token."""
        if self._is_content():
            self._matcher.consume_token(token)
        elif token == self._after:
            self._after = None
        if self._channels is not None:
            self._channels.step(token)

    @property
    def has_failed(self) -> bool:
        """Whether no answer can fit: the grammar allows none, or its parser has reached a limit."""
        return self._matcher.is_error()

    def _is_content(self) -> bool:
        if self._channels is not None:
            return self._channels.in_body and self._channels.name != ANALYSIS
        return self._after is None
