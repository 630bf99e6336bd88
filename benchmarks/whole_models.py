#!/usr/bin/env python3
"""Times whole models of random weights on one GPU: decoding for some users, and prefills of some lengths.

    python benchmarks/whole_models.py --models gpt-oss-20b,gpt-oss-120b --json benchmarks/results/h200-models.json

Decoding is after a prompt of 1024 tokens of each user. A time is the median of several, which are saved too; its
spread is (max - min) / median. Programs are compiled before.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from jmx.models import Runner, Sampler, from_source, random_source
from jmx.models.families import published
from jmx.models.runner import CHUNK
from jmx.util import atomic_files

PUBLISHED = published()
PROMPT = 1024  # tokens of each user before decoded ones
STEPS = 2 * CHUNK  # of a sample


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers between commas."""
    found = text.split(",")
    if not all(its.isdigit() and int(its) > 0 for its in found):
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers between commas")
    return tuple(map(int, found))


def names(text: str) -> tuple[str, ...]:
    """Names of published models between commas."""
    if unknown := [name for name in text.split(",") if name not in PUBLISHED]:
        raise argparse.ArgumentTypeError(f"models (={unknown}) must be of {[*PUBLISHED]}")
    return tuple(text.split(","))


def main() -> int:
    """Prints a line for each time, and writes all to --json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default="gpt-oss-20b,gpt-oss-120b", help="names between commas")
    parser.add_argument("--users", type=numbers, default="1,8", help="rows that decode at once")
    parser.add_argument("--prefill", type=numbers, default="1024,8192", help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=7, help="of each time")
    parser.add_argument("--json", type=Path, help="a new file for the results")
    arguments = parser.parse_args()
    if arguments.samples < 1:
        parser.error(f"--samples (={arguments.samples}) must be at least 1")
    if arguments.json:
        atomic_files.check_new(arguments.json)
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "prompt": PROMPT}
    result["models"] = {}
    for name in arguments.models:
        result["models"][name] = measure(name, arguments.users, arguments.prefill, arguments.samples)
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(name: str, users: Sequence[int], prefill: Sequence[int], samples: int) -> dict[str, Any]:
    """Microseconds of steps by users, and milliseconds of prefills by tokens."""
    config = PUBLISHED[name]
    runner = Runner(from_source(random_source(config)))
    rng = np.random.default_rng(0)

    def prompts(rows: int, tokens: int) -> list[list[int]]:
        return rng.integers(config.vocab_size, size=(rows, tokens)).tolist()

    found: dict[str, Any] = {"decode": {}, "prefill": {}}
    for rows in users:
        its = timed(decode(runner, prompts(rows, PROMPT), samples), samples, 1e6)
        found["decode"][rows] = {"step_us": its, "tokens_per_s": round(1e6 * rows / its["median"], 1)}
        print(f"{name}, {rows} users: {its['median']} us a step, {1e6 * rows / its['median']:.0f} tokens/s", flush=True)
    for tokens in prefill:
        its = timed(prefills(runner, prompts(1, tokens)), samples, 1e3)
        found["prefill"][tokens] = {"ms": its, "tokens_per_s": round(1e3 * tokens / its["median"])}
        print(f"{name}, a prompt of {tokens}: {its['median']} ms", flush=True)
    return found


def timed(seconds: Iterator[float], samples: int, factor: float) -> dict[str, Any]:
    """The samples, after a first one, in units of 1 / factor s, with their median and their spread."""
    next(seconds)
    every = [round(factor * next(seconds), 3) for _ in range(samples)]
    median = statistics.median(every)
    return {"median": median, "spread": round((max(every) - min(every)) / median, 4), "samples": every}


def decode(runner: Runner, prompts: list[list[int]], samples: int) -> Iterator[float]:
    """Seconds of a step, each of `STEPS` of one generation, the first with what it compiles."""
    generation = runner.generate(prompts, Sampler(), 1 + CHUNK + (1 + samples) * STEPS)
    for _ in range(1 + CHUNK):
        next(generation)
    while True:
        yield seconds_of(lambda: [next(generation) for _ in range(STEPS)]) / STEPS


def prefills(runner: Runner, prompts: list[list[int]]) -> Iterator[float]:
    """Seconds of a prompt's first token."""
    while True:
        yield seconds_of(lambda: next(runner.generate(prompts, Sampler(), 1)))


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
