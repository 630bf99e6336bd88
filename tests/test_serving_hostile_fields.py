"""Values of every type in every field of a request, also in its parts: an answer, or an error that names the field."""

import asyncio
import json
from typing import Any

import pytest
import text_checkpoints
from test_serving_app import DONE, Client, ask

from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.stream import read_tokenizer
from jmx.serving.api import Service, chat, completions, make_app

pytest.importorskip("uvicorn")
LENGTH = 4096

# As JSON: some are no values that Python's json module writes.
VALUES = [
    *("null", "true", "0", "-1", "0.5", "-0.0", "1e999", "-1e999", "1e308", "1e-320", "9" * 4000, str(2**31)),
    *(str(2**63), str(2**64), '""', '"a"', r'"\ud800"', r'"\u0000"', '"é\u202e"', json.dumps("a" * 3000), "[]"),
    *("[null]", "[1]", '["a"]', '[1,"a",{}]', "[" * 500 + "]" * 500, "{}", '{"a":1}', r'{"\ud800":1}'),
    *('{"a":' * 500 + "1" + "}" * 500, json.dumps([1] * 20_000)),
]
COMPLETION = '{"model":"tiny","prompt":"ab","max_tokens":3,%s:%s}'
CHAT = '{"model":"tiny","messages":[{"role":"user","content":"a"}],"max_tokens":3,%s:%s}'
MESSAGES = '{"model":"tiny","max_tokens":3,"messages":[{"role":"user","content":"a"},%s,{"role":"user","content":"b"}]}'
TOOL = '[{"type":"function","function":{"name":"f","parameters":%s}}]'
SCHEMA = '{"type":"json_schema","json_schema":{"schema":%s}}'
PARTS = {
    "role": MESSAGES % '{"role":%s,"content":"a"}',
    "content": MESSAGES % '{"role":"user","content":%s}',
    "text": MESSAGES % '{"role":"user","content":[{"type":"text","text":%s}]}',
    "reasoning": MESSAGES % '{"role":"assistant","content":"a","reasoning_content":%s}',
    "calls": MESSAGES % '{"role":"assistant","tool_calls":%s}',
    "arguments": MESSAGES % '{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}',
    "parameters": CHAT % ('"tools"', TOOL),
    "properties": CHAT % ('"tools"', TOOL % '{"type":"object","properties":%s}'),
    "enum": CHAT % ('"tools"', TOOL % '{"type":"object","properties":{"a":{"type":"string","enum":%s}}}'),
    "format": CHAT % ('"response_format"', '{"type":%s}'),
    "schema": CHAT % ('"response_format"', SCHEMA),
    "const": CHAT % ('"response_format"', SCHEMA % '{"const":%s}'),
    "minimum": CHAT % ('"response_format"', SCHEMA % '{"type":"integer","minimum":%s}'),
    "pattern": CHAT % ('"response_format"', SCHEMA % '{"type":"string","pattern":%s}'),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    folder = text_checkpoints.write(tmp_path_factory.mktemp("hostile") / "tiny", "gpt_oss", layers=2)
    tokenizer, client = read_tokenizer(folder), Client(DONE)
    client.max_length = LENGTH
    its: Any = client
    size = tokenizer.get_vocab_size()
    return Service(its, "tiny", tokenizer, ChatTemplate.read(folder), frozenset({257}), size, 4)


def answers(service: Service, path: str, bodies: list[str]) -> list[tuple[int, Any]]:
    async def all_of_them() -> list[tuple[int, Any]]:
        app, found = make_app(service), []
        for body in bodies:
            status, _, content = await ask(app, body.encode(), path)
            assert status in (200, 400, 404), (body, status, content)
            assert status == 200 or len(content) < 2000
            found.append((status, None if status == 200 else json.loads(content)["error"]))
        return found

    service.metrics = type(service.metrics)()
    return asyncio.run(all_of_them())


@pytest.mark.parametrize("field", [*completions.FIELDS, "unknown", "", r"\ud800"])
def test_values_of_a_completion(service: Service, field: str) -> None:
    bodies = [COMPLETION % (f'"{field}"', value) for value in VALUES]
    if field in ("model", "prompt", "max_tokens"):
        whole = {"model": '"tiny"', "prompt": '"ab"', "max_tokens": "3"}
        others = ",".join(f'"{key}":{value}' for key, value in whole.items() if key != field)
        bodies = [f'{{{others},"{field}":{value}}}' for value in VALUES]
    found = answers(service, "/v1/completions", bodies)
    assert any(status != 200 for status, _ in found) or field == "user"
    assert all(error is None or error["param"] in (field, None) for _, error in found)


@pytest.mark.parametrize("field", [name for name in chat.FIELDS if name not in completions.FIELDS])
def test_values_of_a_chat(service: Service, field: str) -> None:
    others = '"messages":[{"role":"user","content":"a"}],' if field != "messages" else ""
    bodies = [f'{{"model":"tiny",{others}"{field}":{value}}}' for value in VALUES]
    found = answers(service, "/v1/chat/completions", bodies)
    assert any(status == 400 for status, _ in found)
    assert all(error is None or error["param"] in (field, None) for _, error in found)


@pytest.mark.costly
@pytest.mark.parametrize("part", PARTS)
def test_values_in_parts_of_a_chat(service: Service, part: str, capfd: pytest.CaptureFixture[str]) -> None:
    bodies = [PARTS[part].replace("%s", value) for value in VALUES]
    found = answers(service, "/v1/chat/completions", bodies)
    capfd.readouterr()  # llguidance writes why it panics
    assert any(status == 400 for status, _ in found)
    of = "messages" if part in [*PARTS][:6] else "tools" if "tools" in PARTS[part] else "response_format"
    assert all(error is None or error["param"] in (of, "messages", None) for _, error in found)
