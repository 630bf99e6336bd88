"""Requests that a server answers to itself while its engine starts.

What is imported and made once, a tenth of a second of work, is there when the first client asks.
"""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import ASGIApp

from jmx.serving.api.app import make_app
from jmx.serving.api.metrics import Metrics
from jmx.serving.api.service import Service
from jmx.serving.engine import Output

_PROMPTS = (
    ("/v1/completions", {"prompt": [0]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
)


async def rehearse(service: Service) -> None:
    """Answers a request of each kind, with tokens that no engine made. What a model does not take is an error, unread.

    Args:
        service: of the server; it is not changed.
    """
    client: Any = _Engine(service.client.max_length)
    app = make_app(dataclasses.replace(service, client=client, keys=(), metrics=Metrics()))
    for path, prompt in _PROMPTS:
        for stream in (False, True):
            body = {"model": service.name, "max_tokens": 2, "stream": stream} | prompt
            await _ask(app, path, json.dumps(body).encode())


class _Engine:
    """In place of an `EngineClient`: each request has two tokens."""

    status, report, num_open = "ready", None, 0

    def __init__(self, max_length: int):
        self.max_length = max_length

    async def generate(self, **_: Any) -> AsyncGenerator[list[Output]]:
        yield [Output(0, 0)]
        yield [Output(0, 0, None, "length")]


async def _ask(app: ASGIApp, path: str, body: bytes) -> None:
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    scope |= {"http_version": "1.1", "scheme": "http", "asgi": {"spec_version": "2.3", "version": "3.0"}}  # as uvicorn

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()  # it does not go away
        return parts.pop()

    async def send(_: Any) -> None:
        pass

    await app(scope, receive, send)
