"""Two processes with two devices each, by jax.distributed: the numbers of one, and an end when one of them dies."""

import contextlib
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from child_environment import importing

pytestmark = pytest.mark.costly

FILE = pathlib.Path(__file__).with_name("experts_process.py")
HEARTBEAT_S = 6
START_S = 180  # to import, connect and compile, on a loaded machine


class Pair(NamedTuple):
    """Two processes, and the files that they print to."""

    processes: list[subprocess.Popen[bytes]]
    outputs: list[pathlib.Path]

    def text(self, process: int) -> str:
        return self.outputs[process].read_text(errors="replace")

    def wait_for(self, word: str) -> None:
        """Until both have printed a word."""
        end = time.monotonic() + START_S
        while not all(word in self.text(i) for i in range(2)):
            ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            assert not ended, self.text(ended[0])
            assert time.monotonic() < end, self.text(0) + self.text(1)
            time.sleep(0.05)


@contextlib.contextmanager
def pair(folder: pathlib.Path, what: str, heartbeat_s: int) -> Iterator[Pair]:
    """Two processes that run `what`, which are killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = importing(FILE.parents[1], JAX_PLATFORMS="cpu")
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        started = Pair([], [])
        for i in range(2):
            started.outputs.append(folder / f"{i}.txt")
            out = stack.enter_context(started.outputs[i].open("wb"))
            command = [sys.executable, str(FILE), str(i), str(port), str(heartbeat_s), what]
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
            stack.callback(process.wait, 60)
            stack.callback(process.kill)
            started.processes.append(process)
        yield started


def test_two_processes_compute_and_rebalance_as_one_device(tmp_path: pathlib.Path) -> None:
    with pair(tmp_path / "pair", "compute", 100) as both:
        codes = [process.wait(START_S) for process in both.processes]
        for i, code in enumerate(codes):
            assert code == 0, both.text(i)
            lines = [line for line in both.text(i).splitlines() if line.startswith(("computed", "rebalanced"))]
            assert lines == ["computed ep dp", "computed ep", "rebalanced"]


def test_a_process_ends_when_the_other_is_killed(tmp_path: pathlib.Path) -> None:
    """Whether that one is the coordinator (0) or not: by an error, within the heartbeat's timeout and some seconds."""
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(pair(tmp_path / str(dead), "repeat", HEARTBEAT_S)) for dead in range(2)]
        for both in pairs:
            both.wait_for("ready")
        time.sleep(0.2)  # so that they are in the middle of a call
        for dead, both in enumerate(pairs):
            both.processes[dead].kill()
        for dead, both in enumerate(pairs):
            assert both.processes[1 - dead].wait(2 * HEARTBEAT_S + 10) != 0
            text = both.text(1 - dead)
            assert "Gloo" in text or "coordination" in text, text
