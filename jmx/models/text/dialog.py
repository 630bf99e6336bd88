"""A dialog with a model: messages, and a KV cache that is kept from one answer to the next."""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, Literal, NamedTuple

from jmx.models.cache import Cache
from jmx.models.generation import Generation
from jmx.models.runner import Runner
from jmx.models.sampling import Sampler
from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.harmony import FINAL, Channels
from jmx.models.text.harmony_package import channels_of
from jmx.models.text.stops import StopStrings
from jmx.models.text.stream import TextStream


class Piece(NamedTuple):
    """Whole characters of an answer; they may be none.

    Args:
        text: the characters.
        channel: that of gpt-oss, such as analysis or final; final for models without channels.
    """

    text: str
    channel: str = FINAL


class Dialog:
    """Messages of a user, and a model's answers.

    Args:
        runner: of the model.
        tokenizer: a `tokenizers.Tokenizer`, that of the model.
        template: makes prompts of messages.
        sampler: chooses tokens.
        max_new_tokens: of an answer, at least 1.
        system: instructions before the first message.
        stops: an answer ends before the first of these texts.
        context_length: the most tokens of all messages together that the model takes, or None.

    Attributes:
        messages: all of them so far. An answer is added when it ends or is given up.
        reused: how many tokens of the last prompt the cache had.
        finish_reason: what ended the last answer: "eos", "stop_string", "length" (`max_new_tokens`), or "context"
            (`context_length`); None if it was given up.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Any,
        template: ChatTemplate,
        *,
        sampler: Sampler | None = None,
        max_new_tokens: int = 1024,
        system: str | None = None,
        stops: Sequence[str] = (),
        context_length: int | None = None,
    ):
        StopStrings(stops)  # checks them
        self._context_length = context_length
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._runner, self._tokenizer, self._template = runner, tokenizer, template
        self._sampler, self._max_new_tokens, self._stops = sampler or Sampler(), max_new_tokens, tuple(stops)
        self._ids: list[int] = []  # of the tokens in the cache
        self._cache: Cache | None = None
        self.messages: list[dict[str, str]] = [*self._system]
        self.reused = 0
        self.finish_reason: Literal["eos", "stop_string", "length", "context"] | None = None

    def clear(self) -> None:
        """Begins a new dialog: forgets all messages but the instructions."""
        self.messages = [*self._system]

    def answer(self, message: str) -> Generator[Piece]:
        """Yields the answer to a message, a piece for each token.

        If it is closed early, the part so far becomes the answer. Only the final channel is kept in `messages`.

        Raises:
            ValueError: the message is not text (bytes of another encoding), the template or the model does not take it,
                or it leaves no token of the context for an answer. It is then not part of the dialog.
        """
        try:
            message.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the message must be text: {error.reason} at character {error.start}") from error
        messages = [*self.messages, {"role": "user", "content": message}]
        text = self._template.render(messages)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        count = self._count(len(ids))
        known = self._known(ids)
        generation = self._runner.generate([ids], self._sampler, count, cache=known)
        self.messages, self._cache, self.finish_reason = messages, None, None  # the cache is donated
        parts: list[str] = []
        try:
            with contextlib.closing(self._texts(generation, ids)) as texts:
                for part in texts:
                    parts += [part.text] if part.channel == FINAL else []
                    yield part
        finally:
            self.messages.append({"role": "assistant", "content": "".join(parts)})

    def _count(self, length: int) -> int:
        """The most new tokens after a prompt of that length."""
        if self._context_length is None:
            return self._max_new_tokens
        if length >= self._context_length:
            raise ValueError(
                f"the dialog has {length} tokens with this message, and the model's context of {self._context_length} "
                "leaves none for an answer"
            )
        return min(self._max_new_tokens, self._context_length - length)

    def _known(self, ids: list[int]) -> Cache | None:
        """The cache of the first of these ids, as many as it has; not of the last one, whose logits are needed."""
        same = next(
            (n for n, (new, old) in enumerate(zip(ids, self._ids, strict=False)) if new != old),
            min(len(ids), len(self._ids)),
        )
        self.reused = 0 if self._cache is None else min(same, len(ids) - 1)
        return None if self._cache is None or self.reused <= 0 else self._cache.truncate([self.reused])

    def _texts(self, generation: Generation, ids: list[int]) -> Generator[Piece]:
        """The texts of new tokens up to the end of the answer. Then the cache is kept."""
        ends = self._runner.model.config.eos_token_ids
        reader = _Reader(self._tokenizer, self._stops)
        new: list[int] = []
        try:
            for (token,) in generation:
                new.append(int(token))
                if new[-1] in ends:
                    self.finish_reason = "eos"
                    break
                yield reader.step(new[-1])
                if reader.stopped:
                    self.finish_reason = "stop_string"
                    break
            else:
                self.finish_reason = "length" if len(new) == self._max_new_tokens else "context"
            yield reader.flush()
        finally:
            if new:
                self._cache, self._ids = generation.cache(), [*ids, *new[:-1]]


class _Reader:
    """Turns new tokens into pieces. Each message of a channel has a text, and stop strings, of its own."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._channels = channels_of(tokenizer) if Channels.are_in(tokenizer) else None
        self._tokenizer, self._strings = tokenizer, stops
        self._begin()

    def _begin(self) -> None:
        self._stream, self._stops = TextStream(self._tokenizer), StopStrings(self._strings)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.found is not None

    def step(self, token: int) -> Piece:
        """The piece that `token` completes; at the end of a message that is what was held back."""
        if self._channels is None:
            return Piece(self._stops.step(self._stream.step(token)))
        channel = self._channels.name
        if self._channels.step(token):
            return Piece(self._stops.step(self._stream.step(token)), channel)
        held = Piece(self._rest(), channel)
        self._begin()
        return held

    def flush(self) -> Piece:
        """The text that was held back, when no token follows."""
        return Piece(self._rest(), FINAL if self._channels is None else self._channels.name)

    def _rest(self) -> str:
        return self._stops.step(self._stream.flush()) + self._stops.flush()
