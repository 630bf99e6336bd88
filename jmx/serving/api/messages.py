"""Messages of a chat and functions that a model may call: checks of both, and what a chat template gets of them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jmx.models.text.chat_template import ChatTemplate
from jmx.serving.api.errors import ApiError
from jmx.serving.api.fields import Field, json_object, list_of, only, record, text

MOST_MESSAGES, MOST_TOOLS = 4096, 128


def _content(name: str, value: Any) -> str:
    """A text, or a list of parts that are texts."""
    if isinstance(value, str):
        return text(name, value)
    if not isinstance(value, list):
        raise TypeError(f"`{name}` (a {type(value).__name__}) must be a string, or a list of parts that are texts")
    return "".join(item["text"] for item in list_of(_part, MOST_MESSAGES)(name, value))


_TYPE = only("text", why="the model reads text")
_FIELDS_OF_PART = record({"type": Field(_TYPE), "text": Field(text)}, ("type", "text"))


def _part(name: str, value: Any) -> dict[str, Any]:
    """A part that is a text. Of another one, such as an image, the type is the error, and no field of its own."""
    if (kind := json_object(name, value).get("type")) is not None:
        _TYPE(f"{name}.type", kind)
    return _FIELDS_OF_PART(name, value)


def _arguments(name: str, value: Any) -> Any:
    """Arguments of a call, a text of JSON, as a template gets them: an object. An empty text is one without any."""
    try:
        return json_object(name, json.loads(text(name, value) or "{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{name}` must be an object of JSON, as text") from error


_FUNCTION = record({"name": Field(text), "arguments": Field(_arguments)}, ("name", "arguments"))
_CALL = record({"id": Field(text), "type": Field(only("function")), "function": Field(_FUNCTION)}, ("function",))
_FIELDS_OF_MESSAGE = record(
    {
        "role": Field(only("system", "developer", "user", "assistant", "tool")),
        "content": Field(_content),
        "name": Field(text),
        "reasoning_content": Field(text),
        "tool_calls": Field(list_of(_CALL, MOST_TOOLS)),
        "tool_call_id": Field(text),
        "refusal": Field(text),
        "annotations": Field(only([], why="the model reads text")),
    },
    ("role",),
)


def message(name: str, value: Any) -> dict[str, Any]:
    """A message as a template gets it: without what is not given, such as an empty list of calls, but with content."""
    found = {key: its for key, its in _FIELDS_OF_MESSAGE(name, value).items() if its is not None and its != []}
    if found["role"] != "assistant" and "content" not in found:
        raise ValueError(f"`{name}` (of the role {found['role']!r}) must have `content`")
    return {"content": ""} | found


_SCHEMA = {
    "name": Field(text),
    "description": Field(text, ""),
    "parameters": Field(json_object, {"type": "object", "properties": {}}),
    "strict": Field(only(False, why="arguments are not forced to fit"), False),
}
_FUNCTION_OF_TOOL = Field(record(_SCHEMA, ("name",)))
_FIELDS_OF_TOOL = record({"type": Field(only("function")), "function": _FUNCTION_OF_TOOL}, ("type", "function"))


def tool(name: str, value: Any) -> dict[str, Any]:
    """A function as a template gets it."""
    found = _FIELDS_OF_TOOL(name, value)
    del found["function"]["strict"]  # some templates print all that there is
    return found


# What a template is always given, and no request.
_OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_LONGEST_NAME = 100


def variables(template: ChatTemplate, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A template's variables, of the field `name`; ApiError 400 for one that it does not read, or that is not free."""
    for key in given:
        if key in _OWN or key in template.special_tokens:
            raise ApiError(400, f"`{name}` has {key[:50]!r}, which a request must not set", name)
        if len(key) > _LONGEST_NAME or not any(
            re.search(rf"\b{re.escape(key)}\b", source) for source in template.sources.values()
        ):
            raise ApiError(400, f"`{name}` has {key[:50]!r}, which the model's chat template does not read", name)
    return dict(given)


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    its: Mapping[str, Any],
) -> str:
    """The prompt of messages and tools, with the template's variables `its`.

    A developer's message is a system's where the template knows none. The reasoning before calls is gpt-oss's
    `thinking`, too, unless the message has content, which its template takes for it.

    Raises:
        ValueError: the template does not take the messages, or leaves one of them, a call or a tool out.
    """
    knows_developers = any("developer" in source for source in template.sources.values())
    found = []
    for given in messages:
        changed: dict[str, Any] = {}
        if given["role"] == "developer" and not knows_developers:
            changed["role"] = "system"
        if given.get("tool_calls") and given.get("reasoning_content") and not given["content"]:
            changed["thinking"] = given["reasoning_content"]
        found.append({**given, **changed})
    return template.render(found, tools=tools or None, variables=its, whole=True)
