#!/usr/bin/env python3
"""Times attention of published models: the kernels of jmx, and those of jax, cuDNN and tokamax beside them.

    python benchmarks/attention.py --json FILE
    python benchmarks/attention.py --systems jmx,cudnn --cases "deepseek-v3 step"

Each system runs in a process of its own. All of them compile at first, at the same time; then one after the other
checks its results against float32 and is timed, on the same card. A process that prints nothing for a while is killed,
and its other cases have no times. A case is the attention of one layer, several different layers a call, so that keys
and values do not come from the GPU's cache (24 layers of one row over 1024 tokens fit into it), and several passes over
the layers a call, so that the host is not what takes the time. Its floor is the larger of its bytes at the rate of a
copy, and its flops at that of a dense product, measured in the same run.
"""

import argparse
import collections
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention_cases import SYSTEMS, Case, all_cases
from benchmarks.worker import LIMITS, Worker
from jmx.util import atomic_files

WORKER = pathlib.Path(__file__).resolve().parent / "attention_worker.py"
COMPILING, SILENT = 110.0, 20.0  # seconds


def worker_of(system: str, cases: Sequence[Case]) -> Worker:
    """The process of a system, or of "limits"."""
    return Worker(system, [sys.executable, str(WORKER), system, json.dumps(cases)])


def results(worker: Worker, cases: Sequence[Any], end: float) -> Iterator[dict[str, Any]]:
    """A row of each case; an error in it from where the process failed."""
    done = 0
    try:
        if worker.failure is not None:
            raise worker.failure
        worker.start()
        for case in cases:
            first = 30 if done == 0 else 0  # its arrays of random numbers
            row = worker.line(min(time.monotonic() + SILENT + first, end))
            yield row | {"case": case}
            done += 1
    except (TimeoutError, RuntimeError, OSError) as error:
        for number, case in enumerate(cases[done:]):
            text = str(error) if number == 0 else f"not run, since {cases[done]} failed ({error})"
            yield {"case": case, "error": text}
    finally:
        worker.end()


def row_of(system: str, result: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """A result with its case's fields, rates and floor."""
    case: Case = result.pop("case")
    row = {"system": system, **case._asdict(), "error": None, **result}
    if result.get("us"):
        floor = max(case.bytes / machine["copy_TBs"], case.flops / machine["dense_TFLOPs"]) / 1e6
        row |= {"tb_s": case.bytes / result["us"] / 1e6, "tflop_s": case.flops / result["us"] / 1e6}
        row |= {"floor_us": floor, "over_floor": result["us"] / floor}
    return row


def table(rows: Sequence[dict[str, Any]], systems: Sequence[str], cases: Sequence[Case]) -> str:
    """Microseconds of each case and system, and their ratio to jmx's."""
    by_case = collections.defaultdict(dict)
    for row in rows:
        by_case[Case(*(row[field] for field in Case._fields))][row["system"]] = row
    lines = ["| case | floor, us | " + " | ".join(systems) + " |", "|---" * (len(systems) + 2) + "|"]
    for case in cases:
        found = by_case[case]
        timed = {system: row["us"] for system, row in found.items() if row.get("us")}
        floor = next((row["floor_us"] for row in found.values() if row.get("us")), None)
        cells = []
        for system in systems:
            ratio = f" ({timed[system] / timed['jmx']:.2f} x)" if "jmx" in timed and system in timed else ""
            cells.append(f"{timed[system]:.1f}{ratio}" if system in timed else "-")
        lines.append(f"| {case} | {'-' if floor is None else f'{floor:.1f}'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def errors(rows: Sequence[dict[str, Any]]) -> str:
    """Why there are no times, each reason of a system once, and what was not as in the case."""
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for row in rows:
        if row["error"] or row.get("note"):
            case = Case(*(row[field] for field in Case._fields))
            found[row["system"], row["error"] or row["note"]].append(str(case))
    return "\n".join(f"{system}: {why}: {len(cases)} cases, {cases[0]}" for (system, why), cases in found.items())


def main(argv: Sequence[str]) -> int:
    """Prints the tables, and writes rows to --json. 1 if a result of jmx was wrong or missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--cases", default="", help="only cases that contain this text, such as 'gpt-oss step'")
    parser.add_argument("--limit", type=float, default=190, help="seconds, after which what runs is killed")
    parser.add_argument("--json", type=pathlib.Path, help="a new file for the results")
    arguments = parser.parse_args(argv)
    if arguments.json:
        atomic_files.check_new(arguments.json)
    systems = arguments.systems.split(",")
    if unknown := {*systems} - {*SYSTEMS}:
        parser.error(f"`--systems` ({', '.join(sorted(unknown))}) must be of {', '.join(SYSTEMS)}")
    cases = [case for case in all_cases() if arguments.cases in str(case)]
    if not cases:
        parser.error(f"`--cases` (={arguments.cases!r}) must be a part of a case: {'; '.join(map(str, all_cases()))}")
    start = time.monotonic()
    end = start + arguments.limit
    limits, workers = worker_of(LIMITS, []), [worker_of(system, cases) for system in systems]
    rows: list[dict[str, Any]] = []
    try:
        for worker in (limits, *workers):  # which use the card, too: XLA times products to choose among them
            worker.wait_for_compiling(start + COMPILING)
        limits.start()
        machine = limits.line(end)
        print(json.dumps(machine), file=sys.stderr)
        for worker in workers:
            for result in results(worker, cases, end):
                rows.append(row_of(worker.name, result, machine))
                print(f"{time.monotonic() - start:.0f} s: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    finally:
        for worker in (limits, *workers):
            worker.end()
    print(table(rows, systems, cases), errors(rows), sep="\n\n")
    if arguments.json:
        with atomic_files.new_path(arguments.json) as new:
            new.write_text(
                json.dumps({**machine, "settings": vars(arguments), "rows": rows}, default=str, indent=1) + "\n"
            )
    return int(any(row["error"] for row in rows if row["system"] == "jmx"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
