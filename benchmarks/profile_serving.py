#!/usr/bin/env python3
"""Profiles steps of the server's engine on a GPU: how long the device has nothing to do, and what it does otherwise.

    python benchmarks/profile_serving.py gpt-oss-120b --users 1,64 --steps 200 --json FILE

Weights are random. For each number of users the engine first computes their prompts. Then come `--steps` passes of the
model without a profiler, which give the time of one, and as many under `jax.profiler`, which records every kernel: the
device is idle where none runs between the first and the last one. Few users have several passes in a call.

`--max-users`, `--max-length`, `--prompt-tokens` and `--cache-tokens` are those of `jmx serve`: with the same ones, and
JAX_COMPILATION_CACHE_DIR, the programs that a server has kept there are not compiled again.
"""

import argparse
import json
import pathlib
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import jmx
from benchmarks import kernel_trace
from jmx.cli import compilation_cache
from jmx.cli.parser import counts
from jmx.models import Sampler, from_source, random_source
from jmx.models.families import published
from jmx.serving.engine import Engine, Generate, Limits
from jmx.util import atomic_files

PROMPT = 1024
SHOWN = 16  # kernels, those that take the most time


def main() -> int:
    """Profiles an engine, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(published()), metavar="MODEL")
    parser.add_argument("--users", type=counts, default=[1, 64], metavar="N,...")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--max-users", type=int, metavar="N", help="default: the most of --users")
    parser.add_argument("--max-length", type=int, metavar="N", help="default: what the steps need")
    parser.add_argument("--prompt-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--cache-tokens", type=int, metavar="N", help="default: what the users need")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="save what is printed to a new file")
    arguments = parser.parse_args()
    if arguments.json is not None:
        atomic_files.check_new(arguments.json)
    most = max(arguments.max_users or 1, *arguments.users)
    length = arguments.max_length or PROMPT + 2 * arguments.steps + 2 * most * PROMPT // arguments.prompt_tokens + 64
    limits = Limits(
        max_users=most,
        max_length=length,
        cache_tokens=arguments.cache_tokens or most * (length + 128),
        prompt_tokens=arguments.prompt_tokens,
    )
    model = from_source(random_source(published()[arguments.model], 0, jmx.MXFP4), dtype=jax.numpy.dtype("bfloat16"))
    engine = Engine(model, limits, store=compilation_cache.program_store())
    engine.warm_up(lambda ready, of: print(f"{ready} of {of} programs", flush=True))
    found = []
    for users in arguments.users:
        found.append(its := profile(engine, model.config.vocab_size, users, arguments.steps))
        print("{users} users: {step_ms} ms a step, device idle {idle:.1%}".format(**its), flush=True)
        for name, per_step, us in its["kernels"]:
            print(f"  {us:9.1f} us {per_step:7.1f} x  {name}")
    if arguments.json is not None:
        atomic_files.write(arguments.json, json.dumps(found, indent=1).encode())
    return 0


def profile(engine: Engine, vocab_size: int, users: int, steps: int) -> dict[str, Any]:
    """The time of a step of so many users, the share of it that the device is idle, and its kernels."""
    rng = np.random.default_rng(users)
    for user in range(users):
        prompt = tuple(rng.integers(vocab_size, size=PROMPT).tolist())
        engine.submit(Generate(user, prompt, engine.limits.max_length - PROMPT, Sampler(temperature=0), frozenset()))
    answering: set[int] = set()
    while len(answering) < users:
        answering |= {output.id for output in engine.step()}
    seconds, passes = run(engine, steps)
    (_, recorded), trace = kernel_trace.record(lambda: run(engine, steps))
    for user in range(users):
        engine.cancel(user)
    while not engine.is_idle:
        engine.step()
    return summary(kernel_trace.kernels(trace), recorded) | {
        "users": users,
        "steps": passes,
        "step_ms": round(1e3 * seconds / passes, 3),
    }


def run(engine: Engine, steps: int) -> tuple[float, int]:
    """Seconds of so many passes of the model, or few more, and how many they were."""
    engine.step()
    start, before = time.perf_counter(), engine.statistics.steps
    while engine.statistics.steps < before + steps:
        engine.step()
    return time.perf_counter() - start, engine.statistics.steps - before


def summary(events: Sequence[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """The share of time that the device is idle, and of each kernel its launches a step and its us a step."""
    busy, until = 0.0, events[0][0]
    for start, end, _ in events:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    time_of: dict[str, float] = defaultdict(float)
    launches = Counter[str]()
    for start, end, name in events:
        time_of[name] += end - start
        launches[name] += 1
    longest = sorted(time_of, key=lambda name: -time_of[name])[:SHOWN]
    rows = [(name, round(launches[name] / steps, 2), round(time_of[name] / steps, 2)) for name in longest]
    return {"idle": round(1 - busy / (until - events[0][0]), 4), "kernels": rows}


if __name__ == "__main__":
    sys.exit(main())
