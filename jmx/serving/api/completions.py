"""`/v1/completions`: an answer to a prompt of text or of token ids."""

import uuid
from typing import Any

from jmx.serving.api.answer import PlainParser
from jmx.serving.api.errors import ApiError
from jmx.serving.api.fields import Field, flag, integer, only, read, text
from jmx.serving.api.generation import DrawnToken, Generation, Update, max_new_tokens
from jmx.serving.api.sampling_fields import SHARED, check_streaming
from jmx.serving.api.service import Service
from jmx.serving.engine.request import TOP_LOGPROBS

_DEFAULT_NEW_TOKENS = 16


def _prompt(name: str, value: Any) -> str | list[int]:
    if isinstance(value, str):
        return text(name, value)
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], int):
        return _prompt(f"{name}[0]", value[0])
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise TypeError(f"`{name}` must be a string, or a list of token ids; send a request for each prompt")
    if value and min(value) < 0:
        raise ValueError(f"`{name}` (with {min(value)}) must have ids of at least 0")
    return value


FIELDS = SHARED | {
    "prompt": Field(_prompt),
    "max_tokens": Field(integer(1, 2**31 - 1)),
    "logprobs": Field(integer(0, TOP_LOGPROBS)),
    "echo": Field(only(False), False),
    "best_of": Field(only(1), 1),
    "suffix": Field(only("", why="the model only appends"), ""),
    "add_special_tokens": Field(flag, False),
}


class Completion:
    """A request for a completion, checked."""

    def __init__(self, service: Service, body: dict[str, Any], salt: bytes):
        self.values = read(body, FIELDS, required=("model", "prompt"))
        service.check_model(self.values["model"])
        check_streaming(self.values)
        prompt = self.values["prompt"]
        if isinstance(prompt, str):
            prompt = service.encode("prompt", prompt, add_special_tokens=self.values["add_special_tokens"])
        if not prompt:
            raise ApiError(400, "`prompt` must have at least one token", "prompt")
        limit = "max_tokens", self.values["max_tokens"]
        most = max_new_tokens(service, "prompt", len(prompt), *limit, _DEFAULT_NEW_TOKENS)
        service.check_ids("prompt", prompt)
        self._count: int | None = self.values["logprobs"]
        parser, logprobs = PlainParser(service.tokenizer, prompt), self._count is not None
        self.generation = Generation(service, prompt, self.values, parser, most, logprobs, salt)
        self._tokenizer, self._offset = service.tokenizer, 0
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}

    def chunks(self, update: Update, created: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of an update."""
        choice = {
            "index": 0,
            "text": "".join(piece.text for piece in update.pieces),
            "logprobs": self._logprobs(update.tokens),
            "finish_reason": update.finish_reason,
        }
        return [self._head | created | {"choices": [choice]}]

    def usage_chunk(self, created: dict[str, Any]) -> dict[str, Any]:
        """The event after the last one, if usage is asked for."""
        return self._head | created | {"choices": [], "usage": self.generation.usage.body()}

    def whole(self, updates: list[Update], created: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        joined = Update(
            [piece for update in updates for piece in update.pieces],
            [token for update in updates for token in update.tokens],
            updates[-1].finish_reason,
        )
        return self.chunks(joined, created)[0] | {"usage": self.generation.usage.body()}

    def _logprobs(self, tokens: list[DrawnToken]) -> dict[str, Any] | None:
        if self._count is None:
            return None
        texts = [self._text(token.id) for token in tokens]
        offsets = []
        for its in texts:
            offsets.append(self._offset)
            self._offset += len(its)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprobs.chosen for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: DrawnToken) -> dict[str, float]:
        """Log probabilities by text; of tokens with the same one, such as parts of characters, the likeliest's."""
        return {self._text(id): value for id, value in reversed(token.logprobs.top[: self._count])}

    def _text(self, id: int) -> str:
        return self._tokenizer.decode([id], skip_special_tokens=False)
