"""The server's side of the engine's process: starts it, sends requests, and hands out what comes back."""

import asyncio
import contextlib
import itertools
import multiprocessing
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

from jmx.serving import worker
from jmx.serving.engine import Generate, Output
from jmx.serving.worker import Cancel, Compiled, Failed, FromEngine, MakeEngine, Rejected, Report, Stop, ToEngine

# "loading": weights and programs are not ready. "failed": the engine's process ended, and is not started again.
Status = Literal["loading", "ready", "draining", "failed"]
RESTARTS = 1
_SECONDS_TO_STOP = 10.0


class EngineError(RuntimeError):
    """The engine's process ended, or cannot go on with a request."""


class RequestError(ValueError):
    """The engine does not take a request."""


class EngineClient:
    """An engine in a process of its own. All methods are for the thread of one event loop.

    Args:
        make_engine: what the process does first.
        max_length: the most tokens of a request, prompt and answer.
        log: is called with a line for each change of state.

    Attributes:
        status: of the engine.
        report: the last one; None until the engine is ready.
        progress: programs that are compiled, and all of them; (0, 0) before the first.
        num_open: requests that have not ended.
        pid: of the process; None before it is started.
    """

    def __init__(self, make_engine: MakeEngine, max_length: int, log: Callable[[str], None]):
        self.status: Status = "loading"
        self.report: Report | None = None
        self.progress = (0, 0)
        self.max_length = max_length
        self._make_engine, self._log = make_engine, log
        self._ids = itertools.count()
        self._queues: dict[int, asyncio.Queue[Output | Exception]] = {}
        self._restarts = RESTARTS
        self._process: Any = None
        self._starting: asyncio.Future[None] | None = None
        self._connection: Connection | None = None
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: str | None = None
        self._started = 0.0
        self.ended = asyncio.Event()

    @property
    def num_open(self) -> int:
        return len(self._queues)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process. It is started once more if it ends before it is stopped."""
        self._loop = asyncio.get_running_loop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        its: dict[str, Any] = {"target": worker.run, "args": (theirs, self._make_engine), "daemon": True}
        self._process = context.Process(**its, name="jmx-engine")
        self._started = time.monotonic()
        self._process.start()
        theirs.close()
        self._connection, self._failure, self.report = ours, None, None
        self._outbox = queue.SimpleQueue()
        of_threads = ("reader", self._read, (ours, self._loop)), ("writer", self._write, (ours, self._outbox))
        for name, target, arguments in of_threads:
            threading.Thread(target=target, args=arguments, name=f"jmx-engine-{name}", daemon=True).start()

    def _read(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """A thread: passes messages on to the event loop until the process is gone."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                try:
                    message: FromEngine = connection.recv()
                except (EOFError, OSError):
                    loop.call_soon_threadsafe(self._lost, connection)
                    return
                loop.call_soon_threadsafe(self._take, message)

    @staticmethod
    def _write(connection: Connection, outbox: "queue.SimpleQueue[ToEngine | None]") -> None:
        """A thread: sends messages. An engine that is busy, or hangs, does not read, and the event loop goes on."""
        while (message := outbox.get()) is not None:
            with contextlib.suppress(OSError):  # `_lost` is called for it
                connection.send(message)
        connection.close()  # by the thread that writes to it, since its number may then be that of another file

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, list):
            for output in message:
                self._put(output.id, output)
        elif isinstance(message, Report):
            self.report = message
            if self.status == "loading":
                self.status = "ready"
                self._log(f"the engine is ready after {time.monotonic() - self._started:.0f} s")
        elif isinstance(message, Compiled):
            self.progress = message.ready, message.of
            self._log(f"compiled {message.ready} of {message.of} programs")
        elif isinstance(message, Rejected):
            self._put(message.id, RequestError(message.message))
        elif isinstance(message, Failed):
            self._failure = message.message

    def _put(self, id: int, item: Output | Exception) -> None:
        if (its := self._queues.get(id)) is not None:
            its.put_nowait(item)

    def _lost(self, connection: Connection) -> None:
        """The process is gone: its requests are lost, and it is started once more."""
        if connection is not self._connection:
            return
        self._connection = None
        self._outbox.put(None)  # closes it
        if self.status == "draining" and not self._queues:
            self.ended.set()
            return
        why = self._failure or "its process was ended"
        for id in self._queues:
            self._put(id, EngineError(f"the engine stopped: {why}"))
        was_ready = self.status == "ready"
        if was_ready and self._restarts:
            self._restarts -= 1
            self._log(f"the engine stopped ({why}), and is started again")
            self.status, self.progress = "loading", (0, 0)
            self._starting = asyncio.ensure_future(self._start_again())
            return
        self._log(f"the engine stopped ({why})")
        self.status = "failed"
        self.ended.set()

    async def _start_again(self) -> None:
        """Starts the process when the last one has given back the device's memory, unless the server ends meanwhile."""
        await asyncio.to_thread(self._process.join)
        if self.status == "loading":
            self.start()

    def drain(self) -> None:
        """Takes no more requests. Those that there are go on."""
        if self.status != "failed":
            self.status = "draining"

    async def stop(self) -> None:
        """Ends the process, and with it all requests."""
        self.drain()
        if self._process is None:
            return
        if self.report is None:  # it reads no messages before it is ready
            self._process.kill()
        self._send(Stop())
        await asyncio.to_thread(self._process.join, _SECONDS_TO_STOP)
        if self._process.is_alive():
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    def _send(self, message: ToEngine) -> None:
        if self._connection is not None:
            self._outbox.put(message)

    async def generate(self, **request: Any) -> AsyncGenerator[list[Output]]:
        """The outputs of a request of `Generate`'s arguments without an id: at each time all that there are.

        If the generator is closed, the request ends.

        Raises:
            EngineError: the engine does not run, or stopped.
            RequestError: it does not take the request.
        """
        if self.status not in ("ready", "draining") or self._connection is None:
            raise EngineError("the engine is not ready")
        id = next(self._ids)
        found: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._queues[id] = found
        ended = False
        try:
            self._send(Generate(id, **request))
            while not ended:
                items = [await found.get()]
                while not found.empty():
                    items.append(found.get_nowait())
                for item in items:
                    if isinstance(item, Exception):
                        ended = True
                        raise item
                outputs = [item for item in items if isinstance(item, Output)]
                ended = outputs[-1].finish_reason is not None
                yield outputs
        finally:
            del self._queues[id]
            if not ended:
                self._send(Cancel(id))
