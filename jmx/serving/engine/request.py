"""What an engine is asked for, and what it returns: values that cross processes."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from jmx.models.sampling import Sampler

# How many of the likeliest tokens of a step have log probabilities, of requests that ask for these.
TOP_LOGPROBS = 20

# "error": no answer fits the request's grammar.
FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Generate:
    """A request for new tokens.

    Args:
        id: unlike those of all requests so far.
        prompt: token ids, at least one.
        max_new_tokens: at least 1.
        sampler: chooses tokens.
        stop_ids: the request ends with any of these.
        logprobs: whether log probabilities are returned.
        banned: token ids that are never chosen.
        salt: only requests with the same salt share pages of the cache.
        grammar: that the content fits, see `guide.check_schema`; or None.
        in_thoughts: whether the prompt ends within thoughts, which come before the content.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampler: Sampler = field(default_factory=Sampler)
    stop_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    banned: tuple[int, ...] = ()
    salt: bytes = b""
    grammar: str | None = None
    in_thoughts: bool = False


class TokenLogProbabilities(NamedTuple):
    """Natural logarithms of the model's own probabilities: of a chosen token, and of the likeliest, which come first.

    Args:
        chosen: of the token.
        top: ids and log probabilities, `TOP_LOGPROBS` of them at most.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


class Output(NamedTuple):
    """A request's next token.

    Args:
        id: of the request.
        token: None if it ended without one.
        logprobs: if the request asked for them.
        finish_reason: "stop" with one of `stop_ids`, "length" with the last of `max_new_tokens`, "error" if no answer
            fits its grammar; None if it goes on.
        cached: tokens of the prompt that were in the cache; of a request's first output only, else 0.
    """

    id: int
    token: int | None
    logprobs: TokenLogProbabilities | None = None
    finish_reason: FinishReason | None = None
    cached: int = 0
