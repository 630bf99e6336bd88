"""Channels of gpt-oss' answers: the Harmony format, <https://github.com/openai/harmony>."""

from typing import Any

FINAL = "final"  # the channel of what a user is to read
_HEADER, _BODY = ("<|start|>", "<|channel|>", "<|constrain|>"), ("<|message|>",)
_ENDS = ("<|end|>", "<|return|>", "<|call|>")


class Channels:
    """Finds the channel of each token of an answer, whose prompt ends with `<|start|>assistant`.

    An answer is messages of the form `<|channel|>NAME<|message|>TEXT<|end|>`, the next of which begins with
    `<|start|>assistant`. Only special tokens count: a text that looks like one is text.

    Args:
        tokenizer: a `tokenizers.Tokenizer` that has the format's special tokens.

    Attributes:
        name: the channel of the last token's message, such as analysis or final; "" before the first one.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = {tokenizer.token_to_id(name): name for name in (*_HEADER, *_BODY, *_ENDS)}
        self._in_body = False
        self._header: list[int] | None = None  # the ids of a channel's name so far
        self.name = ""

    @staticmethod
    def are_in(tokenizer: Any) -> bool:
        """Whether a model with this tokenizer answers in channels."""
        return all(tokenizer.token_to_id(name) is not None for name in ("<|start|>", "<|channel|>", "<|message|>"))

    def step(self, token: int) -> bool:
        """Whether `token` is text of a message, and so belongs to the channel `name`."""
        special = self._special.get(token)
        if special is None:
            if not self._in_body and self._header is not None:
                self._header.append(token)
            return self._in_body
        if special == "<|channel|>":
            self._header = []
        elif self._header is not None:  # a header is over, or its name is
            words = self._tokenizer.decode(self._header, skip_special_tokens=False).split()
            self.name, self._header = words[0] if words else "", None
        self._in_body = special in _BODY
        return False
