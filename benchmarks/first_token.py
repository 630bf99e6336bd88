#!/usr/bin/env python3
"""Times a whole model of random weights: from loaded weights to the first tokens, compiling, and again without.

    python benchmarks/first_token.py gpt-oss-120b --prompt 1024 --rows 1 --json FILE

The first run compiles a prefill and a program of 16 decoding steps; of each, seconds to trace, to lower and to compile
are those that jax reports. The runs after it are timed whole. Targets (one H200, gpt-oss-120b, prompt of 1024): 30 s to
the 17th token without a cache of compiled programs, 5 s with one.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np

from jmx.models import FAMILIES, Runner, Sampler, from_source, random_source
from jmx.models.config import Config
from jmx.models.runner import CHUNK
from jmx.util import atomic_files

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


@contextmanager
def stages() -> Iterator[Counter[str]]:
    """Seconds of each stage of compiling, as jax reports them, summed; in "trace", nested functions count twice."""
    found: Counter[str] = Counter()

    def add(event: str, duration_secs: float, **_: Any) -> None:
        if event in STAGES:
            found[STAGES[event]] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


def measure(runner: Runner, prompts: list[list[int]], runs: int) -> dict[str, Any]:
    """Seconds of the first prefill and the first `CHUNK` steps, and milliseconds of later ones."""
    sampler, result = Sampler(), dict[str, Any]()
    for name, run in (("prefill", False), ("steps", True)):
        with stages() as found:
            start = time.perf_counter()
            tokens, cache = runner._start(prompts, sampler, 1 + CHUNK)
            if run:
                _, tokens, cache = runner._steps(tokens, cache, 1, sampler)
            jax.block_until_ready((tokens, cache.layers))
            result[f"first_{name}_s"] = time.perf_counter() - start
        result |= {f"first_{name}_{stage}_s": seconds for stage, seconds in found.items()}
    result["to_17th_token_s"] = result["first_prefill_s"] + result["first_steps_s"]
    prefills, steps = [], []
    for _ in range(runs):
        start = time.perf_counter()
        tokens, cache = runner._start(prompts, sampler, 1 + 4 * CHUNK)
        jax.block_until_ready(tokens)
        prefills.append(time.perf_counter() - start)
        start = time.perf_counter()
        for chunk in range(4):
            _, tokens, cache = runner._steps(tokens, cache, 1 + chunk * CHUNK, sampler)
        jax.block_until_ready(tokens)
        steps.append((time.perf_counter() - start) / (4 * CHUNK))
    result["prefill_ms"] = [1e3 * seconds for seconds in prefills]
    result["tokens_per_s"] = [len(prompts) / seconds for seconds in steps]
    return result


def main() -> int:
    """Prints the times, and writes them to --json."""
    published: dict[str, Config] = {name: c for family in FAMILIES.values() for name, c in family.published.items()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=published)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--rows", type=int, default=1, help="prompts at once")
    parser.add_argument("--runs", type=int, default=5, help="timed after the first")
    parser.add_argument("--cache", type=Path, help="a directory that keeps compiled programs")
    parser.add_argument("--json", type=Path, help="a new file for the results")
    arguments = parser.parse_args()
    if arguments.json:
        atomic_files.check_new(arguments.json)
    if arguments.cache:
        jax.config.update("jax_compilation_cache_dir", str(arguments.cache))
    config = published[arguments.model]
    start = time.perf_counter()
    runner = Runner(from_source(random_source(config)))
    jax.block_until_ready(runner._weights)
    print(f"random weights: {time.perf_counter() - start:.1f} s", flush=True)
    prompts = np.random.default_rng(0).integers(config.vocab_size, size=(arguments.rows, arguments.prompt)).tolist()
    result = vars(arguments) | measure(runner, prompts, arguments.runs)
    text = json.dumps(result, default=str, indent=1)
    print(text)
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
