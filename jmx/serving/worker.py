"""The engine's process: launching a step holds Python's lock, which would delay what the HTTP server does."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from jmx.serving.engine import Engine, Generate, Output

# Seconds between two reports of what the engine does, while it is busy.
REPORT_PERIOD = 0.25


# Makes the engine, in its process: pickled, so a function of a module, or a `functools.partial` of one.
MakeEngine = Callable[[], Engine]


class Cancel(NamedTuple):
    """To the engine: the client of a request is gone."""

    id: int


class Stop(NamedTuple):
    """To the engine: its process is to end."""


class Compiled(NamedTuple):
    """From the engine: how many of its programs are ready."""

    ready: int
    of: int


class Report(NamedTuple):
    """From the engine: what it does, and has done.

    Args:
        waiting, running: requests.
        pages: of each pool, those in use, and all.
        steps, prompt_tokens, cached_tokens, preempted: see `engine.Statistics`.
        load: tokens of each expert, int (layers, E).
    """

    waiting: int
    running: int
    pages: list[tuple[int, int]]
    steps: int
    prompt_tokens: int
    cached_tokens: int
    preempted: int
    load: np.ndarray

    @classmethod
    def of(cls, engine: Engine) -> "Report":
        """Of an engine now."""
        its = engine.statistics
        done = its.steps, its.prompt_tokens, its.cached_tokens, its.preempted, its.load
        return cls(engine.num_waiting, engine.num_running, engine.pages, *done)


class Rejected(NamedTuple):
    """From the engine: a request that it does not take, and why."""

    id: int
    message: str


class Failed(NamedTuple):
    """From the engine: an error that ends its process."""

    message: str


ToEngine = Generate | Cancel | Stop
FromEngine = Compiled | Report | Rejected | Failed | list[Output]


def run(connection: Connection, make_engine: MakeEngine) -> None:
    """The process: makes the engine, compiles it, and then serves requests until it is stopped.

    It ends, too, when the process that started it is gone. Signals are the server's, which drains, and then stops it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        engine = make_engine()
        engine.warm_up(lambda ready, of: connection.send(Compiled(ready, of)))
        connection.send(Report.of(engine))
        _serve(connection, engine)
        return
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the other process has ended
        pass
    except Exception as error:
        traceback.print_exc()
        connection.send(Failed(f"{type(error).__name__}: {' '.join(str(error).split())}"))
    sys.stderr.flush()
    os._exit(1)  # threads that compile, or wait for other devices, would keep the process


def _serve(connection: Connection, engine: Engine) -> None:
    reported = time.monotonic()
    while True:
        while connection.poll(None if engine.is_idle else 0):
            message: ToEngine = connection.recv()
            if isinstance(message, Stop):
                return
            if isinstance(message, Cancel):
                engine.cancel(message.id)
            else:
                try:
                    engine.submit(message)
                except ValueError as error:
                    connection.send(Rejected(message.id, str(error)))
        if outputs := engine.step():
            connection.send(outputs)
        if engine.is_idle or time.monotonic() - reported > REPORT_PERIOD:
            connection.send(Report.of(engine))
            reported = time.monotonic()
