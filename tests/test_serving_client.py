"""The server's side of an engine that hangs: the server goes on, and ends it."""

import asyncio
import threading
import time

import psutil
import pytest

from jmx.serving.client import EngineClient

pytestmark = pytest.mark.costly


def hangs() -> None:
    time.sleep(600)


def fails() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise ValueError("no weights")


def test_an_engine_that_fails_does_not_wait_for_its_threads() -> None:
    """Programs may be compiled in threads when weights turn out to be wrong."""

    async def run() -> list[str]:
        log: list[str] = []
        client = EngineClient(fails, 1 << 20, log.append)  # pyright: ignore[reportArgumentType]
        client.start()
        await asyncio.wait_for(client.ended.wait(), 120)
        await client.stop()
        return log

    assert asyncio.run(run()) == ["the engine stopped (ValueError: no weights)"]


def test_an_engine_that_reads_nothing_does_not_hold_the_server() -> None:
    """More requests than its pipe holds are sent and cancelled, and it is ended."""

    async def run() -> psutil.Process:
        client = EngineClient(hangs, 1 << 20, lambda _: None)  # pyright: ignore[reportArgumentType]
        client.start()
        client.status = "ready"
        process = psutil.Process(client.pid)
        asked = [client.generate(prompt=tuple(range(20_000)), max_new_tokens=1) for _ in range(40)]
        waiting = [asyncio.ensure_future(anext(its)) for its in asked]
        await asyncio.sleep(0.2)
        assert client.num_open == 40
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert client.num_open == 0
        await asyncio.wait_for(client.stop(), 60)
        return process

    assert not asyncio.run(run()).is_running()
