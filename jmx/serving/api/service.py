"""What the endpoints share: the engine, the model's texts, the limits, and the keys."""

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.requests import Request

from jmx.models.text.chat_template import ChatTemplate
from jmx.serving.api.errors import ApiError, overloaded, unavailable
from jmx.serving.api.metrics import Metrics
from jmx.serving.client import EngineClient

# Names of this machine, which no other one can have.
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::\d{1,5})?")


@dataclass
class Service:
    """All that a request needs.

    Args:
        client: of the engine.
        name: of the model, as requests name it.
        tokenizer: a `tokenizers.Tokenizer`.
        template: of chats; None: the checkpoint has none.
        eos_ids: ids of tokens that end an answer.
        vocab_size: of the model.
        max_open: requests that run or wait, at most.
        keys: of the API; without one, only requests to this machine's own names are served.
        hosts: further names of this machine, without a key.
    """

    client: EngineClient
    name: str
    tokenizer: Any
    template: ChatTemplate | None
    eos_ids: frozenset[int]
    vocab_size: int
    max_open: int
    keys: Sequence[str] = ()
    hosts: frozenset[str] = LOCAL_NAMES
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @cached_property
    def _most_characters(self) -> int:
        """Of a text that is not longer than any request."""
        return self.client.max_length * max(map(len, self.tokenizer.get_vocab()), default=1)

    def check_access(self, request: Request) -> bytes:
        """The salt of a request's owner, whose requests share pages of the cache.

        Raises:
            ApiError: 401 for a missing or wrong key; 403 for another host's name, without a key: a page of the web that
                makes its own name this machine's would else reach the server.
        """
        if not self.keys:
            host = request.headers.get("host", "localhost")  # all but the oldest clients send it
            name = _HOST.fullmatch(host)
            if name is None or name[1].strip("[]").lower() not in self.hosts:
                raise ApiError(403, f"the Host {host[:100]!r} is not a name of this server, which has no API key")
            return b""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        found = b""
        for key in self.keys:  # all of them, whichever is right
            if hmac.compare_digest(key.encode(), given.strip().encode()):
                found = hashlib.sha256(self._secret + key.encode()).digest()
        if scheme.lower() != "bearer" or not found:
            raise ApiError(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        return found

    def check_ready(self) -> None:
        """ApiError 503 if the engine takes no requests, and 429 if the queue is full."""
        if self.client.status != "ready":
            raise unavailable(self.client.status)
        if self.client.num_open >= self.max_open:
            report = self.client.report
            raise overloaded(0 if report is None else report.waiting)

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for another model's name."""
        if name != self.name:
            raise ApiError(404, f"`model` (={(name or '')[:100]!r}) must be {self.name!r}", "model")

    def encode(self, name: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a field's text. ApiError 400 for one that the tokenizer does not take, or that is longer
        than any request: reading it would take the server seconds."""
        if len(text) > self._most_characters:
            raise ApiError(400, f"`{name}` (of {len(text)} characters) must have at most {self._most_characters}", name)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"`{name}` must be text of the model: {error}", name) from error

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        """ApiError 400 for token ids outside the vocabulary."""
        for id in ids:
            if id >= self.vocab_size:
                raise ApiError(400, f"`{name}` has the id {id}, which must be in 0..{self.vocab_size - 1}", name)
