"""Chat templates: prompts of transformers, and templates and files that are wrong."""

import contextlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jmx.checkpoint import CheckpointError
from jmx.models.text import template_process
from jmx.models.text.chat_template import ChatTemplate

DATA = Path(__file__).parent / "data" / "chat_templates"
GOLDEN = json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
NOW = datetime.fromisoformat(GOLDEN["now"])
HELLO = [{"role": "user", "content": "Hello"}]
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def write(folder: Path, template: Any, form: str = "config") -> ChatTemplate:
    """A checkpoint's template, in one of the forms that there are."""
    settings: dict[str, Any] = {**TOKENS, "add_bos_token": True, "pad_token": None}
    if form == "file":
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        settings["chat_template"] = "another"  # the file comes first
    elif form == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
        settings["chat_template"] = "another"
    elif form == "list":
        settings["chat_template"] = [{"name": "other", "template": ""}, {"name": "default", "template": template}]
    elif form == "map":
        (folder / "special_tokens_map.json").write_text(json.dumps(TOKENS))
        settings = {"chat_template": template}
    else:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTemplate.read(folder)


@pytest.mark.parametrize("form", ["config", "file", "json", "list", "map"])
def test_templates_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    template = write(tmp_path, (DATA / "mixtral_like.jinja").read_text(encoding="utf-8"), form)
    conversation = GOLDEN["conversations"]["system"]
    assert template.render(**conversation) == GOLDEN["prompts"]["mixtral_like"]["system"]


@pytest.mark.parametrize("name", GOLDEN["prompts"])
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    template = write(tmp_path, (DATA / f"{name}.jinja").read_text(encoding="utf-8"))
    for case, expected in GOLDEN["prompts"][name].items():
        conversation = GOLDEN["conversations"][case]
        if expected is None:
            with pytest.raises(ValueError, match=r"cannot be applied: Roles must take turns"):
                template.render(**conversation, now=NOW)
        else:
            assert template.render(**conversation, now=NOW) == expected, case


def test_each_template_makes_several_prompts() -> None:
    for prompts in GOLDEN["prompts"].values():
        assert len({*prompts.values()}) >= 10


def test_a_sequence_is_what_it_is_in_jinja(tmp_path: Path) -> None:
    values = "'a', [1], [], messages, messages[0], {'a': 1}, 1, none, true"
    template = write(tmp_path, f"{{% for x in [{values}] %}}{{{{ 1 if x is sequence else 0 }}}}{{% endfor %}}")
    assert template.render(HELLO) == "111111000"


def test_a_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    template = write(tmp_path, named)
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[]) == "[]"


def test_further_templates_are_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with {{ tools | length }}")
    assert ChatTemplate.read(tmp_path).render(HELLO) == "plain"
    assert ChatTemplate.read(tmp_path).render(HELLO, tools=[{"name": "f"}]) == "with 1"


def test_a_template_reads_the_time_of_the_call(tmp_path: Path) -> None:
    before = datetime.now().year
    assert int(write(tmp_path, "{{ strftime_now('%Y') }}").render(HELLO)) in (before, datetime.now().year)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ raise_exception('no') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages[0].content.__class__.__mro__[0] }}",
        "{{ strftime_now.__self__.year }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ open('/etc/passwd') }}",
        "{% for x in %}",
        "{{ messages | nothing }}",
        "{{ missing.missing }}",
        "{% endgeneration %}",
    ],
)
def test_a_template_that_cannot_be_applied_is_one_line(source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer_config.json cannot be applied: ") as raised:
        write(tmp_path, source).render(HELLO)
    assert len(str(raised.value).splitlines()) == 1


LOOP = (
    "{% set ns = namespace(l=[1]) %}{% for i in range(36) %}{% set ns.l = ns.l + ns.l %}{% endfor %}{{ ns.l | length }}"
)


def test_memory_and_time_of_a_template_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 1.0)
    with pytest.raises(ValueError, match=r"cannot be applied: it must end within 1 s$"):
        write(tmp_path, LOOP).render(HELLO)
    large = "{% set ns = namespace(t='" + "a" * 1000 + "', l=[]) %}{% for i in range(5000) %}"
    large += "{% set ns.l = ns.l + [(ns.t * 1000) | tojson] %}{% endfor %}"
    monkeypatch.setattr(template_process, "SECONDS", 30.0)
    with pytest.raises(ValueError, match=r"cannot be applied: it must do with 1024 MiB of memory|ran out of fuel"):
        write(tmp_path, large).render(HELLO)


# What a template can name: its variables, their methods, functions, and what these have.
ROOTS = [
    "messages",
    "messages[0]",
    "messages[0].content",
    "strftime_now",
    "raise_exception",
    "('a' | tojson)",
    "namespace()",
]
REACHED = [
    "__class__", "__init__", "__globals__", "__builtins__", "__self__", "__call__", "__dict__", "__module__",
    "func", "func_globals", "f_globals", "gi_frame", "mro", "im_func", "sys", "os", "modules", "env", "state",
]  # fmt: skip


def test_a_template_reaches_no_python(tmp_path: Path) -> None:
    names = [f"{root}.{name}" for root in ROOTS for name in REACHED]
    names += [f"{root}['{name}']" for root in ROOTS for name in REACHED]
    names += [f"({root} | attr('{name}'))" for root in ROOTS for name in REACHED]
    source = "".join(f"{{% if {name} %}}{name} {{% endif %}}" for name in names)
    assert write(tmp_path, source).render(HELLO) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | join }}{{ lipsum }}",
        "{% for m in messages %}{{ loop.__class__ }}{{ loop.func }}{% endfor %}",
        "{{ __builtins__ }}{{ __import__ }}{{ self.__init__ }}{{ caller }}{{ get_flashed_messages }}",
    ],
)
def test_nothing_of_python_is_printed(source: str, tmp_path: Path) -> None:
    text = ""
    with contextlib.suppress(ValueError):
        text = write(tmp_path, source).render(HELLO)
    assert text == ""


def test_a_template_runs_where_nothing_of_this_process_is(tmp_path: Path) -> None:
    """The functions that it may call are in the other process, in which jmx and jax are not even imported."""
    source = Path(template_process.__file__).read_text()
    assert "import jmx" not in source
    assert "from jmx" not in source
    assert write(tmp_path, "{{ messages | tojson }}").render(HELLO) == json.dumps(HELLO)


def test_messages_must_be_values_of_json(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="must have values of JSON, and have a object"):
        write(tmp_path, "a").render([{"role": "user", "content": object()}])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": b"{"}, "tokenizer_config.json: must be JSON"),
        ({"tokenizer_config.json": b"[]"}, "tokenizer_config.json: must be an object"),
        ({"tokenizer_config.json": b"\xff"}, "tokenizer_config.json: must be UTF-8"),
        ({"tokenizer_config.json": b'{"chat_template": 3}'}, "`chat_template` must be a text, or a list"),
        ({"tokenizer_config.json": b'{"chat_template": [3]}'}, "`chat_template` must be a text, or a list"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "a"}]}'}, "`chat_template` must be a text, or a list"),
        ({"tokenizer_config.json": b'{"chat_template": [{"name": "a", "template": ""}]}'}, "named default, and has a"),
        ({"chat_template.jinja": b"\xff"}, "chat_template.jinja: must be UTF-8"),
        ({"special_tokens_map.json": b"3"}, "special_tokens_map.json: must be an object"),
    ],
)
def test_a_wrong_file_is_an_error(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate.read(tmp_path).render(HELLO)


@pytest.mark.parametrize("settings", [None, "{}"])
def test_a_checkpoint_without_a_template_is_one_line(settings: str | None, tmp_path: Path) -> None:
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(FileNotFoundError, match=r"has no chat template: neither chat_template.jinja") as raised:
        ChatTemplate.read(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


def test_without_minijinja_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = write(tmp_path, "a")
    monkeypatch.setitem(sys.modules, "minijinja", None)
    with pytest.raises(ImportError, match=r"pip install 'jmx-moe\[hf\]'"):
        template.render(HELLO)
