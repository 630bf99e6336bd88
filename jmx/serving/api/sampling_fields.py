"""The fields that completions and chat share: how tokens are chosen, and where an answer ends."""

import secrets
from typing import Any

from jmx.models.sampling import Sampler
from jmx.serving.api.errors import ApiError
from jmx.serving.api.fields import Field, flag, integer, json_object, list_of, number, only, record, text, text_or_list

_SEEDS = 1 << 32
_IDS = integer(0, 2**31 - 1)
_MOST_CHARACTERS = 1024  # of a string that each token is compared with


def _bias(name: str, value: Any) -> tuple[int, ...]:
    """OpenAI's `logit_bias`, of which only -100, which forbids a token, is there: the ids."""
    for key, bias in json_object(name, value).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"`{name}` has the key {key[:50]!r}, which must be a token id")
        if isinstance(bias, bool) or bias != -100:
            raise ValueError(f"`{name}[{key}]` (={repr(bias)[:50]}) must be -100, which forbids the token")
    return tuple(map(int, value))


SHARED = {
    "model": Field(text),
    "temperature": Field(number(0, 2), 1.0),
    "top_p": Field(number(0, 1), 1.0),
    "top_k": Field(integer(-1, 2**31 - 1), -1),
    "min_p": Field(number(0, 1), 0.0),
    "seed": Field(integer(-(2**63), 2**63 - 1)),
    "presence_penalty": Field(number(-2, 2), 0.0),
    "frequency_penalty": Field(number(-2, 2), 0.0),
    "repetition_penalty": Field(number(1e-3, 1e3), 1.0),
    "logit_bias": Field(_bias, ()),
    "bad_words": Field(text_or_list(64, _MOST_CHARACTERS), ()),
    "stop": Field(text_or_list(16, _MOST_CHARACTERS), ()),
    "stop_token_ids": Field(list_of(_IDS, 64), []),
    "ignore_eos": Field(flag, False),
    "stream": Field(flag, False),
    "stream_options": Field(
        record({"include_usage": Field(flag, False), "include_obfuscation": Field(only(False), False)}), {}
    ),
    "n": Field(only(1, why="send a request for each answer"), 1),
    # What clients say about a request, which has no effect on its answer.
    "user": Field(text),
    "safety_identifier": Field(text),
    "prompt_cache_key": Field(text),
    "metadata": Field(json_object),
    "service_tier": Field(only("auto", "default")),
    "store": Field(only(False, why="the server keeps no answers")),
}


def sampler(values: dict[str, Any]) -> Sampler:
    """The `Sampler` of fields. Without a seed it has a random one. ApiError 400 for values that it does not take."""
    seed = values["seed"]
    if values["top_p"] == 0:
        raise ApiError(400, "`top_p` (=0) must be above 0", "top_p")
    if values["top_k"] == 0:
        raise ApiError(400, "`top_k` (=0) must be at least 1, or -1 for all tokens", "top_k")
    return Sampler(
        temperature=values["temperature"],
        top_p=values["top_p"],
        seed=secrets.randbelow(_SEEDS) if seed is None else seed % _SEEDS,
        top_k=None if values["top_k"] < 0 else values["top_k"],
        min_p=values["min_p"],
        repetition_penalty=values["repetition_penalty"],
        presence_penalty=values["presence_penalty"],
        frequency_penalty=values["frequency_penalty"],
    )


def check_streaming(values: dict[str, Any]) -> None:
    """ApiError 400 for options of a stream without a stream."""
    if values["stream_options"] and not values["stream"]:
        raise ApiError(400, "`stream_options` must be given with `stream` only", "stream_options")
