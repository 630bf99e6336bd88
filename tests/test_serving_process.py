"""The server's processes: signals, an engine that is killed, clients that are slow or go away, and long runs."""

import concurrent.futures
import json
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import text_checkpoints
from serving_process import FLAGS, Server, running, serving

psutil = pytest.importorskip("psutil")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

ASKED = {"model": "gpt_oss", "prompt": "The sea", "max_tokens": 100, "ignore_eos": True}


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Server]:
    with serving(tmp_path, "gpt_oss") as its:
        yield its


def test_sigterm_drains(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(server.post, "/v1/completions", ASKED) for _ in range(4)]
        while server.metric("jmx_prompt_tokens_total") < 4 * len(ASKED["prompt"]):  # a token of each byte
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        if not all(answer.done() for answer in answers):
            assert server.get("/health")[0] == 503
            assert server.post("/v1/completions", ASKED)[0] == 503
        for answer in answers:
            status, body = answer.result()
            assert (status, body["usage"]["completion_tokens"]) == (200, 100)
    assert server.process.wait(60) == 0


def test_a_second_signal_ends_at_once(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(40) as threads:
        answers = [threads.submit(server.post, "/v1/completions", ASKED | {"max_tokens": 150}) for _ in range(40)]
        while server.metric("jmx_requests_running") < 2:
            time.sleep(0.02)
        for number in (signal.SIGTERM, signal.SIGINT):  # two of one kind may come as one
            server.process.send_signal(number)
        assert server.process.wait(30) == 0
        assert any(answer.exception() or answer.result()[0] == 503 for answer in answers)


def test_a_signal_ends_a_server_that_is_not_ready(tmp_path: pathlib.Path) -> None:
    checkpoint = text_checkpoints.write(tmp_path / "gpt_oss", "gpt_oss", layers=2)
    with running([str(checkpoint), *FLAGS], tmp_path / "log.txt") as server:
        assert server.get("/health")[0] == 503
        engine = psutil.Process(server.engine_pid())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(8) == 0  # less than an engine has that serves requests
        engine.wait(8)


def test_an_engine_that_is_killed_is_started_once_more(server: Server) -> None:
    children = []
    for number in range(2):
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            stream = json.dumps(ASKED | {"max_tokens": 150}).encode()
            before = server.metric("jmx_prompt_tokens_total")
            answer = threads.submit(server.post, "/v1/completions", stream)
            while server.metric("jmx_prompt_tokens_total") <= before:
                time.sleep(0.02)
            children.append(server.engine_pid())
            os.kill(children[-1], signal.SIGKILL)
            if number == 0:
                status, body = answer.result()
                assert status == 503
                assert "the engine stopped" in body["error"]["message"]
        if number == 0:
            assert server.get("/health")[0] == 503
            server.wait_until("ready", 600)
            assert server.post("/v1/completions", ASKED)[0] == 200
    assert server.process.wait(60) == 1
    log = server.log.read_text()
    assert "is started again" in log
    assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in children)


def test_groups_of_devices_answer_alike(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight answers at a time from `dp=2,ep=2`, and each alone from one device."""
    asked = [ASKED | {"prompt": f"The sea {id}", "max_tokens": 40, "temperature": 0} for id in range(8)]
    with serving(tmp_path, "gpt_oss") as server:
        alone = [server.post("/v1/completions", its)[1]["choices"] for its in asked]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    with serving(tmp_path, "gpt_oss", "--mesh", "dp=2,ep=2", "--max-users", "4") as server:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            answers = [*threads.map(lambda its: server.post("/v1/completions", its)[1]["choices"], asked)]
        server.wait_until("idle")
    assert answers == alone


def test_a_server_that_is_killed_leaves_no_engine(server: Server) -> None:
    engine = psutil.Process(server.engine_pid())
    server.process.kill()
    server.process.wait()
    engine.wait(30)


def connections(server: Server, count: int, threads: int, read: int) -> None:
    """Streams that are closed after some bytes."""

    def one(number: int) -> None:
        body = json.dumps(ASKED | {"stream": True, "max_tokens": 140, "prompt": f"{number} and so on"}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=600) as sent:
            sent.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            sent.recv(read)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, range(count)))


def test_load(tmp_path: pathlib.Path) -> None:
    """200 clients, and a thousand connections that are dropped: no page is held, and memory is flat."""
    with serving(tmp_path, "gpt_oss", "--max-waiting", "400") as server:
        processes = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid())]
        with concurrent.futures.ThreadPoolExecutor(200) as threads:
            asked = ASKED | {"max_tokens": 4}
            statuses = [*threads.map(lambda _: server.post("/v1/completions", asked)[0], range(200))]
        assert statuses == [200] * 200
        connections(server, 200, 100, 300)
        server.wait_until("idle")
        before = [process.memory_info().rss for process in processes]
        connections(server, 1000, 100, 300)
        server.wait_until("idle", 120)
        after = [process.memory_info().rss for process in processes]
        assert all(new < old + (32 << 20) for old, new in zip(before, after, strict=True)), (before, after)


def test_slow_readers_delay_nobody(server: Server) -> None:
    body = json.dumps(ASKED | {"stream": True, "max_tokens": 150}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with slow:
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert server.post("/v1/completions", ASKED)[0] == 200
        server.wait_until("idle")  # its answer is complete, though no client reads it
        read = b""
        while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            read += slow.recv(512)


def test_soak(server: Server) -> None:
    """Ten minutes of requests of all kinds, some of which go away."""
    end, failures = time.monotonic() + 600, []

    def client(number: int) -> None:
        while time.monotonic() < end and not failures:
            asked = ASKED | {"prompt": f"{number} {time.monotonic()}", "max_tokens": 1 + number * 9, "temperature": 0.5}
            status, body = server.post("/v1/completions", asked)
            if status != 200 or body["usage"]["completion_tokens"] != asked["max_tokens"]:
                failures.append((status, body))
            connections(server, 1, 1, 200)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    memory = psutil.Process(server.engine_pid()).memory_info
    for thread in threads:
        thread.start()
    time.sleep(60)
    early = memory().rss
    for thread in threads:
        thread.join()
    assert not failures
    server.wait_until("idle")
    assert memory().rss < early + (64 << 20)
