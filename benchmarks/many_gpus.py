#!/usr/bin/env python3
"""Times a layer divided over the GPUs of one host, beside the whole layer on one of them.

    python benchmarks/many_gpus.py gpt-oss-120b --tokens 1,4,16,64,256,1024,4096,8192 --json FILE

A call is a chain of layers. For each number of tokens a GPU, in microseconds a layer, least and median of samples that
take turns: the divided layer; its experts alone, with the tokens of all GPUs and no exchange; one GPU with the tokens of
one, and with those of all. The exchange is the difference of the first two, and efficiency the time of one GPU with all
tokens over that of all GPUs together.
"""

import argparse
import json
import statistics
import sys
import time
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
    for _ in range(calls):
        result = call(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def measure(
    shape: Shape, split: jmx.Split, mesh: Mesh, weights: Any, num_tokens: int, num_layers: int, repeats: int
) -> dict[str, Any]:
    """Times of one number of tokens a GPU."""
    whole, divided = weights
    ranks = mesh.size
    keys = jax.random.split(jax.random.key(num_tokens), 2)
    all_x = jax.random.normal(keys[0], (ranks * num_tokens, shape.hidden_size), jnp.bfloat16)
    all_logits = jax.random.normal(keys[1], (num_layers, ranks * num_tokens, shape.num_experts), jnp.float32)
    here, everywhere = jax.devices()[0], NamedSharding(mesh, P())
    by_token = (
        jax.device_put(all_x, NamedSharding(mesh, P("ep"))),
        jax.device_put(all_logits, NamedSharding(mesh, P(None, "ep"))),
    )
    on_one = jax.jit(partial(layers, shape, None))
    calls = {
        "split": (jax.jit(partial(layers, shape, split)), (*by_token, divided)),
        "experts": (
            jax.jit(partial(experts_alone, shape, split, mesh)),
            (jax.device_put(all_x, everywhere), jax.device_put(all_logits, everywhere), divided),
        ),
        "one": (on_one, (*jax.device_put((all_x[:num_tokens], all_logits[:, :num_tokens]), here), whole)),
        "all_on_one": (on_one, (*jax.device_put((all_x, all_logits), here), whole)),
    }
    with jax.set_mesh(mesh):
        divided_result = calls["split"][0](*calls["split"][1])
    expected = calls["all_on_one"][0](*calls["all_on_one"][1]).astype(jnp.float32)
    error = jnp.linalg.norm(jax.device_put(divided_result, here) - expected) / jnp.linalg.norm(expected)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, (call, arguments) in calls.items():
            with jax.set_mesh(mesh):
                once = sample(call, arguments, 2)
                seconds = sample(call, arguments, max(2, min(50, int(0.02 / once))))
            if turn:  # the first one compiles
                times[name].append(seconds / num_layers * 1e6)
    least = {name: round(min(its), 2) for name, its in times.items()}
    median = {name: round(statistics.median(its), 2) for name, its in times.items()}
    return {
        "tokens": num_tokens,
        "us": least,
        "median_us": median,
        "exchange_us": round(least["split"] - least["experts"], 2),
        "efficiency": round(least["all_on_one"] / (ranks * least["split"]), 4),
        "relative_error": float(error),
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
    split = jmx.Split(expert="ep", tokens="ep", exchange=arguments.exchange)
    shape = MODELS[arguments.model].in_formats(arguments.format)
    mesh = jax.make_mesh((jax.device_count(),), ("ep",), axis_types=(AxisType.Auto,))
    with jax.default_device(jax.devices()[0]):
        layout = resolve_layout("auto", jmx.Environment.probe(), jmx.FORMATS[shape.format], shape.input_format)
        whole = [shape.experts(key).prepare(layout) for key in jax.random.split(jax.random.key(0), arguments.layers)]
    divided = [
        jax.tree.map(
            lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), experts, expert_specs(split, experts)
        )
        for experts in whole
    ]
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        rows.append(measure(shape, split, mesh, (whole, divided), tokens, arguments.layers, arguments.repeats))
        print(json.dumps(rows[-1]), flush=True)
    devices = [device.device_kind for device in jax.devices()]
    result = vars(arguments) | {"mesh": {"ep": mesh.size}, "devices": devices, "jax": jax.__version__, "rows": rows}
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(json.dumps(result, default=str, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
