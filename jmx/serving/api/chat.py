"""`/v1/chat/completions`: an answer to a conversation, by the checkpoint's chat template."""

import math
import uuid
from typing import Any

from jmx.serving.api import messages
from jmx.serving.api.answer import Piece, parser_of
from jmx.serving.api.errors import ApiError
from jmx.serving.api.fields import Field, flag, integer, json_object, list_of, only, read, record, text
from jmx.serving.api.generation import DrawnToken, Generation, Update, max_new_tokens
from jmx.serving.api.sampling_fields import SHARED, check_streaming
from jmx.serving.api.service import Service
from jmx.serving.engine.guide import check_schema
from jmx.serving.engine.request import TOP_LOGPROBS

_JSON_SCHEMA = {
    "name": Field(text),
    "description": Field(text),
    "schema": Field(json_object),
    "strict": Field(flag, True),
}
_FORMAT = record(
    {
        "type": Field(only("text", "json_object", "json_schema")),
        "json_schema": Field(record(_JSON_SCHEMA, ("schema",))),
    },
    ("type",),
)

FIELDS = SHARED | {
    "messages": Field(list_of(messages.message, messages.MOST_MESSAGES)),
    "max_tokens": Field(integer(1, 2**31 - 1)),
    "max_completion_tokens": Field(integer(1, 2**31 - 1)),
    "logprobs": Field(flag, False),
    "top_logprobs": Field(integer(0, TOP_LOGPROBS), 0),
    "tools": Field(list_of(messages.tool, messages.MOST_TOOLS), []),
    "tool_choice": Field(only("auto", "none", why="calls are not forced"), "auto"),
    "parallel_tool_calls": Field(flag, True),
    "reasoning_effort": Field(only("low", "medium", "high")),
    "modalities": Field(only(["text"], why="the model writes text")),
    "chat_template_kwargs": Field(json_object, {}),
    "response_format": Field(_FORMAT, {"type": "text", "json_schema": None}),
}


class Chat:
    """A request for the next message of a conversation, checked."""

    def __init__(self, service: Service, body: dict[str, Any], salt: bytes):
        self.values = values = read(body, FIELDS, required=("model", "messages"))
        service.check_model(values["model"])
        check_streaming(values)
        if not values["messages"]:
            raise ApiError(400, "`messages` must have at least one message", "messages")
        if values["top_logprobs"] and not values["logprobs"]:
            raise ApiError(400, "`top_logprobs` must be given with `logprobs` only", "top_logprobs")
        limit, prompt = self._limit(), self._prompt(service)
        ids = service.encode("messages", prompt, add_special_tokens=False)
        most = max_new_tokens(service, "messages", len(ids), *limit, None)
        parser, grammar = parser_of(service.tokenizer, prompt), self._grammar()
        self.generation = Generation(
            service,
            ids,
            values,
            parser,
            most,
            values["logprobs"],
            salt,
            grammar,
            parser.kind == "reasoning",
            math.inf if values["parallel_tool_calls"] else 1,
        )
        self._tokenizer, self._calls, self._begun = service.tokenizer, 0, False
        self._id = f"chatcmpl-{uuid.uuid4().hex}"

    def _limit(self) -> tuple[str, int | None]:
        """The name and value of the field that limits new tokens: OpenAI's older one, or the newer."""
        older, newer = (self.values[name] for name in ("max_tokens", "max_completion_tokens"))
        if None not in (older, newer) and older != newer:
            message = f"`max_tokens` (={older}) must be `max_completion_tokens` (={newer}), or not be given"
            raise ApiError(400, message, "max_tokens")
        return ("max_tokens", older) if newer is None else ("max_completion_tokens", newer)

    def _prompt(self, service: Service) -> str:
        if service.template is None:
            raise ApiError(400, "the model has no chat template: it takes /v1/completions", "messages")
        tools = self.values["tools"] if self.values["tool_choice"] == "auto" else []
        effort = self.values["reasoning_effort"]
        given = {} if effort is None else {"reasoning_effort": effort}
        variables = messages.variables(service.template, "chat_template_kwargs", self.values["chat_template_kwargs"])
        variables |= messages.variables(service.template, "reasoning_effort", given)
        try:
            return messages.render(service.template, self.values["messages"], tools, variables)
        except (ValueError, TypeError) as error:
            reason = error.__cause__ or error  # without the template's path on this machine
            raise ApiError(400, f"`messages` must suit the chat template: {reason}", "messages") from error

    def _grammar(self) -> str | None:
        """The grammar of `response_format`; ApiError 400 for a schema that cannot be one."""
        asked = self.values["response_format"]
        if asked["type"] == "text":
            return None
        if self.values["ignore_eos"] or self.values["tools"]:
            raise ApiError(400, "`response_format` must be given without `ignore_eos` and `tools`", "response_format")
        schema = {"type": "object"} if asked["type"] == "json_object" else (asked["json_schema"] or {}).get("schema")
        if schema is None:
            raise ApiError(400, "`response_format` must have `json_schema` with a `schema`", "response_format")
        try:
            return check_schema(schema)
        except ImportError:
            raise ApiError(
                400, "`response_format` needs llguidance, which is not installed", "response_format"
            ) from None
        except ValueError as error:
            raise ApiError(400, f"`response_format`: {error}", "response_format") from error

    def chunks(self, update: Update, created: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of an update: one for each kind of text, as clients expect."""
        deltas = [delta for piece in update.pieces for delta in self._deltas(piece)]
        tokens = update.tokens if self.values["logprobs"] else []
        if tokens and not deltas:
            deltas = [{"content": ""}]
        choices: list[dict[str, Any]] = [{"delta": delta} for delta in deltas]
        if tokens:
            choices[0]["logprobs"] = self._logprobs(tokens)
        if not self._begun:
            choices = [{"delta": {"role": "assistant", "content": ""}}, *choices]
            self._begun = True
        if update.finish_reason is not None:
            choices.append({"delta": {}, "finish_reason": self._reason(update)})
        head = {"id": self._id, "object": "chat.completion.chunk"} | created
        return [head | {"choices": [{"index": 0, "logprobs": None, "finish_reason": None} | its]} for its in choices]

    def usage_chunk(self, created: dict[str, Any]) -> dict[str, Any]:
        """The event after the last one, if usage is asked for."""
        head = {"id": self._id, "object": "chat.completion.chunk"} | created
        return head | {"choices": [], "usage": self.generation.usage.body()}

    def whole(self, updates: list[Update], created: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        texts = {"content": "", "reasoning": ""}
        calls: list[dict[str, Any]] = []
        for piece in (piece for update in updates for piece in update.pieces):
            if piece.kind == "call":
                calls.append(self._call(piece.text))
            elif piece.kind == "arguments":
                calls[-1]["function"]["arguments"] += piece.text
            else:
                texts[piece.kind] += piece.text
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"] or (None if calls else "")}
        message |= {"reasoning_content": texts["reasoning"]} if texts["reasoning"] else {}
        message |= {"tool_calls": calls} if calls else {}
        tokens = [token for update in updates for token in update.tokens]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens) if self.values["logprobs"] else None,
            "finish_reason": self._reason(updates[-1]),
        }
        head = {"id": self._id, "object": "chat.completion"} | created
        return head | {"choices": [choice], "usage": self.generation.usage.body()}

    def _reason(self, update: Update) -> str | None:
        return "tool_calls" if self._calls and update.finish_reason == "stop" else update.finish_reason

    def _deltas(self, piece: Piece) -> list[dict[str, Any]]:
        if piece.kind == "content":
            return [{"content": piece.text}]
        if piece.kind == "reasoning":
            return [{"reasoning_content": piece.text}]
        if piece.kind == "call":
            return [{"tool_calls": [{"index": self._calls} | self._call(piece.text)]}]
        return [{"tool_calls": [{"index": self._calls - 1, "function": {"arguments": piece.text}}]}]

    def _call(self, name: str) -> dict[str, Any]:
        self._calls += 1
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": ""}}

    def _logprobs(self, tokens: list[DrawnToken]) -> dict[str, Any]:
        """Of tokens of the content."""
        found = []
        for token in tokens:
            if token.kind == "content":
                top = [self._token(id, value) for id, value in token.logprobs.top[: self.values["top_logprobs"]]]
                found.append(self._token(token.id, token.logprobs.chosen) | {"top_logprobs": top})
        return {"content": found, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        its = self._tokenizer.decode([id], skip_special_tokens=False)
        return {"token": its, "logprob": logprob, "bytes": list(its.encode())}
