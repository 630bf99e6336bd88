"""A server's evening, by the scheduler alone: requests of a trace, and steps that take the time that a table gives.

    python -m benchmarks.serving_trace --minutes 10

No model runs. The times of steps of up to 1024 tokens are those of gpt-oss-120b's shape on one H200 (results and notes
in this folder), between which times are on straight lines of logarithms. What is measured is the scheduler: how long
requests wait, how evenly their tokens come, and how many are preempted, when bursts come and prompts are long and
short. It prints medians and 99th percentiles.
"""

import argparse
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jmx.serving.scheduling import Drawn, Plan, Settings, State, Submit, plan

# Milliseconds of a step by its tokens. Measured are one token for each of 1 to 256 users, and 1024 of prompts; the last
# one is in proportion to these.
STEP_MS = {1: 2.2, 8: 5.9, 64: 17.4, 256: 25.4, 1024: 41.0, 8192: 328.0}


class Arrival(NamedTuple):
    """A request of a trace: when it comes, in seconds, and its tokens. Requests of one `topic` begin alike."""

    time: float
    prompt: int
    new: int
    topic: int


@dataclass
class Served:
    """A request's times: of its arrival and of its tokens."""

    asked: float
    tokens: list[float]


@dataclass(frozen=True)
class Summary:
    """What a trace is like for its clients. Times are in milliseconds, medians and 99th percentiles."""

    requests: int
    seconds: float
    tok_s: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    preempted: int
    reused_share: float


def evening(minutes: float, seed: int) -> list[Arrival]:
    """A trace: few requests at first, a peak in the middle, a burst each two minutes; most short, some very long."""
    rng = np.random.default_rng(seed)
    found, now, end = [], 0.0, 60 * minutes
    while now < end:
        rate = 0.5 + 3 * np.sin(np.pi * now / end) ** 2
        now += rng.exponential(1 / rate)
        burst = 20 if rng.random() < 1 / (120 * rate) else 1
        for _ in range(burst):
            prompt = int(np.clip(rng.lognormal(6, 1.2), 16, 6000))
            new = int(np.clip(rng.lognormal(5, 0.9), 8, 2000))
            found.append(Arrival(now, prompt, new, int(rng.integers(20))))
    return found


def step_seconds(step: Plan) -> float:
    """How long a step takes, by its tokens."""
    tokens = len(step.rows) + sum(block.count for block in step.blocks)
    return 1e-3 * float(np.exp(np.interp(np.log(tokens), np.log([*STEP_MS]), np.log([*STEP_MS.values()]))))


def simulate(settings: Settings, trace: Sequence[Arrival], seed: int = 0) -> Summary:
    """Serves a trace to its end."""
    rng = np.random.default_rng(seed)
    topics = rng.integers(1 << 16, size=(1 + max(its.topic for its in trace), settings.max_length))
    waiting = [(its.time, number) for number, its in enumerate(trace)]
    heapq.heapify(waiting)
    state, now, served, unread = State.of(settings), 0.0, {}, []
    preempted = reused = computed = 0
    while waiting or state.running or state.waiting or unread:
        events: list[Submit | Drawn] = [Drawn(id, 0) for id in unread]
        if not (state.running or state.waiting or unread):
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, number = heapq.heappop(waiting)
            its = trace[number]
            own = rng.integers(1 << 16, size=its.prompt - its.prompt // 2)
            prompt = (*topics[its.topic, : its.prompt // 2].tolist(), *own.tolist())
            events.append(Submit(number, prompt, its.new))
            served[number] = Served(its.time, [])
        state, step = plan(state, events)
        preempted += len(step.preempted)
        reused += sum(count for _, count in step.admitted)
        computed += sum(block.count for block in step.blocks)
        unread = [row.id for row in step.rows] + [block.id for block in step.blocks if block.draws]
        if not step.is_empty:
            now += step_seconds(step)
        for id in unread:
            served[id].tokens.append(now)
    return _summary([*served.values()], now - trace[0].time, preempted, reused / max(reused + computed, 1))


def _summary(served: Sequence[Served], seconds: float, preempted: int, reused_share: float) -> Summary:
    firsts = [its.tokens[0] - its.asked for its in served]
    between = [gap for its in served for gap in np.diff(its.tokens).tolist()]

    def both(values: list[float]) -> tuple[float, float]:
        return float(1e3 * np.percentile(values, 50)), float(1e3 * np.percentile(values, 99))

    tokens = sum(len(its.tokens) for its in served)
    return Summary(len(served), seconds, tokens / seconds, both(firsts), both(between), preempted, reused_share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="of the trace, while requests come")
    parser.add_argument("--seed", type=int, default=0, help="of the trace")
    parser.add_argument("--users", type=int, default=64, help="requests that run at a time")
    parser.add_argument("--pages", type=int, default=1600, help="of 128 tokens, of layers that attend to all")
    arguments = parser.parse_args()
    users, blocks = arguments.users, 8
    settings = Settings(
        (arguments.pages, 3 * users + 3 * blocks), (None, 128), 8192, users, blocks, users + blocks * 128
    )
    trace = evening(arguments.minutes, arguments.seed)
    for reuse in (True, False):
        found = simulate(Settings(**{**vars(settings), "reuse": reuse}), trace)
        print(
            f"reuse {reuse!s:5}: {found.requests} requests, {found.tok_s:.0f} tokens/s, TTFT {found.ttft[0]:.0f} / "
            f"{found.ttft[1]:.0f} ms, ITL {found.itl[0]:.1f} / {found.itl[1]:.1f} ms, {found.preempted} preempted, "
            f"{found.reused_share:.0%} of prompts reused"
        )


if __name__ == "__main__":
    main()
