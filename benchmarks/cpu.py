#!/usr/bin/env python3
"""Times one MoE layer on a CPU: jmx as `jmx bench` does, and llama.cpp in the same process.

    python benchmarks/peers/llama_cpp.py DIR     # once: llama.cpp's library, built for this machine
    python benchmarks/cpu.py --peer DIR --model gpt-oss-20b --tokens 1,4,16,64,512 --json out.json --png out.png
    python benchmarks/cpu.py --format mxfp4,nvfp4,int4_g64 --input-format int8_token --tokens 1,512 --json out.json

All compute the same layers on the same tokens. Each format has other weights; only jmx is timed in other formats than
MXFP4. On a shared machine memory bandwidth varies by a third from one minute to the next, so everything, limits
included, is timed once in each round, in an order that alternates.
"""

import argparse
import dataclasses
import json
import pathlib
import secrets
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import rich

from benchmarks.peers import llama_cpp
from jmx.activations import SwiGLU
from jmx.backends import registered_backends
from jmx.experts import Experts
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.perf import bench, machine, shapes
from jmx.perf.roofline import Limits, Report, Row, check_outputs, draw
from jmx.routing import Logits, route
from jmx.selection.environment import Environment

PEER = "llama.cpp"
SYSTEMS = ("cpu", "xla", PEER)
_DRAWN = 16  # experts


class Timed(NamedTuple):
    """One system at one token count, ready to run."""

    row: Row  # without times
    call: Callable[[], Any]  # all layers


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark of `argv`. Returns 1 if any row has an error, else 0."""
    arguments = _parse(argv)
    check_outputs(arguments.json, arguments.png)
    seed = secrets.randbits(32)
    limits: list[Limits] = []
    measured = (_measure_formats if arguments.peer is None else _measure_peer)(arguments, seed, limits)
    middle = Limits(*(statistics.median(rates) for rates in zip(*map(dataclasses.astuple, limits), strict=True)))
    shape = shapes.MODELS[arguments.model]
    rows = [
        bench.judge(
            row, dataclasses.replace(shape.problem(row.tokens, "packed"), format=row.format or shape.format), middle
        )
        for row in measured
    ]
    description = machine.describe_machine(jax.devices()[0])
    versions = {}
    if arguments.peer is not None:
        versions = json.loads(pathlib.Path(arguments.peer, "versions.json").read_text())
    settings = {
        "model": arguments.model,
        "tokens": arguments.tokens,
        "routing": "uniform",
        "layers": arguments.layers,
    } | {
        "repeats": arguments.rounds,
        "seed": seed,
        "shape": dataclasses.asdict(shape) | {"activation": str(shape.activation), "method": str(shape.method)},
    }
    description |= {"host_cpus": machine.num_cpus(), "versions": description["versions"] | versions}
    report = Report(description, middle, settings, tuple(sorted(rows, key=lambda row: [*SYSTEMS].index(row.system))))
    rich.print(report)
    if arguments.json is not None:
        report.save(arguments.json)
    if arguments.png is not None:
        draw(report, arguments.png)
    return int(any(row.error is not None for row in rows))


def _measure_peer(arguments: argparse.Namespace, seed: int, limits: list[Limits]) -> list[Row]:
    """jmx, the reference and the peer, with MXFP4."""
    shape, count = shapes.MODELS[arguments.model], arguments.layers
    weights_key, data_key = jax.random.split(jax.random.key(seed))
    experts = [_draw_experts(shape, key) for key in jax.random.split(weights_key, count)]
    ggml = llama_cpp.Ggml(arguments.peer, machine.num_cpus())
    peers = [llama_cpp.Layer(ggml, _as_peers(layer)) for layer in experts]
    measured = []
    for tokens in arguments.tokens:
        key = jax.random.fold_in(data_key, tokens)
        case = bench.Case.draw(shape, tokens, "uniform", count, key, experts[0])
        systems = [_ours("cpu", shape, case, experts), _ours("xla", shape, case, experts), _peer(shape, case, peers)]
        measured += _printed(_time(systems, arguments.rounds, limits))
    return measured


def _measure_formats(arguments: argparse.Namespace, seed: int, limits: list[Limits]) -> list[Row]:
    """jmx in each format, also with quantized inputs where the format supports them."""
    model, count = shapes.MODELS[arguments.model], arguments.layers
    weights_key, data_key = jax.random.split(jax.random.key(seed))
    layer_keys = jax.random.split(weights_key, count)
    kinds = [dataclasses.replace(model, format=name) for name in arguments.format]
    experts = {kind.format: [_draw_experts(kind, key) for key in layer_keys] for kind in kinds}
    if arguments.input_format is not None:
        kinds += [dataclasses.replace(kind, input_format=arguments.input_format) for kind in kinds]
    cpu = next(backend for backend in registered_backends() if backend.name == "cpu")
    measured = []
    for tokens in arguments.tokens:
        key = jax.random.fold_in(data_key, tokens)
        systems = []
        for shape in kinds:
            if shape.input_format is not None and cpu.supports(shape.problem(tokens, "packed"), Environment.probe()):
                continue
            case = bench.Case.draw(shape, tokens, "uniform", count, key, experts[shape.format][0])
            timed = _ours("cpu", shape, case, experts[shape.format])
            row = dataclasses.replace(timed.row, format=shape.format, input_format=shape.input_format)
            systems.append(timed._replace(row=row))
        measured += _printed(_time(systems, arguments.rounds, limits))
    return measured


def _printed(rows: list[Row]) -> list[Row]:
    for row in rows:
        print(f"{row.system}, {row.held}, {row.tokens} tokens: {row.us:.0f} us", file=sys.stderr, flush=True)
    return rows


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--peer", metavar="DIR", help="what benchmarks/peers/llama_cpp.py filled")
    what.add_argument(
        "--format", metavar="NAME,...", type=_formats, help="of weights; ours alone, one beside the other"
    )
    parser.add_argument(
        "--input-format",
        choices=[*INPUT_FORMATS],
        help="beside --format: also with inputs in it, where weights go with it",
    )
    parser.add_argument("--model", default="gpt-oss-20b", choices=["gpt-oss-20b", "gpt-oss-120b"])
    parser.add_argument(
        "--tokens", default=[1, 512], metavar="N,...", type=lambda text: [int(n) for n in text.split(",")]
    )
    parser.add_argument("--layers", default=2, type=int, help="different layers in one call (default %(default)s)")
    parser.add_argument(
        "--rounds", default=5, type=int, help="samples of which a time is the median (default %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--png", metavar="FILE")
    arguments = parser.parse_args(argv)
    if arguments.input_format is not None and arguments.format is None:
        parser.error("--input-format needs --format")
    return arguments


def _formats(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {[*FORMATS]}")
    return names


def _draw_experts(shape: shapes.Shape, key: Any) -> Experts:
    """`shape.experts`, packed, drawn a few experts at a time: drawing takes several times the memory of the result."""
    parts = range(0, shape.num_experts, _DRAWN)
    some = [dataclasses.replace(shape, num_experts=min(_DRAWN, shape.num_experts - first)) for first in parts]
    keys = jax.random.split(key, len(some))
    drawn = [part.experts(key).prepare("packed", donate=True) for part, key in zip(some, keys, strict=True)]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *drawn)


def _ours(name: str, shape: shapes.Shape, case: bench.Case, experts: Sequence[Experts]) -> Timed:
    """A backend of jmx, timed as by `jmx bench`, routing included."""
    layer = bench.System.of(name, shape, case.num_tokens, Environment.probe()).layer
    compiled = jax.jit(partial(bench.run_layers, layer)).lower(case.x, case.logits, experts).compile()
    temporary = machine.check_memory(compiled)
    _, y = compiled(case.x, case.logits, experts)
    row = _row(name, "packed", case, y)
    return Timed(dataclasses.replace(row, temporary_bytes=temporary), lambda: compiled(case.x, case.logits, experts))


def _peer(shape: shapes.Shape, case: bench.Case, layers: Sequence[llama_cpp.Layer]) -> Timed:
    """llama.cpp's layers on the same tokens and experts, with given routing and without the residual."""
    assert isinstance(shape.activation, SwiGLU)
    assert shape.activation.limit is not None
    calls = []
    for logits in case.logits:
        ids, weights = (np.asarray(array) for array in route(Logits(logits, shape.method)))
        calls.append(llama_cpp.Call(np.asarray(case.x, np.float32), ids.astype(np.int32), weights.astype(np.float32)))
    program = llama_cpp.Program(layers, calls, shape.activation.alpha, shape.activation.limit)
    program.run()
    return Timed(_row(PEER, "mxfp4", case, program.result()), program.run)


def _row(system: str, weights: str, case: bench.Case, y: Any) -> Row:
    error = bench.relative_error(np.asarray(y, np.float32)[np.asarray(case.checked)], case.reference)
    active = statistics.fmean(case.active)
    return Row(system, case.num_tokens, weights=weights, layers=len(case.logits), active=active, rel_err=error)


def _time(systems: Sequence[Timed], rounds: int, limits: list[Limits]) -> list[Row]:
    """The rows with microseconds per layer. Each round adds a measurement of the machine's limits to `limits`."""
    samples: list[list[float]] = [[] for _ in systems]
    for nth in range(rounds):
        limits.append(machine.measure_limits(1))
        for i in [*range(len(systems))][:: -1 if nth % 2 else 1]:
            samples[i].append(machine.seconds(systems[i].call, 1)[0])
    medians = [statistics.median(times) for times in samples]
    return [
        dataclasses.replace(
            system.row, us=1e6 * median / (system.row.layers or 1), spread=(max(times) - min(times)) / median
        )
        for system, times, median in zip(systems, samples, medians, strict=True)
    ]


def _as_peers(experts: Experts) -> llama_cpp.Weights:
    gate_up, down = (jax.tree.map(np.asarray, q) for q in (experts.gate_up, experts.down))
    gate_up_bias, down_bias = (np.asarray(bias, np.float32) for bias in (experts.gate_up_bias, experts.down_bias))
    return llama_cpp.Weights(gate_up.values, gate_up.scales, gate_up_bias, down.values, down.scales, down_bias)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
