#!/usr/bin/env python3
"""Times one system at every token count, in a process of its own that benchmarks/layer.py starts.

    python -m benchmarks.peers.run marlin --packages DIR --tokens 1,64 --layers 16,4 --output rows.jsonl \\
        --shape '{"num_experts": 128, "top_k": 4, "hidden_size": 2880, "intermediate_size": 2880,
                  "alpha": 1.702, "beta": 1.0, "limit": 7.0, "bias": true}'

The output's first line holds versions; each one after it a row: tokens, layers, active, us, spread and rel_err, or
an error. Without --output it calls the system at every token count first, prints a line of JSON, waits for a line on
stdin, and prints the rows, each with the versions: so benchmarks/layer_turns.py compiles several systems side by side.
"""
# pyright: reportMissingImports=false

import argparse
import importlib
import json
import pathlib
import statistics
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import triton

from benchmarks.peers import problem, timing


def main() -> None:
    """Writes each line as soon as it is measured, so that a crash keeps the earlier ones."""
    arguments = _parse()
    shape = problem.Shape(**json.loads(arguments.shape))
    versions = json.loads(pathlib.Path(arguments.packages, "versions.json").read_text())
    versions = {"torch": torch.__version__, "triton": triton.__version__} | versions
    sys.path.insert(0, arguments.packages)
    peer = importlib.import_module(f"benchmarks.peers.{arguments.system}")
    if hasattr(peer, "load"):
        peer.load(arguments.packages)
    if arguments.output is None:
        print(json.dumps({"compiled": _compile(peer, shape, arguments)}), flush=True)
        for row in _rows(peer, shape, arguments) if sys.stdin.readline() else ():
            print(json.dumps(row | {"versions": versions}), flush=True)
        return
    with open(arguments.output, "x", encoding="utf-8") as output:
        print(json.dumps(versions), file=output)
        for row in _rows(peer, shape, arguments):
            print(json.dumps(row), file=output, flush=True)


def _compile(peer: ModuleType, shape: problem.Shape, arguments: argparse.Namespace) -> int:
    """Calls a layer once with each token count, so that what is compiled at a first call is. How many could run."""
    layer, count = peer.prepare(shape, problem.draw_weights(shape)), 0
    for num_tokens in arguments.tokens:
        try:
            layer(problem.draw_case(shape, num_tokens, arguments.routing))()
            torch.cuda.synchronize()
            count += 1
        except Exception:  # which its row will say
            traceback.print_exc()
    del layer
    torch.cuda.empty_cache()
    return count


def _rows(peer: ModuleType, shape: problem.Shape, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The measured row of each token count."""
    first = problem.draw_weights(shape)
    layers = []
    for num_tokens, count in zip(arguments.tokens, arguments.layers, strict=True):
        try:
            del layers[count:]
            while len(layers) < count:
                layers.append(peer.prepare(shape, problem.draw_weights(shape) if layers else first))
            row = _measure(shape, first, layers, num_tokens, arguments.routing, arguments.repeats)
        except Exception as e:  # any failure of a system is the row's result, and the other rows still run
            traceback.print_exc()
            row = {"error": f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"}
        print(arguments.system, num_tokens, row, file=sys.stderr)
        yield {"tokens": num_tokens, "layers": count} | row


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", help="a module of benchmarks.peers")
    parser.add_argument("--packages", required=True, metavar="DIR", help="what fetch.py filled")
    parser.add_argument("--shape", required=True, help="JSON, the fields of benchmarks.peers.problem.Shape")
    parser.add_argument("--tokens", required=True, type=_counts, metavar="N,...")
    parser.add_argument("--layers", required=True, type=_counts, metavar="N,...", help="at each of these token counts")
    parser.add_argument("--routing", default="uniform", help="uniform, zipf, half or top1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", metavar="FILE", help="a new file (default: take a turn on the card, see above)")
    return parser.parse_args()


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def _measure(
    shape: problem.Shape, first: problem.Weights, layers: list[Any], num_tokens: int, routing: str, repeats: int
) -> dict[str, float]:
    cases = [problem.draw_case(shape, num_tokens, routing) for _ in layers]
    calls = [bind(case) for bind, case in zip(layers, cases, strict=True)]
    us, spread, y = timing.replay(calls, repeats)
    return {
        "active": statistics.fmean(case.active for case in cases),
        "us": us,
        "spread": spread,
        "rel_err": problem.relative_error(y, shape, first, cases[0]),
    }


if __name__ == "__main__":
    main()
