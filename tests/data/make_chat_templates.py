"""Make tests/data/chat_templates/prompts.json: what transformers 5.23 renders of templates and conversations.

    python tests/data/make_chat_templates.py        # with transformers and jinja2

The templates were written for these tests, with what the published ones of each family use; they are not theirs.
"""
# pyright: reportMissingImports=false

import datetime
import json
import pathlib
import tempfile
from typing import Any

import transformers.utils.chat_template_utils as utils
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

HERE = pathlib.Path(__file__).parent / "chat_templates"
NOW = datetime.datetime(2026, 2, 3, 4, 5, 6)

TEMPLATES = {file.stem: file.read_text() for file in sorted(HERE.glob("*.jinja"))}
QUOTES = 'say "it\'s" <b>&amp;</b> {{ x }} {% y %} \\n'
UNICODE = "naïve 漢字 🙂\u2028\tend "
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather of a <city> & "more", é',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "its name"},
                "days": {"type": "integer", "default": 3},
                "units": {"type": "string", "enum": ["C", "F"]},
                "exact": {"type": "boolean"},
                "share": {"type": "number", "default": 0.5},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}


def turns(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]
    return [*([] if system is None else [{"role": "system", "content": system}]), *messages]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 1}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {"messages": turns("Hello")},
    "system": {"messages": turns("Hello", system="Be brief.")},
    "several": {"messages": turns("One", "Two", "Three", "Four", "Five", system="Count.\n")},
    "quotes": {"messages": turns(QUOTES, QUOTES, QUOTES, system=QUOTES)},
    "unicode": {"messages": turns(UNICODE, UNICODE, UNICODE, system=UNICODE)},
    "empty": {"messages": turns("", "", "", system="")},
    "spaces": {"messages": turns("\n a \n", "  b\n\n", "\n", system=" c ")},
    "thought": {"messages": turns("Why?", "<think>\nwell\n</think>\n\nSo.", "And?")},
    "ended": {"messages": turns("One", "Two"), "add_generation_prompt": False},
    "wrong order": {"messages": [{"role": "assistant", "content": "One"}, {"role": "assistant", "content": "Two"}]},
    "tools": {"messages": turns("Weather?", system="Use tools."), "tools": [TOOL]},
    "call": {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"sky": "blau"}'},
        ],
        "tools": [TOOL],
    },
}


class Now(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return NOW


def rendered(template: str, conversation: dict[str, Any]) -> str | None:
    """What transformers renders, or None if the template rejects the conversation."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    given = {"add_generation_prompt": True} | conversation
    try:
        return tokenizer.apply_chat_template(given.pop("messages"), tokenize=False, **given)
    except Exception as error:  # of the template
        print("rejected:", error)
        return None


if __name__ == "__main__":
    utils.datetime = Now
    prompts = {
        name: {case: rendered(template, conversation) for case, conversation in CONVERSATIONS.items()}
        for name, template in TEMPLATES.items()
    }
    written = {"now": NOW.isoformat(), "conversations": CONVERSATIONS, "prompts": prompts}
    with tempfile.NamedTemporaryFile("w", dir=HERE, delete=False, encoding="utf-8") as file:
        json.dump(written, file, ensure_ascii=False, indent=1)
    pathlib.Path(file.name).replace(HERE / "prompts.json")
