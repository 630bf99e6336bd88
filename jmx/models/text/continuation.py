"""The new tokens of one prompt of a batch, and where they end."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

from jmx.models.text.stops import StopStrings
from jmx.models.text.stream import TextStream
from jmx.util.checks import check_int

FinishReason = Literal["eos", "stop_id", "stop_string", "length"]


class Continuation:
    """Collects the tokens of one row of a batch, which `Runner.generate` continues beyond the row's end.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; None: ids are collected without a text.
        max_new_tokens: the row ends after so many tokens, at least 1.
        eos_ids: ids of the model that end it.
        stop_ids: other ids that end it.
        stops: texts that end it, wherever tokens begin and end in them.
        before: ids that the text continues, as `TextStream` has it; none: it is a text of its own.

    Attributes:
        ids: the tokens so far, including one that ended the row.
        text: the text so far, without the text of an id that ended the row, and without a stop string.
        finish_reason: None while the row goes on; else what ended it: "eos" or "stop_id", an id of these;
            "stop_string"; or "length", the number of tokens.

    Raises:
        TypeError: `max_new_tokens` is not an integer, or `stops` is not a list of strings.
        ValueError: `max_new_tokens` is less than 1, a stop string is empty, or there are some without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_new_tokens: int,
        *,
        eos_ids: Collection[int] = (),
        stop_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
    ):
        check_int("max_new_tokens", max_new_tokens, least=1)
        if tokenizer is None and stops:
            raise ValueError(f"`stops` (={stops!r}) need a tokenizer")
        self._stream = None if tokenizer is None else TextStream(tokenizer, before)
        self._stops = StopStrings(stops)
        self._most, self._eos_ids, self._stop_ids = max_new_tokens, eos_ids, stop_ids
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None

    def step(self, token: int) -> str:
        """Takes the next token, and returns the text that is complete with it; all that is left, if the row ends.

        A row that has ended takes no more tokens: they change nothing, and have no text.
        """
        if self.finish_reason is not None:
            return ""
        self.ids.append(token)
        new = ""
        if token in self._eos_ids:
            self.finish_reason = "eos"
        elif token in self._stop_ids:
            self.finish_reason = "stop_id"
        else:
            new = "" if self._stream is None else self._stops.step(self._stream.step(token))
            if len(self.ids) == self._most:
                self.finish_reason = "length"
        if self.finish_reason is not None and self._stops.found is None:
            new += self._stops.step("" if self._stream is None else self._stream.flush())
        if self._stops.found is not None:
            self.finish_reason = "stop_string"
        elif self.finish_reason is not None:
            new += self._stops.flush()
        self.text += new
        return new
