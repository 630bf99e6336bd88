#!/usr/bin/env python3
"""Times grouped products of bfloat16 weights of published models, and their gradients: jmx's kernels and their peers.

    python benchmarks/float_products.py --json FILE
    python benchmarks/float_products.py --systems jmx,tokamax --models gpt-oss-20b --tokens 64,8192

A case is one product of a layer, forward or one of its two gradients (dx of the rows, dw of the weights), on the rows
that random routing gives each expert. Rows of no expert, which jmx has between experts as its layer does, are not
counted. The rates of a copy and of a dense product of 8192 x 8192 x 8192 are measured first. Each system has a process
for each model and role, with a part of the card's memory. All of them compile at the same time; then one after the
other checks its results against float32 and is timed, on the same card: in turn each of its configurations, and a dense
product of the same FLOPs, all rows times one weight. The time of that over the system's is its share of the dense rate.
A process that prints nothing for a while is killed, and its other cases have no times.
"""

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention import results
from benchmarks.float_products_cases import PASSES, ROLES, SYSTEMS, TOKENS, Case, all_cases
from benchmarks.worker import LIMITS, Worker
from jmx.perf.shapes import MODELS
from jmx.util import atomic_files

WORKER = pathlib.Path(__file__).resolve().parent / "float_products_worker.py"


def worker_of(system: str, cases: Sequence[Case]) -> Worker:
    """The process of a system, or of "limits"."""
    return Worker(system, [sys.executable, str(WORKER), system, json.dumps(cases)])


def of_layers(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases of each model and role, whose weights are made once in one process."""
    return [list(its) for _, its in itertools.groupby(cases, lambda case: (case.model, case.role))]


def row_of(system: str, result: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A result with its case's fields, its rate as a share of the dense product's, and its bytes' of the copy's."""
    case: Case = result.pop("case")
    row = {"system": system, **case._asdict(), "error": None, **result}
    if result.get("us"):
        row |= {"of_dense": result["dense_us"] / result["us"]}
        row |= {"of_copy": case.bytes / result["us"] / 1e6 / machine["copy_TBs"]}
    return row


def table(rows: Sequence[dict[str, Any]], systems: Sequence[str], cases: Sequence[Case]) -> str:
    """Microseconds of each case and system, and the first system's shares of the machine's rates."""
    found = {(Case(*(row[field] for field in Case._fields)), row["system"]): row for row in rows}
    lines = ["| case | " + " | ".join(systems) + f" | {systems[0]}: dense | copy |", "|---" * (len(systems) + 3) + "|"]
    for case in cases:
        cells = [found.get((case, system), {}) for system in systems]
        times = [f"{row['us']:.1f}" if row.get("us") else "-" for row in cells]
        shares = [f"{cells[0][name]:.1%}" if name in cells[0] else "-" for name in ("of_dense", "of_copy")]
        lines.append(f"| {case} | " + " | ".join([*times, *shares]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Prints a table, and writes rows to --json. 1 if a result of jmx was wrong or missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    lists = {
        "systems": [*SYSTEMS],
        "models": ["gpt-oss-20b", "qwen3-30b-a3b"],
        "roles": [*ROLES],
        "passes": [*PASSES],
        "tokens": [str(count) for count in TOKENS],
    }
    known = lists | {"models": sorted(MODELS), "tokens": None}
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=",".join(default), help="separated by commas")
    parser.add_argument("--limit", type=float, default=190, help="seconds, after which what runs is killed")
    parser.add_argument("--json", type=pathlib.Path, help="a new file for the results")
    arguments = parser.parse_args(argv)
    if arguments.json:
        atomic_files.check_new(arguments.json)
    given = {name: getattr(arguments, name).split(",") for name in lists}
    for name, values in given.items():
        allowed = known[name]
        wrong = [v for v in values if (not v.isdecimal() or int(v) < 1 if allowed is None else v not in allowed)]
        if wrong:
            rule = "numbers from 1 on" if allowed is None else f"of {', '.join(allowed)}"
            parser.error(f"`--{name}` (={','.join(wrong)}) must be {rule}")
    systems = given["systems"]
    cases = all_cases(given["models"], given["roles"], given["passes"], [int(count) for count in given["tokens"]])
    start = time.monotonic()
    end = start + arguments.limit
    limits = worker_of(LIMITS, [])
    workers: list[tuple[Worker, list[Case]]] = []
    rows: list[dict[str, Any]] = []
    try:
        limits.start()  # before others use the card: XLA times products to choose among them
        limits.wait_for_compiling(end)
        machine = limits.line(end)
        print(json.dumps(machine), file=sys.stderr, flush=True)
        limits.end()  # and so its memory is free
        workers += [(worker_of(system, its), its) for system in systems for its in of_layers(cases)]
        for worker, _ in workers:
            worker.wait_for_compiling(end)
        print(f"{time.monotonic() - start:.0f} s: all is compiled", file=sys.stderr, flush=True)
        for worker, its in workers:
            for result in results(worker, its, end):
                rows.append(row_of(worker.name, result, machine))
                print(f"{time.monotonic() - start:.0f} s: {_line(rows[-1])}", file=sys.stderr, flush=True)
    finally:
        for worker in (limits, *(worker for worker, _ in workers)):
            worker.end()
    print(table(rows, systems, cases))
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            settings = {name: str(value) for name, value in vars(arguments).items()}
            new.write_text(json.dumps({**machine, "settings": settings, "rows": rows}, indent=1) + "\n")
    return int(any(row["error"] for row in rows if row["system"] == "jmx"))


def _line(row: dict[str, Any]) -> str:
    """A row in few words."""
    name = f"{row['system']} {row['model']} {row['role']} {row['which']} {row['tokens']}"
    if row["error"]:
        return f"{name}: {row['error']}"
    each = ", ".join(f"{key or 'chosen'} {time:.1f}" for key, time in row["all_us"].items())
    failures = "".join(f"; {key}: {why}" for key, why in row.get("failures", {}).items())
    return f"{name}: {row['of_dense']:.1%} of dense, {row['of_copy']:.1%} of copy; us: {each}{failures}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
