#!/usr/bin/env python3
"""Times one layer of jmx, and of the peers, in processes that compile side by side and then take turns on the card.

    python benchmarks/layer_turns.py out.json --model gpt-oss-120b --peers DIR
    python benchmarks/layer_turns.py out.json --model gpt-oss-20b --backends mosaic --formats mxfp4,nvfp4,fp8_block

Weights, tokens, checks and times are those of `benchmarks/layer.py` (docs/benchmark_method.md), which compiles each
program right before it is timed. That takes most of its time, so here each backend in each format has --processes
processes, and each peer one. All compile at once, with a host's cores; then the limits are measured, and one process
after the other times its token counts, with nothing beside it. The report is saved after each row. A process that does
not compile in time has rows with the reason; of several formats, one that a backend does not run has none.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from benchmarks.attention import results
from benchmarks.layer import PEERS, peer_shape
from benchmarks.worker import LIMITS, Worker
from jmx.perf import bench, roofline
from jmx.perf.roofline import Limits, Report, Row
from jmx.perf.settings import Settings
from jmx.perf.shapes import Shape, routed_shape
from jmx.selection.select import NoBackendError
from jmx.util.checks import check_one_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
BACKENDS = ("mosaic", "cutlass", "triton", "xla")
TOKENS = "1,4,16,64,256,1024,4096,8192"


@dataclass(frozen=True)
class Part:
    """What one process times: a system, in a format of `jmx bench`'s or the model's own, at some token counts."""

    system: str
    pair: str | None
    tokens: tuple[int, ...]

    def command(self, settings: Settings, packages: pathlib.Path | None) -> list[str]:
        """What runs it. `packages`: the peers'."""
        if self.system not in PEERS:
            names = "model", "routing", "layers", "repeats", "seed"
            given = {name: getattr(settings, name) for name in names} | {"pair": self.pair, "tokens": self.tokens}
            return [sys.executable, str(ROOT / "benchmarks/layer_turns_worker.py"), self.system, json.dumps(given)]
        counts = {"tokens": self.tokens, "layers": [bench.layers_of_call(t, settings.layers) for t in self.tokens]}
        options: dict[str, Any] = {name: ",".join(map(str, its)) for name, its in counts.items()}
        options |= {"packages": packages, "routing": settings.routing, "repeats": settings.repeats}
        options |= {"shape": json.dumps(peer_shape(routed_shape(settings.model, settings.routing)))}
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "benchmarks.peers.run", self.system, *flags]


def plan(settings: Settings, backends: Sequence[str], peers: Sequence[str], processes: int) -> list[Part]:
    """The parts in the order in which they are timed: those of a backend and format share the token counts."""
    counts = tuple(settings.tokens)
    dealt = [counts[first::processes] for first in range(processes)]
    pairs: list[str | None] = list(settings.formats or [None])
    ours = [Part(name, pair, its) for name in backends for pair in pairs for its in dealt if its]
    return [Part(LIMITS, None, ()), *ours, *(Part(name, None, counts) for name in peers)]


@dataclass
class Table:
    """The rows so far, saved to a file after each one."""

    settings: Settings
    file: str
    machine: dict[str, Any] = field(default_factory=dict)
    limits: Limits | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return routed_shape(self.settings.model, self.settings.routing)

    def add_limits(self, found: Mapping[str, Any]) -> None:
        """What the process "limits" prints."""
        rates = found["copy_TBs"] * 1e12, found["dense_TFLOPs"] * 1e12
        self.limits = Limits(*rates)
        self.machine = {name: value for name, value in found.items() if name not in ("copy_TBs", "dense_TFLOPs")}

    def add(self, part: Part, result: Mapping[str, Any]) -> Row | None:
        """A row of what a process printed for one token count; None if the backend lacks one of several formats."""
        assert self.limits is not None
        fields = {name: value for name, value in result.items() if name != "case"} | {"tokens": result["case"]}
        if len(self.settings.formats or ()) > 1 and str(fields.get("error")).startswith(NoBackendError.__name__):
            return None
        self.machine["versions"] = self.machine["versions"] | fields.pop("versions", {})
        shape = self.shape if part.pair is None else self.shape.in_formats(part.pair)
        if part.pair is not None:
            fields |= {"format": shape.format, "input_format": shape.input_format}
        if part.system in PEERS:
            fields |= {"weights": "mxfp4"}
        dense_rate = self.limits.dense_rate * fields.pop("times_bfloat16", 1)
        limits = Limits(self.limits.copy_rate, dense_rate)
        row = bench.judge(Row(part.system, **fields), shape.problem(fields["tokens"], "packed"), limits)
        self.rows.append(row)
        self.save()
        return row

    def save(self) -> None:
        """Rows of a system and format together, by tokens."""
        assert self.limits is not None
        order = list(dict.fromkeys((row.system, row.formats) for row in self.rows))
        rows = sorted(self.rows, key=lambda row: (order.index((row.system, row.formats)), row.tokens))
        Report(self.machine, self.limits, self.settings.as_dict(self.shape), tuple(rows)).save(self.file)


def timed(parts: Sequence[tuple[Part, Worker]], table: Table, end: float) -> Iterator[Row]:
    """Lets one process after the other run."""
    for part, worker in parts:
        if part.system == LIMITS:
            if worker.failure is not None:
                raise worker.failure
            worker.start()
            table.add_limits(worker.line(end))
            worker.end()
            continue
        for result in results(worker, part.tokens, end):
            if (row := table.add(part, result)) is not None:
                yield row


def main(argv: Sequence[str]) -> int:
    """Writes the report, and each row to stderr; 1 if a row has an error."""
    arguments, settings = parse(argv)
    start = time.monotonic()
    packages = None if arguments.peers is None else arguments.peers.resolve()
    peers = arguments.which if packages is not None else ()
    table = Table(settings, arguments.file)
    parts = [
        (part, Worker(f"{part.system} {part.pair or ''}", part.command(settings, packages), {"PYTHONPATH": str(ROOT)}))
        for part in plan(settings, arguments.backends, peers, arguments.processes)
    ]
    try:
        for _, worker in parts:
            worker.wait_for_compiling(start + arguments.compile_limit)
        ready = sum(worker.failure is None for _, worker in parts)
        print(f"{time.monotonic() - start:.0f} s: {ready} of {len(parts)} compiled", file=sys.stderr, flush=True)
        for _, worker in parts:
            if worker.failure is not None:
                worker.end()  # it would compile on beside those that are timed
        for row in timed(parts, table, start + arguments.limit):
            print(f"{time.monotonic() - start:.0f} s: {row}", file=sys.stderr, flush=True)
    finally:
        for _, worker in parts:
            worker.end()
    return int(any(row.error is not None for row in table.rows))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """The arguments, checked, and the settings that they make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the report, JSON")
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--tokens", type=_counts, default=_counts(TOKENS), metavar="N,...", help=TOKENS)
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--backends", type=_names, default=BACKENDS, metavar="NAME,...", help=",".join(BACKENDS))
    parser.add_argument("--formats", type=_names, metavar="WEIGHTS[:INPUTS],...", help="of jmx's backends")
    parser.add_argument("--peers", type=pathlib.Path, metavar="DIR", help="what benchmarks/peers/fetch.py filled")
    parser.add_argument("--which", type=_names, default=PEERS, metavar="NAME,...", help=",".join(PEERS))
    parser.add_argument("--layers", type=int, help="in one call (default: 16 up to 16 tokens, then 4)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--processes", type=int, default=2, help="of a backend in a format (default: 2)")
    parser.add_argument("--compile-limit", type=float, default=600, help="seconds; what has not compiled is left out")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for all; what runs then is killed")
    arguments = parser.parse_args(argv)
    try:
        roofline.check_outputs(arguments.file, None)
        options = {name: getattr(arguments, name) for name in ("routing", "layers", "repeats", "seed")}
        settings = Settings(arguments.model, arguments.tokens, arguments.formats, **options)
        for name in arguments.backends:
            check_one_of("--backends", name, bench.systems())
        for name in arguments.which:
            check_one_of("--which", name, PEERS)
        if arguments.processes < 1:
            raise ValueError(f"`--processes` (={arguments.processes}) must be at least 1")
        if arguments.peers is not None and not (arguments.peers / "versions.json").is_file():
            raise ValueError(
                f"`--peers` (={arguments.peers}) must be a directory that benchmarks/peers/fetch.py filled"
            )
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return arguments, settings


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
