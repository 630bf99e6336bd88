#!/usr/bin/env python3
"""Times a layer divided over the GPUs of a host, at many token counts: `jmx bench --mesh`, a process for each count.

    python benchmarks/mesh_table.py FOLDER --mesh ep=4 --exchange peer_lines,peer,gather,rows --tokens 1,64,1024,8192

Most of the time goes into lowering and compiling, of which a process does one program after the other. So all processes
compile at once, and then measure in turn, with nothing beside them. FOLDER/table.json has all rows, FOLDER/table.svg is
their picture, FOLDER/TOKENS.log what a process printed. An exchange that does not run at a count has no row there.
"""

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

GO = "go"  # what a process waits for after it has compiled
COMPILED = "compiled"  # what it prints then
# Processes wait with their programs on the GPUs, and get memory only when they measure.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}


def layers_of(tokens: int) -> int:
    """Layers in one call: fewer where each takes longer."""
    return 8 if tokens <= 64 else 4 if tokens <= 1024 else 2


def measure(arguments: argparse.Namespace, tokens: int) -> None:
    """In a process of its own: compiles, waits for a line, and writes the report of one token count."""
    from jmx.cli import layer_split, mesh_argument
    from jmx.perf import bench_mesh
    from jmx.perf.shapes import routed_shape

    def progress(line: str) -> None:
        if line.startswith("measuring"):
            print(COMPILED, flush=True)
            if sys.stdin.readline().strip() != GO:
                sys.exit(1)
        print(line, file=sys.stderr, flush=True)

    mesh = mesh_argument.make(arguments.mesh)
    shape = routed_shape(arguments.model, "uniform")
    splits = [
        split
        for split in layer_split.splits_of(mesh, arguments)
        if bench_mesh.division(shape, tokens, mesh, split).chosen is not None
    ]
    if not splits:
        sys.exit(f"error: `--exchange` (={arguments.exchange}) must name one that runs with {tokens} tokens a device")
    layers = min(layers_of(tokens), arguments.layers)
    options: dict[str, Any] = {"layers": layers, "repeats": arguments.repeats, "seed": 1}
    report = bench_mesh.run(arguments.model, [tokens], mesh, splits, progress=progress, **options)
    report.save(str(arguments.folder / f"{tokens}.json"))


@dataclass
class Part:
    """The process of one token count."""

    tokens: int
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, tokens: int, folder: pathlib.Path) -> "Part":
        """It has the arguments of this process."""
        command = [sys.executable, *sys.argv, "--part", str(tokens)]
        with (folder / f"{tokens}.log").open("w") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            return cls(tokens, subprocess.Popen(command, env=os.environ | ENVIRONMENT, **pipes))

    def compiled(self) -> bool:
        """Waits until it has compiled, or has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip() == COMPILED

    def run(self, timeout_s: float) -> int:
        """Lets it measure; its exit code. It is killed after so many seconds: an exchange could hang."""
        try:
            self.process.communicate(f"{GO}\n", timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return self.process.wait()


def main() -> int:
    """Writes the files, and prints a line for each token count; 1 if one of them has no report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="a new folder for the results")
    parser.add_argument("--model", default="gpt-oss-120b")
    parser.add_argument("--mesh", required=True, metavar="NAME=SIZE,...")
    parser.add_argument("--exchange", help="in turn (default: the one that is chosen)")
    parser.add_argument("--chunks", default="1", help="of gather and peer, in turn (default: 1)")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096,8192", help="of a device (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="in one call, at most (default: 8)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=60, help="seconds to measure a count (default: 60)")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.chunks = [int(count) for count in arguments.chunks.split(",")]
    if arguments.part is not None:
        measure(arguments, arguments.part)
        return 0
    arguments.folder.mkdir()
    start = time.perf_counter()
    parts = [Part.start(int(tokens), arguments.folder) for tokens in arguments.tokens.split(",")]
    ready = [part for part in parts if part.compiled()]
    print(f"{len(ready)} of {len(parts)} compiled after {time.perf_counter() - start:.0f} s", flush=True)
    codes = {part.tokens: part.run(arguments.timeout) for part in parts}
    for tokens, code in codes.items():
        print(f"{tokens} tokens: {'measured' if code == 0 else f'exit code {code}, see {tokens}.log'}", flush=True)
    join(arguments.folder, [tokens for tokens, code in codes.items() if code == 0])
    return int(any(codes.values()))


def join(folder: pathlib.Path, counts: list[int]) -> None:
    """Writes table.json and its picture."""
    from mesh_picture import draw, together

    from jmx.perf.roofline import Report

    if counts:
        report = together([Report.load(str(folder / f"{tokens}.json")) for tokens in counts])
        report = dataclasses.replace(report, settings={**report.settings, "tokens": counts, "layers": None})
        report.save(str(folder / "table.json"))
        draw(report, str(folder / "table.svg"))


if __name__ == "__main__":
    sys.exit(main())
