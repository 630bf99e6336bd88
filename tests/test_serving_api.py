"""The API of a running server, by the `openai` client and by plain HTTP: answers, streams, errors and limits."""

import concurrent.futures
import contextlib
import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving_process import Server, serving

from jmx import cli
from jmx.serving import load

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.costly

MODEL = "gpt_oss"
KEY = "a-key-of-24-characters-x"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), MODEL, "--max-waiting", "30", key=KEY) as its:
        yield its


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as its:
        yield its


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sea salty?"}]


def test_models(client) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by, model.max_model_len) == (MODEL, "jmx", 256)


def test_completions_stream_what_they_return_whole(client) -> None:
    asked = {"model": MODEL, "prompt": "The sea is", "max_tokens": 20, "temperature": 1.2, "seed": 5}
    whole = client.completions.create(**asked)
    assert whole.usage.prompt_tokens == 10
    assert whole.usage.completion_tokens <= 20
    chunks = [*client.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    ids = client.completions.create(**asked | {"prompt": list(b"The sea is")})
    assert ids.usage.prompt_tokens == 10


def test_greedy_answers_do_not_depend_on_others(client) -> None:
    asked = {"model": MODEL, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    prompts = [f"{word} and so on" for word in ("one", "two", "three", "four", "five", "six")]
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        together = [
            *threads.map(lambda prompt: client.completions.create(prompt=prompt, **asked).choices[0].text, prompts)
        ]
    assert together == alone


def test_chat_streams_what_it_returns_whole(client) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 24, "seed": 3, "temperature": 1}
    whole = client.chat.completions.create(**asked)
    chunks = [*client.chat.completions.create(**asked, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == (whole.choices[0].message.content or "")
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    assert whole.usage.prompt_tokens > 20


def test_log_probabilities(client) -> None:
    asked = {"model": MODEL, "prompt": "The sea is", "max_tokens": 6, "temperature": 0}
    found = client.completions.create(**asked, logprobs=3).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) <= 6
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert max(top.values()) == top[token] == value <= 0
        assert len(top) <= 3


def test_stop_strings_and_forbidden_tokens(client) -> None:
    asked = {"model": MODEL, "prompt": "The sea is", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[3:5]
    stopped = client.completions.create(**asked, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    first = text[0]
    if first.isascii():
        other = client.completions.create(**asked, extra_body={"bad_words": [first], "ignore_eos": True})
        assert not other.choices[0].text.startswith(first)


def test_prefixes_are_reported(client) -> None:
    asked = {"model": MODEL, "prompt": "A long beginning, " * 4 + str(random.random()), "max_tokens": 1}
    cached = [client.completions.create(**asked).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached[1] >= 64 > cached[0] - 64
    assert cached[1] % 16 == 0


def test_tokenize_health_and_metrics(server: Server) -> None:
    status, found = server.post("/tokenize", {"prompt": "aé"})
    assert (status, found["count"]) == (200, 3)
    assert server.get("/health") == (200, b'{"status":"ready"}')
    assert server.metric("jmx_ready") == 1
    assert server.metric("jmx_requests_total", '{status="200"}') >= 1
    status, page = server.get("/")
    assert status == 200
    assert b"<!doctype html>" in page


WRONG = [
    ({"temprature": 1}, 400, "temprature", "did you mean `temperature`"),
    ({"temperature": 3}, 400, "temperature", "must be in 0..2"),
    ({"temperature": "1"}, 400, "temperature", "must be a number"),
    ({"top_p": 0}, 400, "top_p", "must be above 0"),
    ({"top_k": 0}, 400, "top_k", "at least 1"),
    ({"max_tokens": 0}, 400, "max_tokens", "must be at least 1"),
    ({"max_tokens": 1000}, 400, "max_tokens", "must be at most"),
    ({"n": 2}, 400, "n", "must be 1"),
    ({"echo": True}, 400, "echo", "must be False"),
    ({"logit_bias": {"5": 2}}, 400, "logit_bias", "must be -100"),
    ({"logit_bias": {"999999": -100}}, 400, "logit_bias", "must be in 0.."),
    ({"stop": [""]}, 400, "stop", "no empty string"),
    ({"stop": ["a"] * 17}, 400, "stop", "at most 16"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "`stream` only"),
    ({"prompt": []}, 400, "prompt", "at least one token"),
    ({"prompt": ["a", "b"]}, 400, "prompt", "a request for each prompt"),
    ({"prompt": [10**6]}, 400, "prompt", "must be in 0.."),
    ({"prompt": "a" * 256}, 400, "prompt", "(of 256 tokens) must have at most 255"),
    ({"prompt": "\ud800"}, 400, "prompt", "must be text"),
    ({"prompt": None}, 400, "prompt", "must be given"),
    ({"seed": 1.5}, 400, "seed", "must be an integer"),
    ({"bad_words": ["more than one token"]}, 400, "bad_words", "of one token"),
    ({"model": "other"}, 404, "model", "must be 'gpt_oss'"),
]


@pytest.mark.parametrize(("change", "status", "field", "message"), WRONG, ids=[str(case[0])[:40] for case in WRONG])
def test_wrong_fields_are_errors(server: Server, change, status, field, message) -> None:
    got, answer = server.post("/v1/completions", {"model": MODEL, "prompt": "a"} | change)
    assert (got, answer["error"]["param"]) == (status, field)
    assert message in answer["error"]["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"messages": []}, "messages", "must have at least one message"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "messages", "`role` (='narrator') must be 'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            *("messages", "`content[1].type` (='image_url') must be 'text': the model reads text"),
        ),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages", "`type` must be given"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages", "`content[0]` (a str) must be an object"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"tool_choice": "required"}, "tool_choice", "must be"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "`name` must be given"),
        ({"prompt": "a"}, "prompt", "is not a field"),
    ],
)
def test_wrong_chats_are_errors(server: Server, change, field, message) -> None:
    got, answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES} | change)
    assert (got, answer["error"]["param"]) == (400, field)
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'"\xc3"',
        b"null",
        b"1e999",
    ],
)
def test_bodies_that_are_no_object_are_errors(server: Server, body: bytes) -> None:
    status, answer = server.post("/v1/completions", body)
    assert status == 400
    assert "the body must be" in answer["error"]["message"]


def test_keys_methods_paths_and_types(server: Server) -> None:
    asked = {"model": MODEL, "prompt": "a"}
    assert server.post("/v1/completions", asked, Authorization="Bearer wrong")[0] == 401
    assert server.post("/v1/completions", asked, Authorization=f"Basic {KEY}")[0] == 401
    assert server.post("/v1/completions", asked, **{"Content-Type": "text/plain"})[0] == 415
    assert server.post("/v1/completions", asked, **{"Content-Encoding": "gzip"})[0] == 415
    assert server.post("/v1/none", asked)[0] == 404
    assert server.get("/v1/completions")[0] == 405
    server_headers, server.headers = server.headers, {}
    try:
        assert server.get("/v1/models")[0] == 401
        assert server.get("/metrics")[0] == 401
        assert server.get("/health")[0] == 200
    finally:
        server.headers = server_headers


def test_large_bodies_are_refused_while_they_arrive(server: Server) -> None:
    """One that declares its size is refused before it arrives, and another one when it has reached the limit."""
    headers = f"Host: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    for rest, body in ((f"Content-Length: {9 << 20}", b""), ("Transfer-Encoding: chunked", chunk * 130)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sent:
            sent.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}{rest}\r\n\r\n".encode())
            with contextlib.suppress(OSError):
                sent.sendall(body)
            answer = http.client.HTTPResponse(sent)
            answer.begin()
            assert answer.status == 413


def test_clients_that_go_away_free_their_pages(server: Server) -> None:
    body = {"model": MODEL, "prompt": "The sea", "max_tokens": 150, "ignore_eos": True}
    data = [json.dumps(body | {"stream": stream}).encode() for stream in (True, False)]
    for number in range(6):
        headers = server.headers | {"Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", data[number % 2], headers)
        if number % 2 == 0:
            connection.getresponse().read(40)
        else:
            time.sleep(0.05)
        connection.close()
    server.wait_until("idle")
    assert server.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})[0] == 200


def test_a_full_queue_is_an_error(server: Server) -> None:
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 60, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(50) as threads:
        answers = [*threads.map(lambda _: server.post("/v1/completions", asked), range(50))]
    statuses = [status for status, _ in answers]
    assert {*statuses} <= {200, 429}
    assert statuses.count(200) >= 32
    server.wait_until("idle")


def test_a_server_is_measured(server: Server, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    target = load.Target(server.url, input=20, output=5, key=KEY)
    closed = load.measure(target, users=3, requests=7)
    assert (closed.users, closed.rate, closed.requests, closed.input, closed.output) == (3, None, 7, 20, 5)
    assert closed.tok_s > 0
    assert 0 < closed.ttft_ms["p50"] <= closed.ttft_ms["p99"]
    # Tokens that a busy machine delivers at once have no time between them.
    assert 0 <= closed.itl_ms["p50"] <= closed.itl_ms["p99"]
    assert 0 <= closed.tpot_ms["p50"] <= closed.tpot_ms["p99"]
    assert load.measure_rate(target, rate=50, requests=4).rate == 50
    monkeypatch.setenv("JMX_API_KEY", KEY)
    flags = ["--users", "1", "--requests", "2", "--input", "3", "--output", "4", "--json"]
    assert cli.main(["bench", "serve", server.url, *flags]) == 0
    assert json.loads(capsys.readouterr().out)[0]["output"] == 4
    with pytest.raises(ConnectionError, match="401"):
        load.measure(load.Target(server.url, 2, 2, key="wrong"), users=1, requests=1)
    with pytest.raises(ConnectionError, match="must be at most"):
        load.measure(load.Target(server.url, 2, 1000, key=KEY), users=1, requests=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": "ftp://here"}, "`url`"),
        ({"url": "http://here:x"}, "`url`"),
        ({"url": "http://here", "input": 0}, "`input`"),
        ({"url": "http://here", "output": 1.5}, "`output`"),
    ],
)
def test_wrong_targets_are_errors(given, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        load.Target(**given)


def mutated(rng: random.Random) -> bytes:
    """A body of a request with something wrong in it, or not."""
    values = [
        None,
        True,
        -1,
        0,
        1,
        2**70,
        1e308,
        0.5,
        "",
        "a",
        "\ud83d",
        [],
        [1],
        ["a"],
        {},
        {"a": 1},
        [[[]]],
        "a" * 300,
    ]
    body = {"model": MODEL, "prompt": "a", "messages": MESSAGES, "max_tokens": 1}
    names = ["temperature", "top_p", "stop", "seed", "logprobs", "tools", "stream_options", "logit_bias", "x", "n"]
    for _ in range(rng.randrange(4)):
        body[rng.choice([*body, *names])] = rng.choice(values)
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(data))
        data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(data)


def fuzz(server: Server, count: int, seed: int) -> None:
    rng = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    for number in range(count):
        body, path = mutated(rng), rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
        connection.request("POST", path, body, server.headers | {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status in (200, 400, 404), (number, path, body, answer.status, text)
        if answer.status != 200:
            assert json.loads(text)["error"]["message"]
    connection.close()
    server.wait_until("idle")


def test_fuzzed_bodies_are_errors_or_answers(server: Server, rng) -> None:
    fuzz(server, 60, int(rng.integers(2**32)))


@pytest.mark.slow
def test_many_fuzzed_bodies(server: Server, rng) -> None:
    fuzz(server, 10_000, int(rng.integers(2**32)))
