#!/usr/bin/env python3
"""Times a layer divided over devices under skewed routing, before and after its experts are balanced.

    python benchmarks/skewed_routing.py gpt-oss-120b --mesh ep=2 --tokens 64,1024 --json FILE

Routings: uniform; Zipf's law; all tokens to the experts of one device; and no token to those of one device. For each,
`jmx.parallel.balance` places the experts and copies of them from the counts of the same tokens, `rebalance` moves the
weights. A row has microseconds of the layer before and after, how much fuller the fullest device is than the average
one, milliseconds of the balancer and of moving the layer, and bytes of weights that a device holds, copies included.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jmx
from jmx.backends import resolve_layout
from jmx.cli import mesh_argument
from jmx.numerics import formats
from jmx.parallel import EXCHANGES, PlacedExperts, Placement, balance, imbalance, move, rank_loads
from jmx.perf.machine import seconds
from jmx.perf.shapes import MODELS, Shape, draw_logits
from jmx.selection.environment import Environment
from jmx.util import atomic_files

_NEVER = -1e9  # a logit that is never among the largest


def routings(of_first: int) -> dict[str, Callable[[Any], Any]]:
    """By name: logits (T, E), uniform or for "zipf" by that law -> those of the routing.

    `of_first`: the number of experts that the first device has before balancing.
    """

    def where(logits: Any, first: bool) -> Any:
        return jnp.where((jnp.arange(logits.shape[-1]) < of_first) == first, logits, _NEVER)

    return {
        "uniform": lambda logits: logits,
        "zipf": lambda logits: logits,
        "one device gets all": lambda logits: where(logits, True),
        "one device is idle": lambda logits: where(logits, False),
    }


class Layer:
    """A chain of one layer over a mesh, whose weights are in slots, compiled once for each number of tokens."""

    def __init__(self, shape: Shape, split: jmx.Split, spare: int, num_layers: int):
        mesh: Any = split.mesh
        self.shape, self.split, self.spare, self.num_layers, self.ranks = shape, split, spare, num_layers, mesh.size
        self.before = Placement.identity(shape.num_experts, self.ranks, spare)
        self.placed = PlacedExperts.of(prepared(shape), self.before).split(mesh, split.names("expert"))
        self.run = jax.jit(self._run)
        balance(np.ones(shape.num_experts, np.int64), self.ranks, spare, before=self.before)  # imports

    def _run(self, x: Any, logits: Any, placed: Any) -> Any:
        call = {"activation": self.shape.activation, "input_format": self.shape.input_format, "split": self.split}
        for _ in range(self.num_layers):  # in one program, which takes longer than its launch
            x = x + jmx.moe(x, jmx.Logits(logits, self.shape.method), placed, **call)
        return x

    def tokens(self, routing: str, num_tokens: int) -> tuple[Any, Any]:
        """x and logits of `num_tokens` a device."""
        x_key, logits_key = jax.random.split(jax.random.key(num_tokens))
        kind = "zipf" if routing == "zipf" else "uniform"
        (logits,) = draw_logits(logits_key, (1, num_tokens * self.ranks, self.shape.num_experts), kind)
        logits = routings(self.before.num_slots // self.ranks)[routing](logits)
        x = jax.random.normal(x_key, (num_tokens * self.ranks, self.shape.hidden_size), jnp.bfloat16)
        mesh: Any = self.split.mesh
        return jax.device_put((x, logits), NamedSharding(mesh, P(self.split.names("tokens"))))


def measure(layer: Layer, routing: str, num_tokens: int, repeats: int) -> dict[str, Any]:
    """A row: `num_tokens` a device under one routing."""
    x, logits = layer.tokens(routing, num_tokens)
    ids = jmx.route(jmx.Logits(logits, layer.shape.method))[0]
    counts = np.bincount(np.asarray(ids).ravel(), minlength=layer.shape.num_experts)

    start = time.perf_counter()
    after = balance(counts, layer.ranks, layer.spare, before=layer.before)
    balance_s = time.perf_counter() - start

    expected = jax.block_until_ready(layer.run(x, logits, layer.placed))
    before_s = seconds(partial(layer.run, x, logits, layer.placed), repeats)[0]
    move(layer.placed, after)  # compiles
    start = time.perf_counter()
    moved = jax.block_until_ready(move(layer.placed, after))
    move_s = time.perf_counter() - start
    error = float(jnp.linalg.norm(layer.run(x, logits, moved) - expected) / jnp.linalg.norm(expected))
    after_s = seconds(partial(layer.run, x, logits, moved), repeats)[0]
    arrays = jax.tree.leaves(moved.experts)
    return {
        "routing": routing,
        "tokens": num_tokens,
        "spare_experts": layer.spare,
        "us_before": before_s / layer.num_layers * 1e6,
        "us_after": after_s / layer.num_layers * 1e6,
        "fullest_before": imbalance(rank_loads(counts, layer.before)),
        "fullest_after": imbalance(rank_loads(counts, after)),
        "balance_ms": balance_s * 1e3,
        "move_ms": move_s * 1e3,
        "bytes_a_device": sum(array.addressable_shards[0].data.nbytes for array in arrays),
        "relative_error": error,
    }


def prepared(shape: Shape) -> jmx.Experts:
    """Random weights in the layout of the devices."""
    format = formats.FORMATS[shape.format]
    layout = resolve_layout("auto", Environment.of_device(jax.devices()[0]), format, shape.input_format)
    return shape.experts(jax.random.key(0)).prepare(layout, donate=True)


def main() -> int:
    """Prints a row for each routing and number of tokens, and writes --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--mesh", default=f"ep={jax.device_count()}", help="one axis (default: %(default)s)")
    parser.add_argument("--tokens", default="64,1024", help="tokens a device (default: %(default)s)")
    parser.add_argument("--spare", type=int, help="copies of experts, of all devices (default: one for each device)")
    parser.add_argument("--exchange", choices=(*EXCHANGES,))
    parser.add_argument(
        "--layers", type=int, default=8, help="of one call, with the same weights (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="a new file for the results")
    arguments = parser.parse_args()
    if arguments.json:
        atomic_files.check_new(arguments.json)
    mesh = mesh_argument.make(arguments.mesh)
    (axis,) = mesh.axis_names
    split = jmx.Split(expert=axis, tokens=axis, exchange=arguments.exchange, mesh=mesh)
    shape = MODELS[arguments.model]
    spare = mesh.size if arguments.spare is None else arguments.spare
    layer = Layer(shape, split, spare, arguments.layers)
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        for routing in routings(0):
            rows.append(measure(layer, routing, tokens, arguments.repeats))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.json:
        devices = [device.device_kind for device in mesh.devices.flat]
        result = vars(arguments) | {"mesh": dict(mesh.shape), "devices": devices, "jax": jax.__version__, "rows": rows}
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(json.dumps(result, default=str, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
