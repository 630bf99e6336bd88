"""The server: an engine's process, an HTTP server in front of it, and their common end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable

import uvicorn

from jmx.serving.api import Service, make_app
from jmx.serving.api.rehearsal import rehearse
from jmx.serving.client import EngineClient

# How many connections may be open and idle besides those of requests.
_BACKLOG = 1024
# How long connections may take to close when the server ends: that of a client that does not read would stay open.
_SECONDS_TO_CLOSE = 2


class _Uvicorn(uvicorn.Server):
    """uvicorn, whose signals are the server's own business."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one.

    Raises:
        ValueError: the address cannot be used.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listening = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`--host` (={host!r}) is not an address of this machine: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ValueError(f"`--host` and `--port` ({host}:{port}) cannot be used: {error.strerror}") from error
    return listening


async def serve(
    make_service: Callable[[], Service], listening: socket.socket, log: Callable[[str], None], drain_seconds: float
) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine is lost. Returns the exit code, 0 after a signal.

    The first signal drains: no new requests are taken, and those that there are go on for `drain_seconds` at most. A
    second one ends them.

    Args:
        make_service: makes the service, whose engine is not started.
        listening: a socket.
        log: is called with a line for each change.
        drain_seconds: how long answers may take after a signal.
    """
    service = make_service()
    client: EngineClient = service.client
    config = uvicorn.Config(
        make_app(service),
        http="h11",  # which limits the size of headers
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_SECONDS_TO_CLOSE,
    )
    server = _Uvicorn(config)
    signals = 0
    asked_to_end, hurried = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        asked_to_end.set()
        if signals > 1:
            hurried.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    client.start()
    await rehearse(service)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    waits = [asyncio.ensure_future(event.wait()) for event in (asked_to_end, client.ended)]
    try:
        await asyncio.wait([serving, *waits], return_when=asyncio.FIRST_COMPLETED)
        if asked_to_end.is_set():
            log(f"ending: {client.num_open} requests go on")
            client.drain()
            await _drained(client, hurried, drain_seconds)
        server.should_exit = True
        server.force_exit = hurried.is_set()
        await client.stop()
        await serving
    finally:
        for task in (serving, *waits):
            task.cancel()
        await client.stop()
        listening.close()
    return 0 if asked_to_end.is_set() else 1


async def _drained(client: EngineClient, hurried: asyncio.Event, seconds: float) -> None:
    """Waits until no request is open, the time is over, or a second signal came."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while client.num_open and not hurried.is_set() and loop.time() < end:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurried.wait(), 0.05)
