"""A checkpoint's chat template, a Jinja template that makes a prompt of messages."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jmx.checkpoint import CheckpointError
from jmx.models.text import template_process

# Marks what an assistant wrote, for training; it is no tag of Jinja, and what it encloses is a scope.
_GENERATION = {
    re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}"): r"{%\1 with \2%}",
    re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}"): r"{%\1 endwith \2%}",
}
_WITH_TOOLS, _DEFAULT = "tool_use", "default"  # names in a list of templates


@dataclass(frozen=True)
class ChatTemplate:
    """The templates of a checkpoint, by name, and the special tokens that they may use, such as `bos_token`.

    The definition is `apply_chat_template` of transformers. A template comes with a checkpoint, and may be anyone's: it
    is run by minijinja in a process of its own, see `template_process`, whose instructions, memory and time are
    limited, and which holds nothing but the conversation.
    """

    file: Path
    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @classmethod
    def read(cls, directory: Path) -> "ChatTemplate":
        """The template of chat_template.jinja, else of chat_template.json, else of tokenizer_config.json.

        Beside chat_template.jinja there may be further ones, named as their files in additional_chat_templates.

        Raises:
            FileNotFoundError: the checkpoint has none.
            CheckpointError: a file that is not what it must be.
        """
        config = directory / "tokenizer_config.json"
        settings = _read_json(config)
        tokens = _special_tokens(_read_json(directory / "special_tokens_map.json")) | _special_tokens(settings)
        file = directory / "chat_template.jinja"
        if file.exists():
            others = sorted((directory / "additional_chat_templates").glob("*.jinja"))
            return cls(file, {its.stem: _read_text(its) for its in others} | {_DEFAULT: _read_text(file)}, tokens)
        for file, entries in ((other := directory / "chat_template.json", _read_json(other)), (config, settings)):
            if (found := entries.get("chat_template")) is not None:
                return cls(file, _by_name(file, found), tokens)
        raise FileNotFoundError(
            f"{directory} has no chat template: neither chat_template.jinja, nor `chat_template` in chat_template.json "
            "or tokenizer_config.json; it may be a model for raw text, see `jmx generate`"
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        whole: bool = False,
    ) -> str:
        """The prompt of messages, such as `{"role": "user", "content": "Hello"}`.

        Args:
            messages: values of JSON.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: whether the prompt ends with what begins an answer.
            variables: further ones of the template, such as `reasoning_effort`: values of JSON.
            now: the time that the template reads; by default that of the call.
            whole: whether each message but the assistant's, each call, and each tool, in OpenAI's form, must be in the
                prompt.

        Raises:
            TypeError: `messages`, `tools` or `variables` have values that JSON lacks.
            ValueError: the template is wrong, rejects the messages, needs too much memory or time, or with `whole`
                leaves something out.
            ImportError: minijinja is not installed.
        """
        own = {"messages": messages, "tools": tools}
        given = json.loads(json.dumps({**(variables or {}), **own}, default=_reject))
        context = {**self.special_tokens, **given, "documents": None, "add_generation_prompt": add_generation_prompt}
        source = self._source(tools is not None)
        marked, marks = _marked(given["messages"], given["tools"]) if whole else ({}, {})
        contexts = [context, *([{**context, **marked}] if marks else [])]
        try:
            prompt, *checked = template_process.render(source, contexts, now or datetime.now())
            if isinstance(prompt, ValueError):
                raise prompt
            for its in checked:
                missing = [what for mark, what in marks.items() if isinstance(its, str) and mark not in its]
                if missing:
                    raise ValueError(f"it leaves out {missing[0]}")
        except ImportError as error:
            raise ImportError("a chat template needs the minijinja package: pip install 'jmx-moe[hf]'") from error
        except ValueError as error:
            raise ValueError(f"the chat template in {self.file} cannot be applied: {error}") from error
        return prompt

    def _source(self, with_tools: bool) -> str:
        name = _WITH_TOOLS if with_tools and _WITH_TOOLS in self.sources else _DEFAULT
        if name not in self.sources:
            raise CheckpointError(
                self.file, f"`chat_template` must have one named {name}, and has {', '.join(self.sources)}"
            )
        source = self.sources[name]
        for tag, replacement in _GENERATION.items():
            source = tag.sub(replacement, source)
        return source


def _marked(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Messages and tools with marks in place of texts and of functions' names, and what each mark is in place of.

    Of an assistant's texts there are none: templates leave thoughts out, and what was said before calls.
    """
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        marks[its := f"mark{len(marks)}ed"] = what
        return its

    def named(its: Mapping[str, Any], what: str) -> dict[str, Any]:
        return {**its, "function": {**its["function"], "name": mark(what)}}

    found = []
    for number, message in enumerate(messages):
        its, name, role = dict(message), f"`messages[{number}]`", message["role"]
        if role != "assistant" and isinstance(its["content"], str) and its["content"].strip():
            its["content"] = mark(f"{name} (of the role {role!r})")
        if its.get("tool_calls"):
            its["tool_calls"] = [
                named(call, f"`{name[1:-1]}.tool_calls[{at}]`") for at, call in enumerate(its["tool_calls"])
            ]
        found.append(its)
    functions = None if tools is None else [named(tool, f"`tools[{at}]`") for at, tool in enumerate(tools)]
    return {"messages": found, "tools": functions}, marks


def _reject(value: Any) -> None:
    raise TypeError(f"`messages`, `tools` and `variables` must have values of JSON, and have a {type(value).__name__}")


def _by_name(file: Path, found: Any) -> dict[str, str]:
    """The templates of `chat_template`, a text or a list of named ones."""
    if isinstance(found, str):
        return {_DEFAULT: found}
    entries = found if isinstance(found, list) else [found]
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise CheckpointError(file, "`chat_template` must be a text, or a list of objects of `name` and `template`")
    return {entry["name"]: entry["template"] for entry in entries}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, each a text, or an object with its `content`."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no file."""
    if not file.exists():
        return {}
    try:
        read = json.loads(_read_text(file))
    except ValueError as error:
        raise CheckpointError(file, f"must be JSON: {error}") from error
    if not isinstance(read, dict):
        raise CheckpointError(file, "must be an object of JSON")
    return read


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(file, "must be UTF-8") from error
