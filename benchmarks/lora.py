#!/usr/bin/env python3
"""Times a layer with and without adapters: forward, and forward + gradients.

    python benchmarks/lora.py --model gpt-oss-20b --tokens 4096 --rank 16

Without adapters the gradients are those of x; with them, those of x and of the adapters. Several different layers run
one after the other in one call, whose time is divided by their number, and all cases take turns, so that clocks are
alike. What is compared computes the same: with B = 0 the layer with adapters must equal the one without.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes may share the card

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jmx
from jmx.backends import resolve_layout
from jmx.lora import Adapters, LoRA
from jmx.numerics.formats import FORMATS
from jmx.perf.bench import relative_error
from jmx.perf.machine import describe_machine, seconds
from jmx.perf.shapes import MODELS, Shape
from jmx.selection.environment import Environment
from jmx.util import atomic_files

CASES = ("forward", "forward, adapters", "forward + backward", "forward + backward, adapters")
TOLERANCE = 5e-2


def layers_of(shape: Shape, number: int, lora: LoRA) -> tuple[list[jmx.Experts], list[Adapters]]:
    """Random experts in the layout of this machine, and adapters whose B is not zero."""
    layout = resolve_layout("auto", Environment.probe(), FORMATS[shape.format], None)
    experts, adapters = [], []
    for key in jax.random.split(jax.random.key(0), number):
        experts.append(shape.experts(key).prepare(layout, donate=True))
        adapters.append(lora.random(key, experts[-1]))
    keys = iter(jax.random.split(jax.random.key(1), 1000))
    normal = partial(jax.tree.map, lambda a: jax.random.normal(next(keys), a.shape, a.dtype) * a.shape[-1] ** -0.5)
    return experts, [normal(each) for each in adapters]


def calls(shape: Shape, backend: str | None) -> dict[str, Any]:
    """What each case runs: (x, logits, experts, adapters) of all layers."""

    def forward(x: Any, logits: Any, experts: Any, adapters: Any) -> Any:
        for its, more in zip(experts, adapters, strict=True):
            routing = jmx.Logits(logits, shape.method)
            x = x + jmx.moe(x, routing, its, activation=shape.activation, adapters=more, backend=backend)
        return x

    def without(x: Any, logits: Any, experts: Any, adapters: Any) -> Any:
        return forward(x, logits, experts, [None] * len(adapters))

    def gradients(function: Callable[..., Any], x: Any, logits: Any, experts: Any, adapters: Any) -> Any:
        y, vjp = jax.vjp(lambda x, adapters: function(x, logits, experts, adapters), x, adapters)
        return y, vjp(x)

    both = (without, forward)
    runs = (*both, *(partial(gradients, function) for function in both))
    return {name: jax.jit(run) for name, run in zip(CASES, runs, strict=True)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt-oss-20b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4, help="different layers in one call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", help="that must run; without it, the first that can")
    parser.add_argument("--json", type=pathlib.Path, help="file for the numbers")
    parser.add_argument("--worker", action="store_true", help="run as a process of benchmarks/training.py")
    return parser.parse_args(arguments)


def compile_calls(given: argparse.Namespace, shape: Shape, lora: LoRA) -> dict[str, Any]:
    """Each case, compiled."""

    def abstract() -> Any:
        x = jnp.zeros((given.tokens, shape.hidden_size), jnp.bfloat16)
        return x, jnp.zeros((given.tokens, shape.num_experts), jnp.float32), *layers_of(shape, given.layers, lora)

    operands = jax.eval_shape(abstract)
    runs = calls(shape, given.backend)
    with ThreadPoolExecutor() as threads:  # the longest first; compiling needs no lock of Python's, lowering does
        waiting = {name: threads.submit(runs[name].lower(*operands).compile) for name in reversed(CASES)}
    return {name: waiting[name].result() for name in CASES}


def measure(given: argparse.Namespace, shape: Shape, lora: LoRA, compiled: dict[str, Any]) -> dict[str, Any]:
    """Checks that adapters of zeros add nothing, and times all cases in turns. SystemExit if they do."""
    experts, adapters = layers_of(shape, given.layers, lora)
    keys = jax.random.split(jax.random.key(2))
    x = jax.random.normal(keys[0], (given.tokens, shape.hidden_size), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (given.tokens, shape.num_experts), jnp.float32)
    operands = x, logits, experts, adapters
    zeros = jax.tree.map(jnp.zeros_like, adapters)
    plain, same = compiled[CASES[0]](*operands), compiled[CASES[1]](x, logits, experts, zeros)
    if (error := relative_error(same, plain)) > TOLERANCE:
        raise SystemExit(f"adapters of zeros change the result by {error:.2g}")

    samples: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(given.repeats):
        for name, run in compiled.items():
            samples[name].append(seconds(lambda run=run: run(*operands), 1)[0] / given.layers)
    times = {name: statistics.median(each) for name, each in samples.items()}
    memory = {name: run.memory_analysis().temp_size_in_bytes for name, run in compiled.items()}
    ratios = {CASES[i]: times[CASES[i + 1]] / times[CASES[i]] for i in (0, 2)}
    settings = {name: getattr(given, name) for name in ("model", "tokens", "rank", "layers", "repeats", "backend")}
    report = {"machine": describe_machine(jax.devices()[0]), "settings": settings}
    return report | {"seconds": times, "ratios": ratios, "temporary_bytes": memory, "rel_err": error}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Prints a table, and returns what `--json` writes."""
    given = parse(arguments)
    shape, lora = MODELS[given.model], LoRA(given.rank, 2 * given.rank, dtype=jnp.bfloat16)
    compiled = compile_calls(given, shape, lora)
    if given.worker:
        print(json.dumps({"compiled": len(compiled)}), flush=True)
        if not sys.stdin.readline():
            return {}
    report = measure(given, shape, lora, compiled)
    if given.worker:
        print(json.dumps(report, default=str), flush=True)
        return report
    for name in CASES:
        temporary = report["temporary_bytes"][name] / 2**20
        print(f"{name:30} {report['seconds'][name] * 1e6:10.1f} us a layer {temporary:10.0f} MiB of temporaries")
    for name, ratio in report["ratios"].items():
        print(f"{name}: adapters take {ratio - 1:+.1%}")
    if given.json is not None:
        atomic_files.write(given.json, json.dumps(report, indent=2, default=str).encode())
    return report


if __name__ == "__main__":
    main()
