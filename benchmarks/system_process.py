"""What the processes that `benchmarks.worker` starts share: their lines of JSON, and the machine's limits."""

import json
import sys
from typing import Any

import jax

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
    if system == "limits":
        print(json.dumps(_limits()), flush=True)
    return system != "limits"


def _limits() -> dict[str, Any]:
    """The machine, and its rates of copying and of dense products."""
    found = measure_limits(3)
    return describe_machine(jax.devices()[0]) | {
        "copy_TBs": found.copy_rate / 1e12,
        "dense_TFLOPs": found.dense_rate / 1e12,
    }
