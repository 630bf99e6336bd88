"""The simulated evening: every request is answered in full, and reuse and more pages make none wait longer."""

import dataclasses

import pytest

from benchmarks.serving_trace import evening, simulate, step_seconds
from jmx.serving.scheduling import Plan, Settings, Tokens

SETTINGS = Settings((600, 100), (None, 128), 8192, 16, 4, 16 + 4 * 128)


def test_a_short_evening() -> None:
    trace = evening(0.25, 3)
    found = simulate(SETTINGS, trace)
    assert found.requests == len(trace)
    assert 0 < found.ttft[0] <= found.ttft[1]
    assert 0 < found.itl[0] <= found.itl[1]
    assert found.tok_s == pytest.approx(sum(its.new for its in trace) / found.seconds)
    assert 0 < found.reused_share < 1
    assert simulate(dataclasses.replace(SETTINGS, reuse=False), trace).reused_share == 0


@pytest.mark.slow
def test_a_long_evening() -> None:
    trace = evening(10, 0)
    settings = dataclasses.replace(SETTINGS, max_rows=64, budget=64 + 4 * 128, pages=(1600, 250))
    found = simulate(settings, trace)
    assert found.requests == len(trace)
    assert found.itl[1] < 10 * found.itl[0]


def test_steps_take_longer_with_more_tokens() -> None:
    rows = tuple(Tokens(id, id, 5, 1, True, ()) for id in range(8))
    block = Tokens(9, 9, 0, 128, True, ())
    times = [step_seconds(Plan(rows[:1])), step_seconds(Plan(rows)), step_seconds(Plan(rows, (block,)))]
    assert times[:2] == pytest.approx([2.2e-3, 5.9e-3])
    assert times[2] > times[1]
