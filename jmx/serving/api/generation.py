"""An answer of the engine as it comes: pieces of text, log probabilities, and what ends it."""

import contextlib
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jmx.models.sampling import Sampler
from jmx.models.text.stops import StopStrings
from jmx.serving.api.answer import Kind, Parser, Piece
from jmx.serving.api.errors import ApiError
from jmx.serving.api.sampling_fields import sampler
from jmx.serving.api.service import Service
from jmx.serving.client import EngineError, RequestError
from jmx.serving.engine import Output, TokenLogProbabilities


class DrawnToken(NamedTuple):
    """A token with log probabilities, and what it is part of."""

    id: int
    kind: Kind | None
    logprobs: TokenLogProbabilities


class Update(NamedTuple):
    """What followed since the last update."""

    pieces: list[Piece]
    tokens: list[DrawnToken]
    finish_reason: Literal["stop", "length"] | None


@dataclass
class Usage:
    """Tokens of a request so far."""

    prompt: int
    new: int = 0
    cached: int = 0

    def body(self) -> dict[str, Any]:
        """As in OpenAI's API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class Generation:
    """A request that has been checked, and is sent to the engine when it is iterated over.

    Args:
        service: of the server.
        prompt: token ids.
        values: of the fields in `SHARED`.
        parser: of the answer.
        max_new_tokens: at least 1.
        logprobs: whether log probabilities are asked for.
        salt: of the owner.
        grammar: that the content fits, or None.
        in_thoughts: whether the prompt ends within thoughts.
        most_calls: of functions, after which the answer ends.
    """

    service: Service
    prompt: list[int]
    values: dict[str, Any]
    parser: Parser
    max_new_tokens: int
    logprobs: bool
    salt: bytes
    grammar: str | None = None
    in_thoughts: bool = False
    most_calls: float = math.inf
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(len(self.prompt))
        self._sampler: Sampler = sampler(self.values)
        self._stops = StopStrings(self.values["stop"])
        self._calls = 0
        stop_ids = frozenset(self.values["stop_token_ids"])
        self.service.check_ids("stop_token_ids", [*stop_ids])
        self.service.check_ids("logit_bias", self.values["logit_bias"])
        self._stop_ids = stop_ids | (frozenset() if self.values["ignore_eos"] else self.service.eos_ids)
        self._banned = (*self.values["logit_bias"], *_bad_word_ids(self.service, self.values["bad_words"]))

    async def updates(self) -> AsyncGenerator[Update]:
        """The answer.

        Raises:
            ApiError: 400 for a request that the engine does not take, or that no answer fits; 429 if the queue is full;
                503 if the engine does not run or stopped.
        """
        self.service.check_ready()  # it was before the request was read
        request = {
            "prompt": tuple(self.prompt),
            "max_new_tokens": self.max_new_tokens,
            "sampler": self._sampler,
            "stop_ids": self._stop_ids,
            "logprobs": self.logprobs,
            "banned": self._banned,
            "salt": self.salt,
            "grammar": self.grammar,
            "in_thoughts": self.in_thoughts,
        }
        metrics, before = self.service.metrics, time.monotonic()
        metrics.prompt_tokens.inc(len(self.prompt))
        try:
            async with contextlib.aclosing(self.service.client.generate(**request)) as outputs:
                async for batch in outputs:
                    now = time.monotonic()
                    (metrics.between_tokens if self.usage.new else metrics.first_token).observe(now - before)
                    before = now
                    metrics.new_tokens.inc(len(batch))
                    update = self._update(batch)
                    yield update
                    if update.finish_reason is not None:
                        return
        except RequestError as error:
            raise ApiError(400, str(error)) from error
        except EngineError as error:
            raise ApiError(503, str(error)) from error

    def _update(self, batch: list[Output]) -> Update:
        pieces: list[Piece] = []
        tokens: list[DrawnToken] = []
        for output in batch:
            self.usage.cached += output.cached
            if output.token is None:
                raise ApiError(400, "`response_format` cannot be met: no token may follow", "response_format")
            self.usage.new += 1
            ends = output.finish_reason == "stop"
            if output.logprobs is not None and not ends:
                tokens.append(DrawnToken(output.token, self.parser.kind, output.logprobs))
            found = self.parser.flush() if ends else self.parser.step(output.token)
            if output.finish_reason == "length":
                found = [*found, *self.parser.flush()]
            before_stop, has_ended = self._before_stop(found)
            pieces += before_stop
            if has_ended:
                return Update(pieces, tokens, "stop")
            if output.finish_reason is not None:
                pieces += [Piece("content", rest)] if (rest := self._stops.flush()) else []
                return Update(pieces, tokens, "length" if output.finish_reason == "length" else "stop")
        return Update(pieces, tokens, None)

    def _before_stop(self, pieces: list[Piece]) -> tuple[list[Piece], bool]:
        """The pieces up to a stop string in the content, or to the last call that there may be; and whether the answer
        ends there."""
        found = []
        for piece in pieces:
            self._calls += piece.kind == "call"
            if self._calls > self.most_calls:
                return found, True
            if piece.kind == "content":
                piece = Piece("content", self._stops.step(piece.text))
            if piece.text:
                found.append(piece)
            if self._stops.found is not None:
                return found, True
        return found, False


def max_new_tokens(
    service: Service, prompt: str, length: int, name: str, asked: int | None, default: int | None
) -> int:
    """How many new tokens a request may have; ApiError 400 for a prompt or a number that the context does not hold.

    Args:
        service: of the server.
        prompt: the field of the prompt.
        length: its tokens.
        name: the field that limits new tokens.
        asked: its value.
        default: if there is none; None: as many as the context holds.
    """
    most = service.client.max_length - length
    if most < 1:
        rule = f"must have at most {length + most - 1}, so that an answer has place"
        raise ApiError(400, f"`{prompt}` (of {length} tokens) {rule}", prompt)
    if asked is not None and asked > most:
        raise ApiError(
            400, f"`{name}` (={asked}) must be at most {most}, what the prompt's {length} tokens leave", name
        )
    return most if asked is None and default is None else min(most, asked or default or most)


def _bad_word_ids(service: Service, words: tuple[str, ...]) -> list[int]:
    """The tokens of words that are one, with or without a space before them."""
    found = []
    for word in words:
        forms = (service.encode("bad_words", text, add_special_tokens=False) for text in (word, f" {word}"))
        single = [ids[0] for ids in forms if len(ids) == 1]
        if not single:
            raise ApiError(400, f"`bad_words` (={word[:50]!r}) must be words of one token", "bad_words")
        found += single
    return found
