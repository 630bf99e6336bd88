#!/usr/bin/env python3
"""Times a layer divided over the GPUs of one host, beside the whole layer on one of them.

    python benchmarks/many_gpus.py gpt-oss-120b --tokens 1,4,16,64,256,1024,4096,8192 --json FILE

A call is a chain of layers. For each number of tokens a GPU, in microseconds a layer, least and median of samples that
take turns: the divided layer; its experts alone, with the tokens of all GPUs and no exchange; one GPU with the tokens
of one, and with those of all. The exchange is the difference of the first two, and efficiency the time of one GPU with
all tokens over that of all GPUs together.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmx
from jmx.backends import resolve_layout
from jmx.parallel import EXCHANGES
from jmx.parallel.over_mesh import expert_specs
from jmx.perf.shapes import MODELS, Shape
from jmx.util import atomic_files

COMPILERS = ThreadPoolExecutor()


def layers(
    shape: Shape, split: jmx.Split | None, x: jax.Array, logits: jax.Array, weights: list[jmx.Experts]
) -> jax.Array:
    """The layers one after the other, as residual blocks; logits (layers, T, E)."""
    for its, experts in zip(logits, weights, strict=True):
        routing = jmx.Logits(its, shape.method)
        x = x + jmx.moe(x, routing, experts, activation=shape.activation, input_format=shape.input_format, split=split)
    return x


def experts_alone(
    shape: Shape, split: jmx.Split, mesh: Mesh, x: jax.Array, logits: jax.Array, weights: list[jmx.Experts]
) -> jax.Array:
    """Each GPU's experts with the tokens of all, whose results stay where they are: (GPUs, T, H)."""

    def here(x: jax.Array, logits: jax.Array, weights: list[jmx.Experts]) -> jax.Array:
        for its, experts in zip(logits, weights, strict=True):
            ids, routed = jmx.route(jmx.Logits(its, shape.method))
            mine = jmx.Routing(ids - jax.lax.axis_index("ep") * experts.num_experts, routed)
            x = x + jmx.moe(x, mine, experts, activation=shape.activation, input_format=shape.input_format)
        return x[None]

    specs = [expert_specs(split, experts) for experts in weights]
    return jax.shard_map(here, mesh=mesh, in_specs=(P(), P(), specs), out_specs=P("ep"))(x, logits, weights)


def sample(call: Any, arguments: tuple[Any, ...], calls: int) -> float:
    """Seconds of a call, one after the other."""
    start = time.perf_counter()
    result = None
    for _ in range(calls):
        result = call(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


class Case:
    """The calls of one number of tokens a GPU, which compile while the next case is lowered."""

    def __init__(self, shape: Shape, split: jmx.Split, mesh: Mesh, weights: Any, num_tokens: int):
        (whole, divided), ranks = weights, mesh.size
        self.num_tokens, self.ranks, self.num_layers = num_tokens, ranks, len(whole)
        keys = jax.random.split(jax.random.key(num_tokens), 2)
        x = jax.random.normal(keys[0], (ranks * num_tokens, shape.hidden_size), jnp.bfloat16)
        logits = jax.random.normal(keys[1], (len(whole), ranks * num_tokens, shape.num_experts), jnp.float32)
        here, everywhere = jax.devices()[0], NamedSharding(mesh, P())
        by_token = NamedSharding(mesh, P("ep")), NamedSharding(mesh, P(None, "ep"))
        on_one = partial(layers, shape, None)
        self.arguments = {
            "split": (jax.device_put(x, by_token[0]), jax.device_put(logits, by_token[1]), divided),
            "experts": (jax.device_put(x, everywhere), jax.device_put(logits, everywhere), divided),
            "one": (*jax.device_put((x[:num_tokens], logits[:, :num_tokens]), here), whole),
            "all_on_one": (*jax.device_put((x, logits), here), whole),
        }
        functions = {
            "split": partial(layers, shape, split),
            "experts": partial(experts_alone, shape, split, mesh),
            "one": on_one,
            "all_on_one": on_one,
        }
        self.calls = {
            name: COMPILERS.submit(jax.jit(function).lower(*self.arguments[name]).compile)
            for name, function in functions.items()
        }

    def measure(self, repeats: int) -> dict[str, Any]:
        """Times, and the relative error of the divided layers beside those of one GPU."""
        calls = {name: (call.result(), self.arguments[name]) for name, call in self.calls.items()}
        results = {name: call(*arguments) for name, (call, arguments) in calls.items()}
        expected = results["all_on_one"].astype(jnp.float32)
        got = jax.device_put(results["split"], expected.sharding)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, (call, arguments) in calls.items():
                once = sample(call, arguments, 2)
                seconds = sample(call, arguments, max(2, min(50, int(0.02 / once))))
                times[name].append(seconds / self.num_layers * 1e6)
        least = {name: round(min(its), 2) for name, its in times.items()}
        return {
            "tokens": self.num_tokens,
            "us": least,
            "median_us": {name: round(statistics.median(its), 2) for name, its in times.items()},
            "exchange_us": round(least["split"] - least["experts"], 2),
            "efficiency": round(least["all_on_one"] / (self.ranks * least["split"]), 4),
            "relative_error": float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)),
        }


def main() -> int:
    """Prints a row for each number of tokens, and writes --json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096,8192", help="tokens a GPU")
    parser.add_argument("--format", default="mxfp4")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--exchange", choices=(*EXCHANGES,))
    parser.add_argument("--json", type=Path, help="a new file for the results")
    arguments = parser.parse_args()
    if arguments.json:
        atomic_files.check_new(arguments.json)
    shape = MODELS[arguments.model].in_formats(arguments.format)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
    split = jmx.Split(expert="ep", tokens="ep", exchange=arguments.exchange, mesh=mesh)
    with jax.default_device(jax.devices()[0]):
        layout = resolve_layout("auto", jmx.Environment.probe(), jmx.FORMATS[shape.format], shape.input_format)
        whole = [shape.experts(key).prepare(layout) for key in jax.random.split(jax.random.key(0), arguments.layers)]
    divided = [
        jax.tree.map(
            lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), experts, expert_specs(split, experts)
        )
        for experts in whole
    ]
    cases = [Case(shape, split, mesh, (whole, divided), int(tokens)) for tokens in arguments.tokens.split(",")]
    rows = []
    for case in cases:
        rows.append(case.measure(arguments.repeats))
        print(json.dumps(rows[-1]), flush=True)
    devices = [device.device_kind for device in jax.devices()]
    result = vars(arguments) | {"mesh": {"ep": mesh.size}, "devices": devices, "jax": jax.__version__, "rows": rows}
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(json.dumps(result, default=str, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
