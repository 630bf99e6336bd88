#!/usr/bin/env python3
"""Times a whole model of random weights: from loaded weights to the first tokens, compiling, and again without.

    python benchmarks/first_token.py gpt-oss-120b --prompt 1024 --rows 1 --json FILE

The first run compiles the programs of a prefill and one of 16 decoding steps; seconds to trace, to lower and to compile
are those that jax reports, of all of them: they are compiled side by side. The first token comes with the launch of the
first steps, so its time includes compiling them. `--cache` keeps compiled programs. `--mesh ep=2` divides the model
over devices, each of which makes its own weights. Targets (one H200, gpt-oss-120b, prompt of 1024): 30 s to the 17th
token without kept programs, 5 s with them.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jmx.cli import mesh_argument
from jmx.models import Runner, Sampler, from_source, random_source
from jmx.models.families import published
from jmx.models.loading import split_of
from jmx.models.program_store import ProgramStore
from jmx.models.runner import CHUNK
from jmx.util import atomic_files

STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


@contextmanager
def stages() -> Iterator[dict[str, float]]:
    """Seconds of each stage of compiling, as jax reports them, summed; in "trace", nested functions count twice."""
    found = dict.fromkeys(STAGES.values(), 0.0)

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
    result: dict[str, Any] = {}
    with stages() as found:
        start = time.perf_counter()
        generation = runner.generate(prompts, Sampler(), 1 + CHUNK)
        next(generation)
        result["first_token_s"] = time.perf_counter() - start
        for _ in range(CHUNK):
            next(generation)
        result["to_17th_token_s"] = time.perf_counter() - start
    result |= {f"{stage}_s": seconds for stage, seconds in found.items()}
    result |= {"first_token_ms": [], "tokens_per_s": []}
    for _ in range(runs):
        start = time.perf_counter()
        next(runner.generate(prompts, Sampler(), 1))
        result["first_token_ms"].append(1e3 * (time.perf_counter() - start))
        generation = runner.generate(prompts, Sampler(), 1 + 5 * CHUNK)
        for _ in range(1 + CHUNK):
            next(generation)
        start = time.perf_counter()
        for _ in range(4 * CHUNK):
            next(generation)
        result["tokens_per_s"].append(4 * CHUNK * len(prompts) / (time.perf_counter() - start))
    return result


def main() -> int:
    """Prints the times, and writes them to --json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=published())
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--rows", type=int, default=1, help="prompts at once")
    parser.add_argument("--runs", type=int, default=5, help="timed after the first")
    parser.add_argument("--cache", type=Path, help="a directory that keeps compiled programs")
    parser.add_argument("--mesh", help="axes and sizes, as in `jmx generate --mesh`: ep=2")
    parser.add_argument("--mesh-axes", help="what mesh axes divide, as in `jmx generate --mesh-axes`")
    parser.add_argument("--json", type=Path, help="a new file for the results")
    arguments = parser.parse_args()
    if arguments.json:
        atomic_files.check_new(arguments.json)
    store = None
    if arguments.cache:
        jax.config.update("jax_compilation_cache_dir", str(arguments.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        store = ProgramStore(arguments.cache / "programs")
    config = published()[arguments.model]
    mesh = None if arguments.mesh is None else mesh_argument.make(arguments.mesh)
    axes = None if arguments.mesh_axes is None else mesh_argument.axes(arguments.mesh_axes)
    start = time.perf_counter()
    runner = Runner(from_source(random_source(config), split=split_of(mesh, axes)), store=store)
    jax.block_until_ready(runner._weights)
    print(f"random weights: {time.perf_counter() - start:.1f} s", flush=True)
    for device in jax.devices()[: 1 if mesh is None else mesh.size]:
        used = (device.memory_stats() or {}).get("bytes_in_use")
        print(f"{device}: {'unknown' if used is None else f'{used / 1e9:.2f} GB'} in use", flush=True)
    prompts = np.random.default_rng(0).integers(config.vocab_size, size=(arguments.rows, arguments.prompt)).tolist()
    kinds = [device.device_kind for device in jax.devices()]
    result = vars(arguments) | {"devices": kinds, "jax": jax.__version__} | measure(runner, prompts, arguments.runs)
    text = json.dumps(result, default=str, indent=1)
    print(text)
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
