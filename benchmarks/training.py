#!/usr/bin/env python3
"""Times training on one device: a layer's gradients beside other systems', adapters on a layer, and on whole models.

    python benchmarks/training.py --json FILE
    python benchmarks/training.py --parts layer,lora --tokens 64

Each system and model is measured in a process of its own. All of them compile at first, at the same time; then one
after the other checks its results and is timed. A process that prints nothing for a while is killed, and the reason is
in the results. Parts: `layer` (training_layer.py; torch's products: peers/grouped_mm.py), `lora` (lora.py), `models`
(training_model.py).
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.worker import Worker
from jmx.perf.shapes import MODELS
from jmx.util import atomic_files

ROOT = pathlib.Path(__file__).resolve().parent
SYSTEMS = ("mosaic", "grouped_mm", "tokamax", "ragged_dot_mgpu", "ragged_dot")
PARTS = ("layer", "lora", "models")
SILENT = 60.0  # seconds without a line, after which a process that runs is killed

# Adapters of all experts, by rank and dtype. Those of 16 in float32 need 17 GB of matrices, gradients and Adam's sums
# beside the 65 GB of gpt-oss-120b; those of 8 in bfloat16 a quarter of that, which 80 GB hold.
TRAINED = (
    {"model": "gpt-oss-20b", "rank": 16, "dtype": "float32"},
    {"model": "gpt-oss-120b", "rank": 8, "dtype": "bfloat16"},
    {"model": "gpt-oss-120b", "rank": 16, "dtype": "float32"},
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="of the layer: these, or other backends of jmx")
    parser.add_argument("--model", default="gpt-oss-120b", choices=sorted(MODELS), help="of the layer")
    parser.add_argument("--tokens", default="64,1024,8192", help="of the layer")
    parser.add_argument("--layers", type=int, default=2, help="different layers in one call")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each time")
    parser.add_argument("--lora-model", default="gpt-oss-20b", choices=sorted(MODELS), help="whose layer has adapters")
    parser.add_argument("--lora-tokens", type=int, default=4096)
    parser.add_argument("--trained", type=json.loads, default=TRAINED, help="JSON, settings of training_model.py")
    parser.add_argument(
        "--compiling", type=float, default=150, help="seconds, after which what still compiles is killed"
    )
    parser.add_argument("--limit", type=float, default=400, help="seconds, after which what runs is killed")
    parser.add_argument("--json", type=pathlib.Path, help="a new file for the results")
    arguments = parser.parse_args(argv)
    if unknown := {*arguments.parts.split(",")} - {*PARTS}:
        parser.error(f"`--parts` ({', '.join(sorted(unknown))}) must be of {', '.join(PARTS)}")
    if arguments.json:
        atomic_files.check_new(arguments.json)
    return arguments


def workers_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Worker, int]]:
    """The part, the process, and how many lines it prints; first the one that measures the machine."""

    def started(name: str, script: str, *rest: str) -> Worker:
        return Worker(name, [sys.executable, str(ROOT / script), *rest])

    parts, tokens = arguments.parts.split(","), [int(count) for count in arguments.tokens.split(",")]
    settings = {"model": arguments.model, "tokens": tokens, "layers": arguments.layers, "repeats": arguments.repeats}
    yield "machine", started("limits", "training_layer.py", "limits", json.dumps(settings)), 1
    if "layer" in parts:
        for system in arguments.systems.split(","):
            if system == "grouped_mm":
                worker = started(
                    system, "peers/grouped_mm.py", json.dumps(settings | {"shape": torch_shape(arguments)})
                )
            else:
                worker = started(system, "training_layer.py", system, json.dumps(settings))
            yield "layer", worker, len(tokens)
    if "lora" in parts:
        rest = (
            "--model",
            arguments.lora_model,
            "--tokens",
            str(arguments.lora_tokens),
            "--layers",
            str(arguments.layers),
        )
        yield "lora", started("lora", "lora.py", *rest, "--repeats", str(arguments.repeats), "--worker"), 1
    if "models" in parts:
        for its in arguments.trained:
            yield "models", started(f"{its['model']}, r = {its['rank']}", "training_model.py", json.dumps(its)), 1


def torch_shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """The layer's sizes, as `peers.problem.Shape` takes them."""
    shape, fields = MODELS[arguments.model], ("num_experts", "hidden_size", "intermediate_size", "bias")
    activation = {"alpha": 1.0, "beta": 0.0, "limit": None} | dataclasses.asdict(shape.activation)
    return {name: getattr(shape, name) for name in fields} | activation | {"top_k": shape.method.top_k}


def results(worker: Worker, lines: int, end: float) -> Iterator[dict[str, Any]]:
    """What the process prints; or the reason why it does not."""
    try:
        if worker.failure is not None:
            raise worker.failure
        worker.start()
        for _ in range(lines):
            yield worker.line(min(time.monotonic() + SILENT, end))
    except (TimeoutError, RuntimeError, OSError) as error:
        yield {"error": str(error)}
    finally:
        worker.end()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The layer's times, us, and temporary memory, MB a call."""
    lines = ["| tokens | system | forward | forward + backward | over forward | temporary, MB |", "|---" * 6 + "|"]
    for row in sorted(rows, key=lambda row: row.get("tokens", 0)):
        head = f"| {row.get('tokens', '-')} | {row['system']} |"
        if "both_us" in row:
            cells = f"{row['forward_us']:.0f} | {row['both_us']:.0f} | {row['over_forward']:.2f}"
            lines.append(f"{head} {cells} | {row['both_temporary_bytes'] / 1e6:.0f} |")
        else:
            lines.append(f"{head} {row['error'][:120]} | | | |")
    return "\n".join(lines)


def others(report: dict[str, Any]) -> Iterator[str]:
    """Lines of the adapters' results."""
    for row in report["lora"]:
        for name, ratio in row.get("ratios", {}).items():
            yield f"{name}: {row['seconds'][name] * 1e6:.0f} us, with adapters {ratio - 1:+.1%}"
    for row in report["models"]:
        if "tokens_per_s" in row:
            sizes = f"peak {row['peak_bytes'] / 1e9:.1f} GB, " if row["peak_bytes"] else ""
            rate = f"{row['tokens_per_s']:.0f} tokens/s, {row['seconds']:.3f} s a step"
            yield f"{row['system']}: {rate}, {sizes}{row['trained_parameters'] / 1e6:.0f} M parameters"
    for part in ("lora", "models"):
        yield from (f"{row['system']}: {row['error']}" for row in report[part] if "error" in row)


def main(argv: Sequence[str]) -> int:
    """Prints the tables, and writes the report to --json. 1 if a result of jmx is wrong or missing."""
    arguments = parse(argv)
    start = time.monotonic()
    report: dict[str, Any] = {"machine": [], "layer": [], "lora": [], "models": []}
    workers = [*workers_of(arguments)]
    try:
        for _, worker, _ in workers:  # which use the card, too: XLA times products to choose among them
            worker.wait_for_compiling(start + arguments.compiling)
            print(f"{time.monotonic() - start:.0f} s: {worker.name}: {worker.failure or 'compiled'}", file=sys.stderr)
        for part, worker, lines in workers:
            for row in results(worker, lines, start + arguments.limit):
                report[part].append({"system": worker.name, **row})
                print(f"{time.monotonic() - start:.0f} s: {json.dumps(report[part][-1])}", file=sys.stderr, flush=True)
    finally:
        for _, worker, _ in workers:
            worker.end()
    print(table(report["layer"]), *others(report), sep="\n")
    machine = report.pop("machine")[0]
    settings = vars(arguments) | {"json": None}
    if arguments.json:
        text = json.dumps({**machine, "settings": settings, **report}, default=str, indent=1)
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(text + "\n")
    mine = [row for row in report["layer"] if row["system"] == "mosaic"] + report["lora"] + report["models"]
    return int(any("error" in row for row in mine))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
