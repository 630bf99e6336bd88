"""What the processes that `benchmarks.worker` starts share: their lines of JSON, and the machine's limits."""

import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.worker import LIMITS
from jmx.perf.machine import describe_machine, measure_limits


def described(error: Exception, most: int = 200) -> str:
    """An error in one line of at most so many characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def begin(system: str, compiled: int) -> bool:
    """Reports how many programs are compiled, and waits for a line on stdin. Whether cases are to be timed then.

    The system "limits" measures the machine instead.
    """
    print(json.dumps({"compiled": compiled}), flush=True)
    if not sys.stdin.readline():
        return False
    if system == LIMITS:
        print(json.dumps(_limits()), flush=True)
    return system != LIMITS


def report(
    system: str, tokens: Sequence[int], compiled: Callable[[int], Any], measured: Callable[[int, Any], dict[str, Any]]
) -> None:
    """Compiles the cases of all token counts side by side; then, once they are to be timed, prints a line for each.

    Args:
        system: its name.
        tokens: the token counts.
        compiled: a token count -> what `measured` takes, or a str, why there is nothing.
        measured: a token count and what was compiled for it -> its row.
    """
    with ThreadPoolExecutor(4) as threads:
        programs = dict(zip(tokens, threads.map(compiled, tokens), strict=True))
    if not begin(system, sum(not isinstance(its, str) for its in programs.values())):
        return
    for num_tokens, its in programs.items():
        if isinstance(its, str):
            row: dict[str, Any] = {"error": its}
        else:
            try:
                row = measured(num_tokens, its)
            except Exception as error:  # one token count out of memory leaves the others
                row = {"error": described(error, 300)}
        print(json.dumps({"tokens": num_tokens, **row}), flush=True)


def _limits() -> dict[str, Any]:
    """The machine, and its rates of copying and of dense products."""
    found = measure_limits(3)
    return describe_machine(jax.devices()[0]) | {
        "copy_TBs": found.copy_rate / 1e12,
        "dense_TFLOPs": found.dense_rate / 1e12,
    }
