"""A server of a small checkpoint, `jmx serve`, in processes of its own."""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import text_checkpoints

ROOT = pathlib.Path(__file__).parents[1]
# Few programs, of small shapes: compiling takes most of the time of a test.
FLAGS = ("--dtype", "float32", "--page", "16", "--max-users", "2", "--max-length", "256", "--cache-tokens", "768")
SECONDS_TO_START = 600


@dataclass
class Server:
    """A running server.

    Args:
        process: of the server; the engine is its child.
        log: a file of its stderr.
        port: where it listens, at 127.0.0.1.
    """

    process: subprocess.Popen[bytes]
    log: pathlib.Path
    port: int
    key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        return self.send(urllib.request.Request(self.url + path, headers=self.headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status, and the object in the answer, of a POST of bytes or of an object."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        its = {"Content-Type": "application/json"} | self.headers | headers
        status, answer = self.send(urllib.request.Request(self.url + path, data, its))
        return status, json.loads(answer) if answer else None

    @staticmethod
    def send(request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def metric(self, name: str, labels: str = "") -> float:
        """A number of /metrics."""
        text = self.get("/metrics")[1].decode()
        found = re.search(rf"^{re.escape(name + labels)} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def wait_until(self, what: str, seconds: float = 60) -> None:
        """Waits until the server is "ready", or "idle": no page of the cache is in use."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200 and (what == "ready" or self.pages() == 0):
                    return
            time.sleep(0.1)
        raise AssertionError(f"not {what} after {seconds} s: {self.log.read_text()}")

    def pages(self) -> float:
        """Pages of all pools that requests use, as the engine reported last."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("jmx_pages_used{"))

    def engine_pid(self) -> int:
        """The engine's process."""
        import psutil

        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))


@contextlib.contextmanager
def serving(folder: pathlib.Path, name: str, *flags: str, key: str | None = None) -> Iterator[Server]:
    """A server of a checkpoint of `text_checkpoints`, in a folder for its files, until the block ends."""
    checkpoint = folder / name
    if not checkpoint.exists():
        text_checkpoints.write(checkpoint, name, layers=2 if name == "gpt_oss" else None)
    with running([str(checkpoint), *FLAGS, "--prompt-tokens", "16", *flags], folder / "log.txt", key) as server:
        server.wait_until("ready", SECONDS_TO_START)
        yield server


@contextlib.contextmanager
def running(arguments: Sequence[str], log: pathlib.Path, key: str | None = None) -> Iterator[Server]:
    """`jmx serve` with these arguments at a free port, from when it listens."""
    command = [sys.executable, "-m", "jmx.cli", "serve", *arguments, "--port", "0"]
    environment = os.environ | ({} if key is None else {"JMX_API_KEY": key})
    with log.open("wb") as opened:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=opened, stdout=opened)
    try:
        end = time.monotonic() + SECONDS_TO_START
        while not (found := re.search(r"http://127\.0\.0\.1:(\d+)/", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        yield Server(process, log, int(found[1]), key, headers)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
