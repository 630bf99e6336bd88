#!/usr/bin/env python3
"""Times training on one device: a layer's gradients beside other systems', with those of its weights, adapters on a
layer, and on whole models.

    python benchmarks/training.py --json FILE
    python benchmarks/training.py --parts layer,lora --tokens 64

Each system and model is measured in a process of its own, one after the other: processes that compile at the same time
take the card's memory for the products that XLA times to choose among them, and wait for each other's. A process that
compiles for too long, or prints nothing for a while, is killed, and the reason is in the results. Parts: `weights`
(training_weights.py), `lora` (lora.py), `layer` (training_layer.py; torch's products: peers/grouped_mm.py), `models`
(training_model.py). A file of results has one entry for each run, to which a run is added as its results come.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.worker import Worker
from jmx.perf.shapes import MODELS
from jmx.util import atomic_files

ROOT = pathlib.Path(__file__).resolve().parent
SYSTEMS = ("mosaic", "mosaic+h", "grouped_mm", "tokamax", "ragged_dot_mgpu", "ragged_dot")
OF_WEIGHTS = ("qat", "qat-bfloat16", "mosaic_float", "tokamax", "ragged_dot")
PARTS = ("weights", "lora", "layer", "models")
SILENT = 60.0  # seconds without a line, after which a process that runs is killed

# Adapters of all experts, by rank and dtype. Those of 16 in float32 would need 17 GB of matrices, gradients and Adam's
# sums beside the 65 GB of gpt-oss-120b; those of 8 in bfloat16 need a quarter of that, for which 80 GB suffice.
TRAINED = (
    {"model": "gpt-oss-20b", "rank": 16, "dtype": "float32"},
    {"model": "gpt-oss-120b", "rank": 8, "dtype": "bfloat16"},
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
    parser.add_argument("--weights-systems", default=",".join(OF_WEIGHTS), help="of a layer whose weights are trained")
    parser.add_argument("--weights-model", default="gpt-oss-20b", choices=sorted(MODELS), help="of that layer")
    parser.add_argument("--weights-tokens", default="1024,8192", help="of that layer")
    parser.add_argument("--trained", type=json.loads, default=TRAINED, help="JSON, settings of training_model.py")
    parser.add_argument(
        "--compiling", type=float, default=120, help="seconds, after which a process that still compiles is killed"
    )
    parser.add_argument("--limit", type=float, default=1200, help="seconds for all; what runs then is killed")
    parser.add_argument("--json", type=pathlib.Path, help="a file for the results, or one that has those of other runs")
    arguments = parser.parse_args(argv)
    if unknown := {*arguments.parts.split(",")} - {*PARTS}:
        parser.error(f"`--parts` ({', '.join(sorted(unknown))}) must be of {', '.join(PARTS)}")
    if arguments.json is not None:
        atomic_files.check_new(arguments.json, REPORT, overwrite=True)
    return arguments


# The rows of each part, and of "machine".
Report = dict[str, list[dict[str, Any]]]


def runs_in(path: pathlib.Path) -> list[dict[str, Any]]:
    """The runs in a report."""
    return json.loads(path.read_text())["runs"]


def _fault(path: pathlib.Path) -> str | None:
    try:
        return None if isinstance(runs_in(path), list) else "its runs are no list"
    except (ValueError, KeyError, TypeError):
        return "it has no runs"


REPORT = atomic_files.Kind("a report of benchmarks/training.py", _fault)


def workers_of(arguments: argparse.Namespace) -> Iterator[tuple[str, Worker, int]]:
    """The part, the process, and how many lines it prints; first the one that measures the machine.

    A process is started when the iterator comes to it.
    """

    def started(name: str, script: str, *rest: str) -> Worker:
        return Worker(name, [sys.executable, str(ROOT / script), *rest])

    parts, tokens = arguments.parts.split(","), [int(count) for count in arguments.tokens.split(",")]
    settings = {"model": arguments.model, "tokens": tokens, "layers": arguments.layers, "repeats": arguments.repeats}
    yield "machine", started("limits", "training_layer.py", "limits", json.dumps(settings)), 1
    if "weights" in parts:
        counts = [int(count) for count in arguments.weights_tokens.split(",")]
        its = settings | {"model": arguments.weights_model, "tokens": counts}
        for system in arguments.weights_systems.split(","):
            yield "weights", started(system, "training_weights.py", system, json.dumps(its)), len(counts)
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
    if "layer" in parts:
        for system in arguments.systems.split(","):
            if system == "grouped_mm":
                worker = started(
                    system, "peers/grouped_mm.py", json.dumps(settings | {"shape": torch_shape(arguments)})
                )
            else:
                worker = started(system, "training_layer.py", system, json.dumps(settings))
            yield "layer", worker, len(tokens)
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
    """A layer's times, us, and temporary memory, MB a call; with gradients of weights, the time without them, too."""
    between = ["forward, dx"] if any("rows_us" in row for row in rows) else []
    heads = ["tokens", "system", "forward", *between, "forward + backward", "over forward", "temporary, MB"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in sorted(rows, key=lambda row: row.get("tokens", 0)):
        cells = [str(row.get("tokens", "-")), row["system"]]
        if "both_us" in row:
            times = [f"{row[name]:.0f}" for name in ("forward_us", "rows_us", "both_us") if name in row]
            cells += [*times, f"{row['over_forward']:.2f}", f"{row['both_temporary_bytes'] / 1e6:.0f}"]
        else:
            cells += [row["error"][:120], *[""] * (len(heads) - 3)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def others(report: Report) -> Iterator[str]:
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


def measured(arguments: argparse.Namespace, log: Callable[[str], None], written: Callable[[Report], None]) -> Report:
    """The results of each part. `written` takes those that there are after each process."""
    report: Report = {part: [] for part in ("machine", *PARTS)}
    end = time.monotonic() + arguments.limit
    for part, worker, lines in workers_of(arguments):
        worker.wait_for_compiling(min(time.monotonic() + arguments.compiling, end))
        log(f"{worker.name}: {worker.failure or 'compiled'}")
        for row in results(worker, lines, end):
            report[part].append({"system": worker.name, **row})
            log(json.dumps(report[part][-1]))
        written(report)
    return report


def add_run(path: pathlib.Path, runs: Sequence[dict[str, Any]], settings: dict[str, Any], report: Report) -> None:
    """Writes a file of `runs` and of the one with these settings and results."""
    parts = {part: rows for part, rows in report.items() if part != "machine"}
    text = json.dumps({"runs": [*runs, {**report["machine"][0], "settings": settings, **parts}]}, default=str, indent=1)
    with atomic_files.new_path(path, REPORT, overwrite=True) as new:
        new.write_text(text + "\n")


def main(argv: Sequence[str]) -> int:
    """Prints the tables, and writes the report to --json. 1 if a result of jmx is wrong or missing."""
    arguments = parse(argv)
    start = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - start:.0f} s: {text}", file=sys.stderr, flush=True)

    runs = runs_in(arguments.json) if arguments.json is not None and arguments.json.exists() else []
    settings = vars(arguments) | {"json": None}

    def written(report: Report) -> None:
        if arguments.json is not None:
            add_run(arguments.json, runs, settings, report)

    report = measured(arguments, log, written)
    print(table(report["layer"]), "Weights are trained:", table(report["weights"]), *others(report), sep="\n")
    mine = [row for part in ("layer", "weights") for row in report[part] if row["system"].startswith(("mosaic", "qat"))]
    mine += report["lora"] + report["models"]
    return int(any("error" in row for row in mine))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
