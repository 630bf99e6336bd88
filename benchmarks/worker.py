"""A process that a benchmark measures in: it compiles, waits until it may use the device alone, and prints results.

Its first line of JSON on stdout says that it has compiled. A line on stdin then lets it run, and it prints a line of
JSON for each result. Other lines are those of libraries.
"""

import collections
import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

LIMITS = "limits"  # the system of the process that measures the machine


class Worker:
    """The process of a command. `name`: what it measures; `variables`: added to its environment."""

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None):
        pipe, environment = subprocess.PIPE, {**os.environ, **(variables or {})}
        self.name = name
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.stderr: collections.deque[str] = collections.deque(maxlen=5)
        self.failure: Exception | None = None
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line.rstrip())

    def line(self, until: float) -> dict[str, Any]:
        """The next line. TimeoutError if there is none in time, RuntimeError if the process ended."""
        try:
            line = self.lines.get(timeout=max(0.1, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError("killed: it printed nothing in time") from None
        if line is None:
            self.readers[1].join(timeout=5)
            raise RuntimeError(f"the process ended: {' '.join(self.stderr)[-200:]}")
        return json.loads(line)

    def wait_for_compiling(self, until: float) -> None:
        """Waits for the line that everything is compiled; if there is none, `failure` is the reason."""
        try:
            self.line(until)
        except (TimeoutError, RuntimeError) as error:
            self.failure = error

    def start(self) -> None:
        """Lets it run what it has compiled."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for reader in self.readers:
            reader.join(timeout=5)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
