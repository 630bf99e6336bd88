"""Channels of gpt-oss' answers: the Harmony format, <https://github.com/openai/harmony>."""

from typing import Any

ANALYSIS = "analysis"  # the channel of what a model thinks; all others are for who asked, or for functions
FINAL = "final"  # the channel of what a user is to read
_HEADER, _BODY = ("<|start|>", "<|channel|>", "<|constrain|>"), ("<|message|>",)
_ENDS = ("<|end|>", "<|return|>", "<|call|>")


class Channels:
    """Finds the channel of each token of an answer, whose prompt ends with `<|start|>assistant`.

    An answer is messages of the form `<|channel|>NAME<|message|>TEXT<|end|>`, the next of which begins with
    `<|start|>assistant`. A message to a function has ` to=functions.NAME` after `assistant`, or after the channel's
    name. Only special tokens count: a text that looks like one is text.

    Args:
        tokenizer: a `tokenizers.Tokenizer` that has the format's special tokens.

    Attributes:
        name: the channel of the last token's message, such as analysis or final; "" before the first one.
        recipient: of that message, such as functions.NAME; "" for a user.
        in_body: whether the next token is text of the message, unless it is a special one.
        special: the format's special tokens, by id.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.special = {tokenizer.token_to_id(name): name for name in (*_HEADER, *_BODY, *_ENDS)}
        self.in_body = False
        self._header: list[int] | None = []  # ids since the last special token of a header; None outside headers
        self._in_channel = False
        self.name = self.recipient = ""

    @staticmethod
    def are_in(tokenizer: Any) -> bool:
        """Whether a model with this tokenizer answers in channels."""
        return all(tokenizer.token_to_id(name) is not None for name in ("<|start|>", "<|channel|>", "<|message|>"))

    def step(self, token: int) -> bool:
        """Whether `token` is text of a message, and so belongs to the channel `name`."""
        special = self.special.get(token)
        if special is None:
            if not self.in_body and self._header is not None:
                self._header.append(token)
            return self.in_body
        if self._header is not None:
            self._read_header(self._header)
        if special == "<|start|>" or self.in_body:
            self.recipient = ""
        self._in_channel = special == "<|channel|>"
        self.in_body = special in _BODY
        self._header = [] if special in _HEADER else None
        return False

    def _read_header(self, ids: list[int]) -> None:
        """Takes a part of a header: the channel's name, and the recipient in any part."""
        words = self._tokenizer.decode(ids, skip_special_tokens=False).split()
        if self._in_channel:
            self.name = words[0] if words else ""
        self.recipient = next((word[3:] for word in words if word.startswith("to=")), self.recipient)
