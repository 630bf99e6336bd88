"""Measures a running server: requests of random tokens from many users at a time, or at random times."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from jmx.util.checks import check_int


@dataclass(frozen=True)
class Target:
    """A server, and what each request asks of it.

    Args:
        url: such as http://127.0.0.1:8000.
        input: tokens of a prompt.
        output: tokens of an answer.
        key: of the API, or None.
        seed: of prompts and of times.

    Raises:
        ValueError: a URL that is not http, or lengths below 1.
    """

    url: str
    input: int = 1024
    output: int = 1024
    key: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("input", self.input, least=1)
        check_int("output", self.output, least=1)
        try:
            parts = urlsplit(self.url)
            is_right = parts.scheme == "http" and bool(parts.hostname) and (parts.port or 80) > 0
        except ValueError:
            is_right = False
        if not is_right:
            raise ValueError(f"`url` (={self.url!r}) must be http://HOST:PORT")


class Timed(NamedTuple):
    """One answer: when it was asked for, when each event with text came, in seconds, and its tokens."""

    asked: float
    events: list[float]
    tokens: int


@dataclass(frozen=True)
class Point:
    """One measurement.

    Args:
        users: requests at a time; None: requests come at random.
        rate: requests a second that come at random; None: each user asks again when its answer is complete.
        requests: answers that were measured.
        input, output: tokens of each prompt and answer.
        tok_s: tokens of all answers over the time from the first request to the last token.
        ttft_ms: from a request to its first token, the median and the 99th percentile.
        itl_ms: between two events of an answer, which may have several tokens, likewise.
        tpot_ms: of each token of an answer after the first event, on average over the answer, likewise of all answers.
    """

    users: int | None
    rate: float | None
    requests: int
    input: int
    output: int
    tok_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    tpot_ms: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(target: Target, *, users: int, requests: int) -> Point:
    """A closed loop: each of `users` asks again when its answer is complete, until `requests` were asked for.

    Raises:
        ConnectionError: the server does not answer, or with an error.
    """
    check_int("users", users, least=1)
    check_int("requests", requests, least=1)

    async def run(ask: Callable[[int], Awaitable[Timed]]) -> list[Timed]:
        numbers = iter(range(requests))

        async def user() -> list[Timed]:
            return [await ask(number) for number in numbers]

        return [timed for its in await asyncio.gather(*(user() for _ in range(users))) for timed in its]

    return _point(target, asyncio.run(_with_server(target, [users], run)), users, None)


def measure_rate(target: Target, *, rate: float, requests: int) -> Point:
    """Requests that come as a Poisson process of `rate` a second, whether or not others are complete.

    Raises:
        ValueError: a rate that is not positive.
        ConnectionError: the server does not answer, or with an error.
    """
    check_int("requests", requests, least=1)
    if not rate > 0:
        raise ValueError(f"`rate` (={rate}) must be positive")
    gaps = np.random.default_rng(target.seed).exponential(1 / rate, requests)
    times = np.cumsum(gaps) - gaps[0]

    async def run(ask: Callable[[int], Awaitable[Timed]]) -> list[Timed]:
        async def later(number: int) -> Timed:
            await asyncio.sleep(times[number])
            return await ask(number)

        return list(await asyncio.gather(*map(later, range(requests))))

    return _point(target, asyncio.run(_with_server(target, [], run)), None, rate)


async def _with_server(
    target: Target, seeds: list[int], run: Callable[[Callable[[int], Awaitable[Timed]]], Awaitable[list[Timed]]]
) -> list[Timed]:
    """What `run` returns, given a function that asks for the answer of a number.

    `seeds`, besides that of the target: another measurement's prompts would be in the server's cache.
    """
    model = json.loads(b"".join([line async for line in _lines(target, "GET", "/v1/models", None)]))["data"][0]
    numbers = np.random.default_rng([target.seed, 1, *seeds])
    prompts: dict[int, list[int]] = {}

    async def ask(number: int) -> Timed:
        ids = prompts.setdefault(number, numbers.integers(model["vocab_size"], size=target.input).tolist())
        body = {"model": model["id"], "prompt": ids, "max_tokens": target.output, "ignore_eos": True}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        asked, events, tokens = time.perf_counter(), [], 0
        async for line in _lines(target, "POST", "/v1/completions", json.dumps(body).encode()):
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if "error" in event:
                raise ConnectionError(event["error"]["message"])
            if event["choices"]:
                events.append(now)
            else:
                tokens = event["usage"]["completion_tokens"]
        if tokens != target.output:
            raise ConnectionError(f"an answer has {tokens} tokens, and {target.output} were asked for")
        return Timed(asked, events, tokens)

    return await run(ask)


async def _lines(target: Target, method: str, path: str, body: bytes | None) -> AsyncGenerator[bytes]:
    """The lines of an answer's body, as they come. ConnectionError if it is no answer or an error."""
    parts = urlsplit(target.url)
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, limit=1 << 24)
    except OSError as error:
        raise ConnectionError(f"{target.url} does not answer: {error}") from error
    try:
        head = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body is not None else []
        head += [f"Authorization: Bearer {target.key}"] if target.key else []
        writer.write("\r\n".join([*head, "", ""]).encode() + (body or b""))
        await writer.drain()
        status = (await reader.readline()).split()
        while (await reader.readline()).strip():
            pass
        ok = len(status) > 1 and status[1] == b"200"
        lines = []
        async for line in reader:  # sizes of chunks are lines, too, which callers ignore
            if ok:
                yield line
            lines.append(line[:500])
            del lines[5:]
        if not ok:
            raise ConnectionError(f"{target.url}{path}: {b' '.join(status + lines).decode(errors='replace')}")
    finally:
        writer.close()


def _point(target: Target, answers: list[Timed], users: int | None, rate: float | None) -> Point:
    first, last = min(its.asked for its in answers), max(its.events[-1] for its in answers)
    firsts = [its.events[0] - its.asked for its in answers]
    between = [gap for its in answers for gap in np.diff(its.events).tolist()] or [0.0]
    each = [(its.events[-1] - its.events[0]) / max(its.tokens - 1, 1) for its in answers]
    tokens = sum(its.tokens for its in answers)
    return Point(
        users,
        rate,
        len(answers),
        target.input,
        target.output,
        round(tokens / (last - first), 1),
        _percentiles(firsts),
        _percentiles(between),
        _percentiles(each),
    )


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{share}": round(1e3 * float(np.percentile(seconds, share)), 3) for share in (50, 99)}
