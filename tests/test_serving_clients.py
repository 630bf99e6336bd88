"""What clients send besides the commonest fields: an answer, or an error that names the field and the rule."""

import asyncio
import json
import pathlib
from typing import Any

import pytest
import text_checkpoints
from test_serving_app import Client, ask

from jmx.models.text.chat_template import ChatTemplate
from jmx.models.text.stream import read_tokenizer
from jmx.serving.api import Service, make_app
from jmx.serving.engine import Output

pytest.importorskip("uvicorn")
USER = {"role": "user", "content": "a"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "its", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "content": "warm", "tool_call_id": "call_1"}


def service_of(folder: pathlib.Path, outputs: list[Output]) -> Service:
    client: Any = Client(outputs)
    client.max_length = 4096
    tokenizer = read_tokenizer(folder)
    size = tokenizer.get_vocab_size()
    return Service(client, "tiny", tokenizer, ChatTemplate.read(folder), frozenset({257}), size, 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    parent = tmp_path_factory.mktemp("clients")
    layers = {"gpt_oss": 2, "qwen3_moe": None}
    return {name: text_checkpoints.write(parent / name, name, layers=its) for name, its in layers.items()}


def post(service: Service, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, Any]:
    service.metrics = type(service.metrics)()
    status, _, content = asyncio.run(ask(make_app(service), {"model": "tiny"} | body, path))
    return status, content if body.get("stream") and status == 200 else json.loads(content)


def prompt(service: Service, body: dict[str, Any]) -> str:
    """The prompt that the engine gets of a chat."""
    asked: list[Any] = []
    its: Any = service.client
    generate = its.generate
    its.generate = lambda **request: asked.append(request) or generate(**request)
    status, answer = post(service, body)
    assert status == 200, answer
    return service.tokenizer.decode([*asked[0]["prompt"]], skip_special_tokens=False)


ENDS = [Output(0, 64), Output(0, 65, None, "length")]

# Whole bodies without `model`, and the field of the error or None.
BODIES: dict[str, tuple[dict[str, Any], str | None]] = {
    "all nulls": ({"messages": [USER], "tools": None, "stop": None, "functions": None, "audio": None}, None),
    "says who asks": (
        {"messages": [USER], "user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s"},
        None,
    ),
    "defaults of the service": (
        {"messages": [USER], "store": False, "service_tier": "auto", "modalities": ["text"], "n": 1, "logit_bias": {}},
        None,
    ),
    "no calls in a list": ({"messages": [USER, {"role": "assistant", "content": "b", "tool_calls": []}, USER]}, None),
    "keeps answers": ({"messages": [USER], "store": True}, "store"),
    "speaks": ({"messages": [USER], "modalities": ["text", "audio"]}, "modalities"),
    "older functions": ({"messages": [USER], "functions": [{"name": "f"}]}, "functions"),
    "usage of a stream": (
        {"messages": [USER], "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        None,
    ),
    "obfuscation": (
        {"messages": [USER], "stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options",
    ),
    "parts": (
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ]
        },
        None,
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "messages",
    ),
    "a message that was dumped whole": (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None}
                | {"function_call": None, "tool_calls": None},
                USER,
            ]
        },
        None,
    ),
    "a function": ({"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}, None),
    "a forced function": ({"messages": [USER], "tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    "a strict function": (
        {"messages": [USER], "tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]},
        "tools",
    ),
    "a call": (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT], "tools": [TOOL]},
        None,
    ),
    "a call without arguments": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "weather", "arguments": ""}}]},
                RESULT,
            ]
        },
        None,
    ),
    "arguments that are no text": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]},
            ]
        },
        "messages",
    ),
    "a variable that the template lacks": (
        {"messages": [USER], "chat_template_kwargs": {"nothing_reads_this": 1}},
        "chat_template_kwargs",
    ),
    "a long variable": ({"messages": [USER], "chat_template_kwargs": {"a" * 4_000_000: 1}}, "chat_template_kwargs"),
    "the template's own variable": (
        {"messages": [USER], "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
    ),
    "a token as a variable": ({"messages": [USER], "chat_template_kwargs": {"bos_token": "a"}}, "chat_template_kwargs"),
    "a number of tokens by both names": ({"messages": [USER], "max_tokens": 2, "max_completion_tokens": 2}, None),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_a_body_is_answered_or_refused_by_its_field(folders: dict[str, pathlib.Path], family: str, name: str) -> None:
    body, field = BODIES[name]
    status, found = post(service_of(folders[family], ENDS), body)
    assert status == (200 if field is None else 400), found
    if field is not None:
        assert found["error"]["param"] == field
        assert f"`{field}" in found["error"]["message"]


def test_what_a_template_leaves_out_is_an_error(folders: dict[str, pathlib.Path]) -> None:
    """gpt-oss' knows instructions in the first message only, and one call in a message; Qwen3's knows no effort."""
    oss, qwen = (service_of(folders[name], ENDS) for name in ("gpt_oss", "qwen3_moe"))
    late = {"messages": [USER, {"role": "system", "content": "b"}, USER]}
    status, found = post(oss, late)
    assert status == 400
    assert "leaves out `messages[1]` (of the role 'system')" in found["error"]["message"]
    assert "b" in prompt(qwen, late)
    two = [CALL, CALL | {"id": "call_2"}]
    both = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": two}, RESULT], "tools": [TOOL]}
    status, found = post(oss, both)
    assert status == 400
    assert "leaves out `messages[1].tool_calls[1]`" in found["error"]["message"]
    assert prompt(qwen, both).count('"name": "weather"') == 3
    assert "Reasoning: high" in prompt(oss, {"messages": [USER], "reasoning_effort": "high"})
    status, found = post(qwen, {"messages": [USER], "reasoning_effort": "high"})
    assert (status, found["error"]["param"]) == (400, "reasoning_effort")
    assert "does not read" in found["error"]["message"]


def test_variables_of_a_template(folders: dict[str, pathlib.Path]) -> None:
    qwen = service_of(folders["qwen3_moe"], ENDS)
    quiet = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}
    assert prompt(qwen, quiet).endswith("<think>\n\n</think>\n\n")
    assert "<think>" not in prompt(qwen, {"messages": [USER]})


def test_a_developer_is_the_system_where_a_template_knows_none(folders: dict[str, pathlib.Path]) -> None:
    body = {"messages": [{"role": "developer", "content": "Be brief."}, USER]}
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt(service_of(folders["qwen3_moe"], ENDS), body)
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in prompt(
        service_of(folders["gpt_oss"], ENDS), body
    )


@pytest.mark.parametrize("stream", [False, True])
def test_calls_end_after_one_where_none_may_be_parallel(folders: dict[str, pathlib.Path], stream: bool) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>\n'
    service = service_of(folders["qwen3_moe"], [])
    tags = "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
    service.tokenizer = text_checkpoints.make_tokenizer(tags)
    ids = service.tokenizer.encode("A moment. " + call % "Rome" + call % "Oslo", add_special_tokens=False).ids
    its: Any = service.client
    its.outputs = [*(Output(0, id) for id in ids), Output(0, 257, None, "stop")]
    asked = {"messages": [USER], "tools": [TOOL], "stream": stream, "parallel_tool_calls": False}
    for parallel, count in ((True, 2), (False, 1)):
        status, found = post(service, asked | {"parallel_tool_calls": parallel})
        text = found.decode() if stream else json.dumps(found)
        assert status == 200
        assert (text.count("Rome"), text.count("Oslo")) == (1, count - 1)
        assert '"finish_reason":"tool_calls"' in text.replace(": ", ":")
        assert stream or "A moment." in text
