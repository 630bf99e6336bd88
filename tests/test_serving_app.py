"""The application over an engine that is not there: what a request costs before, and when, its tokens come."""

import asyncio
import json
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import text_checkpoints
from child_environment import importing

from jmx.cli.serving import IdTokenizer
from jmx.serving import server
from jmx.serving.api import Service, body, make_app
from jmx.serving.engine import Output

pytest.importorskip("uvicorn")

TOKENIZER = text_checkpoints.make_tokenizer(("<s>", "</s>"))
ASKED = {"model": "tiny", "prompt": "ab", "max_tokens": 3}
LENGTH = 64


class Client:
    """An engine's client, whose requests get tokens of `outputs`, or wait for ever.

    Args:
        outputs: of each request; None: there are none.
    """

    status, report, max_length = "ready", None, LENGTH

    def __init__(self, outputs: list[Output] | None):
        self.outputs, self.num_open, self.asked, self.cancelled = outputs, 0, 0, 0

    async def generate(self, **_: Any) -> AsyncGenerator[list[Output]]:
        self.num_open, self.asked = self.num_open + 1, self.asked + 1
        try:
            if self.outputs is None:
                await asyncio.Event().wait()
            for output in self.outputs or []:
                yield [output]
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.num_open -= 1


DONE = [Output(0, 64), Output(0, 65), Output(0, 66, None, "length")]


def app(outputs: list[Output] | None = None, *, max_open: int = 4, tokenizer: Any = TOKENIZER) -> tuple[Any, Client]:
    client: Any = Client(outputs)
    return make_app(Service(client, "tiny", tokenizer, None, frozenset({257}), 258, max_open)), client


async def ask(
    its: Any, content: Any, path: str = "/v1/completions", method: str = "POST", *, leaves: float | None = None
):
    """Status, headers and body of an answer. The client goes away after `leaves` seconds."""
    data = [content if isinstance(content, bytes) else json.dumps(content).encode()]
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "asgi": {"spec_version": "2.3"}}
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if data:
            return {"type": "http.request", "body": data.pop()}
        await asyncio.sleep(3600 if leaves is None else leaves)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await its(scope, receive, send)
    found = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], dict(sent[0]["headers"]), found


def answer(its: Any, *arguments: Any) -> tuple[int, dict[bytes, bytes], Any]:
    status, headers, found = asyncio.run(ask(its, *arguments))
    return status, headers, json.loads(found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_before_the_first_token_ends_its_request(stream: bool) -> None:
    its, client = app()
    status, *_ = asyncio.run(ask(its, ASKED | {"stream": stream}, leaves=0.05))
    assert (status, client.asked, client.cancelled, client.num_open) == (499, 1, 1, 0)


def test_the_queue_has_as_many_places_as_it_should() -> None:
    """Also for requests that are read at the same time."""

    async def many(its: Any, client: Client) -> list[Any]:
        asked = [asyncio.ensure_future(ask(its, ASKED)) for _ in range(12)]
        while client.num_open < 4 or sum(task.done() for task in asked) < 8:
            await asyncio.sleep(0.01)
        for task in asked:
            task.cancel()
        return [task.result() for task in asked if task.done()]

    refused = asyncio.run(many(*app()))
    assert len(refused) == 8
    for status, headers, _ in refused:
        assert (status, headers[b"retry-after"]) == (429, b"1")


@pytest.mark.parametrize("stream", [False, True])
def test_answers(stream: bool) -> None:
    its, _ = app(DONE)
    status, _, found = asyncio.run(ask(its, ASKED | {"stream": stream}))
    assert status == 200
    assert found.count(b'"finish_reason":"length"') == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/"])
def test_a_wrong_base_url_is_an_error_with_the_right_path(path: str) -> None:
    its, _ = app(DONE)
    status, _, found = answer(its, ASKED, path)
    assert (status, found["error"]["message"]) == (404, f"POST {path}: Not Found; did you mean /v1/chat/completions?")


@pytest.mark.parametrize(
    ("path", "method"), [("/nope", "GET"), ("/v1", "GET"), ("/v1/chat/completions", "GET"), ("", "GET")]
)
def test_other_paths_and_methods_have_no_such_hint(path: str, method: str) -> None:
    its, _ = app(DONE)
    status, _, found = answer(its, ASKED, path, method)
    assert status in (404, 405)
    assert "did you mean" not in found["error"]["message"]


def test_an_event_is_one_line_for_every_client() -> None:
    """Some split a stream at all that ends a line in Python."""
    text = "a\x0b\x0c\x1c\x85\u2028\u2029\r\né"
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    its, _ = app([*(Output(0, id) for id in ids), Output(0, 65, None, "length")])
    status, _, found = asyncio.run(ask(its, ASKED | {"stream": True, "max_tokens": 30}))
    assert status == 200
    *lines, done = [line for line in found.decode().splitlines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["choices"][0]["text"] for event in events).startswith(text)
    assert done == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [[], DONE[:1]])
def test_an_answer_that_can_fit_no_grammar_is_an_error(stream: bool, first: list[Output]) -> None:
    its, _ = app([*first, Output(0, None, None, "error")])
    status, _, found = asyncio.run(ask(its, ASKED | {"stream": stream}))
    assert status == (200 if stream and first else 400)
    assert b'"param":"response_format"' in found
    assert b"[DONE]" not in found


KEYS = ",".join(f'"k{number}": 1' for number in range(100_000))


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        (f'{{{KEYS}, "k99999": 2}}'.encode(), None, "the key 'k99999' is there twice"),
        (f"{{{KEYS}}}".encode(), "k0", "is not a field"),
        (json.dumps({"a" * 4_000_000: 1}).encode(), "a" * 50 + "...", "is not a field"),
        (ASKED | {"prompt": "ab" * 1_000_000}, "prompt", "(of 2000000 characters) must have at most"),
        (ASKED | {"prompt": "a" * LENGTH}, "prompt", f"(of {LENGTH} tokens) must have at most {LENGTH - 1}"),
        (ASKED | {"prompt": [1] * 1_000_000}, "prompt", "(of 1000000 tokens) must have at most"),
        (ASKED | {"prompt": [1, -1]}, "prompt", "(with -1) must have ids of at least 0"),
        (ASKED | {"prompt": [2**70]}, "prompt", "must be in 0..257"),
        (ASKED | {"stop": ["a" * 1025]}, "stop", "(of 1025 characters) must have strings of at most 1024"),
        (ASKED | {"stop": 1}, "stop", "(=1) must be a string, or a list of strings"),
        (ASKED | {"bad_words": ["a" * 1025]}, "bad_words", "at most 1024"),
        (ASKED | {"logit_bias": {"1": "-100"}}, "logit_bias", "(='-100') must be -100"),
        (b"[" * 4_000_000, None, "fewer levels"),
        (ASKED | {"\ud800": 1}, "\\ud800", "`\\ud800` is not a field"),
        (ASKED | {"stream_options": {"\ud800": 1}}, "stream_options", "`\\ud800` is not a field"),
        (ASKED | {"seed": 10**4000}, "seed", "..."),
    ],
    ids=lambda value: str(value)[:30],
)
def test_large_and_wrong_bodies_take_little_time(content: Any, field: str | None, message: str) -> None:
    its, client = app()
    before = time.process_time()
    status, _, found = answer(its, content)
    assert (status, found["error"]["param"]) == (400, field)
    assert message in found["error"]["message"]
    assert len(found["error"]["message"]) < 1100
    assert time.process_time() - before < 5
    assert client.asked == 0


def test_others_are_answered_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on, parse = threading.Event(), threading.Event(), body.parse

    def held(data: bytes) -> Any:
        reading.set()
        assert go_on.wait(60)
        return parse(data)

    async def both() -> tuple[int, int]:
        its, _ = app(DONE)
        with monkeypatch.context() as patch:
            patch.setattr(body, "parse", held)
            large = asyncio.ensure_future(ask(its, ASKED | {"user": "a" * 300_000}))
            while not reading.is_set():
                await asyncio.sleep(0.01)
        small = await ask(its, ASKED)
        assert not large.done()
        go_on.set()
        return small[0], (await large)[0]

    assert asyncio.run(both()) == (200, 200)


def test_wrong_chats_are_errors() -> None:
    both = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    its, _ = app()
    status, _, found = answer(its, both | {"max_completion_tokens": 4}, "/v1/chat/completions")
    assert (status, found["error"]["param"]) == (400, "max_tokens")
    assert found["error"]["message"].startswith("`max_tokens` (=3) must be `max_completion_tokens` (=4)")
    status, _, found = answer(its, both | {"messages": [{"role": "user"}]}, "/v1/chat/completions")
    assert "`messages[0]` (of the role 'user') must have `content`" in found["error"]["message"]


def test_models_paths_and_methods() -> None:
    its, _ = app()
    listed = answer(its, b"", "/v1/models", "GET")[2]["data"]
    assert answer(its, b"", "/v1/models/tiny", "GET")[2] == listed[0]
    for path in ("/v1/models/other", "/v1/models/", "/v1/completions/", "/v1"):
        assert answer(its, b"", path, "GET")[0] == 404
    status, headers, _ = answer(its, b"", "/v1/completions", "PUT")
    assert (status, headers[b"allow"]) == (405, b"POST")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_random_weights_have_no_texts(path: str) -> None:
    its, _ = app(DONE, tokenizer=IdTokenizer())
    status, _, found = answer(its, {"model": "tiny", "prompt": "a text"}, path)
    assert (status, found["error"]["param"]) == (400, "prompt")
    assert "token ids" in found["error"]["message"]
    status, _, found = answer(its, ASKED | {"prompt": [1, 2]})
    assert (status, found["choices"][0]["text"]) == (200, " 64 65 66")


def test_a_client_that_stops_in_the_middle_of_its_request_does_not_delay_the_end() -> None:
    class Ended(Client):
        def __init__(self) -> None:
            super().__init__(DONE)
            self.ended = asyncio.Event()

        def start(self) -> None: ...
        def drain(self) -> None: ...
        async def stop(self) -> None: ...

    def service() -> Any:
        client: Any = Ended()
        return Service(client, "tiny", TOKENIZER, None, frozenset({257}), 258, 4)

    async def run() -> int:
        listening = server.listen("127.0.0.1", 0)
        address = listening.getsockname()[:2]
        serving = asyncio.ensure_future(server.serve(service, listening, lambda _: None, 60))
        reader, writer = await asyncio.open_connection(*address)
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode())
        await reader.readline()  # the server reads the body
        signal.raise_signal(signal.SIGTERM)
        code = await asyncio.wait_for(serving, 20)
        writer.close()
        return code

    assert asyncio.run(run()) == 0


REHEARSED = """import asyncio, sys
from test_serving_app import ASKED, DONE, LENGTH, TOKENIZER, Client, Service, app, ask
from jmx.serving.api.rehearsal import rehearse

async def main():
    its, client = app(DONE)[0], Client(DONE)
    service = Service(client, "tiny", TOKENIZER, None, frozenset({257}), 258, 4, ("a" * 16,))
    modules = [{*sys.modules}]
    await rehearse(service)
    assert (client.asked, service.keys) == (0, ("a" * 16,))
    assert b"jmx_new_tokens_total 0.0" in service.metrics.text()
    modules.append({*sys.modules})
    status, _, found = await ask(its, ASKED | {"stream": True})
    assert status == 200 and b"[DONE]" in found
    modules.append({*sys.modules})
    assert modules[0] < modules[1] == modules[2], modules[2] - modules[1]

asyncio.run(main())
"""


@pytest.mark.costly
def test_the_first_request_imports_nothing() -> None:
    command = [sys.executable, "-c", REHEARSED]
    environment = importing(pathlib.Path(__file__).parent, pathlib.Path.cwd())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
