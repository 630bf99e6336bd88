"""The application: routes, and what is done for every request: access, bodies, errors, and clients that go away."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jmx.serving.api.body import read_object
from jmx.serving.api.chat import Chat
from jmx.serving.api.completions import Completion
from jmx.serving.api.errors import ApiError, unavailable
from jmx.serving.api.fields import Field, flag, read, text
from jmx.serving.api.generation import Generation, Update
from jmx.serving.api.service import Service

_PAGE = Path(__file__).with_name("page.html")
# The page has its own script and style, and may talk to this server only.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_CLOSED = 499  # this status is not read: the client is gone
# Ends of lines in Python's `str.splitlines`, by which some clients find events: JSON may have them in strings.
_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}


class Asked(Protocol):
    """A checked request of an endpoint: `Completion` or `Chat`."""

    values: dict[str, Any]
    generation: Generation

    def chunks(self, update: Update, created: dict[str, Any]) -> list[dict[str, Any]]: ...
    def usage_chunk(self, created: dict[str, Any]) -> dict[str, Any]: ...
    def whole(self, updates: list[Update], created: dict[str, Any]) -> dict[str, Any]: ...


def make_app(service: Service) -> Starlette:
    """The ASGI application of a service. There is no CORS: pages of other origins do not reach it."""
    service.metrics.watch(service.client)

    def route(path: str, endpoint: Callable[..., Awaitable[Response]], *methods: str, is_open: bool = False) -> Route:
        return Route(path, partial(_answered, service, endpoint, is_open), methods=list(methods))

    routes = [
        route("/v1/models", _models, "GET"),
        route("/v1/models/{name:path}", _model, "GET"),
        route("/v1/completions", partial(_generate, Completion), "POST"),
        route("/v1/chat/completions", partial(_generate, Chat), "POST"),
        route("/tokenize", _tokenize, "POST"),
        route("/metrics", _metrics, "GET"),
        route("/health", _health, "GET", is_open=True),
        route("/", _page, "GET", is_open=True),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
    app.router.redirect_slashes = False
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {path[:200]}: {error.detail}"
    routes = {route.path for route in request.app.routes}
    near = next((its for its in (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/")) if its in routes), path)
    if near != path:  # a client's base URL has no /v1, or has it twice
        message += f"; did you mean {near}?"
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()


async def _answered(
    service: Service, endpoint: Callable[..., Awaitable[Response]], is_open: bool, request: Request
) -> Response:
    """The endpoint's answer, or the error that it raises."""
    try:
        salt = b"" if is_open else service.check_access(request)
        response = await endpoint(service, request, salt)
    except ApiError as error:
        response = error.response()
    except ClientDisconnect:
        response = Response(status_code=_CLOSED)
    service.metrics.requests.labels(str(response.status_code)).inc()
    return response


async def _body(request: Request) -> dict[str, Any]:
    """The object of a POST. A page of another origin cannot send this content type without being asked first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"`Content-Type` (={kind[:50]!r}) must be application/json")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(415, f"`Content-Encoding` (={coding[:50]!r}) must not be given: bodies are not compressed")
    return await read_object(request)


async def _models(service: Service, request: Request, salt: bytes) -> Response:
    return JSONResponse({"object": "list", "data": [_of_model(service)]})


async def _model(service: Service, request: Request, salt: bytes) -> Response:
    service.check_model(request.path_params["name"])
    return JSONResponse(_of_model(service))


def _of_model(service: Service) -> dict[str, Any]:
    model = {"id": service.name, "object": "model", "created": service.started, "owned_by": "jmx"}
    return model | {"max_model_len": service.client.max_length, "vocab_size": service.vocab_size}


async def _tokenize(service: Service, request: Request, salt: bytes) -> Response:
    fields = {"model": Field(text), "prompt": Field(text), "add_special_tokens": Field(flag, False)}
    values = read(await _body(request), fields, required=("prompt",))
    if values["model"] is not None:
        service.check_model(values["model"])
    ids = service.encode("prompt", values["prompt"], add_special_tokens=values["add_special_tokens"])
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": service.client.max_length})


async def _metrics(service: Service, request: Request, salt: bytes) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _health(service: Service, request: Request, salt: bytes) -> Response:
    if service.client.status != "ready":
        raise unavailable(service.client.status)
    return JSONResponse({"status": "ready"})


async def _page(service: Service, request: Request, salt: bytes) -> Response:
    return HTMLResponse(await asyncio.to_thread(_PAGE.read_text, "utf-8"), headers=_PAGE_HEADERS)


async def _generate(
    kind: Callable[[Service, dict[str, Any], bytes], Asked], service: Service, request: Request, salt: bytes
) -> Response:
    service.check_ready()
    # Tokenizing, and a template's process, take longer than other requests should wait.
    asked = await asyncio.to_thread(kind, service, await _body(request), salt)
    created = {"created": int(time.time()), "model": service.name}
    if not asked.values["stream"]:
        return await _whole(asked, created, request)
    updates = asked.generation.updates()
    # An error before the first token has a status of its own.
    first = await _unless_gone(request, anext(updates))
    return _Stream(_events(asked, first, updates, created))


async def _whole(asked: Asked, created: dict[str, Any], request: Request) -> Response:
    """The answer in one piece."""

    async def collect() -> list[Update]:
        async with contextlib.aclosing(asked.generation.updates()) as updates:
            return [update async for update in updates]

    return JSONResponse(asked.whole(await _unless_gone(request, collect()), created))


async def _unless_gone[T](request: Request, work: Awaitable[T]) -> T:
    """What `work` returns. It is canceled when the client goes away, which raises ClientDisconnect."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(request.receive())  # the body was read: what follows is that the client went away
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _events(
    asked: Asked, first: Update, updates: AsyncGenerator[Update], created: dict[str, Any]
) -> AsyncGenerator[str]:
    """Server-sent events of an answer."""
    usage = bool(asked.values["stream_options"].get("include_usage"))
    extra: dict[str, Any] = {"usage": None} if usage else {}
    async with contextlib.aclosing(updates):
        try:
            update: Update | None = first
            while update is not None:
                for chunk in asked.chunks(update, created):
                    yield _event(chunk | extra)
                update = await anext(updates, None)
        except ApiError as error:
            yield _event(error.body())
            return
    if usage:
        yield _event(asked.usage_chunk(created))
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {content.translate(_LINE_ENDS)}\n\n"


class _Stream(StreamingResponse):
    """Events; the generator is closed when the response ends, for whatever reason."""

    def __init__(self, events: AsyncGenerator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self._events):
            await super().__call__(scope, receive, send)
