#!/usr/bin/env python3
"""Times one MoE layer on this machine: `jmx bench`, runnable from a checkout where jmx is not installed.

    python benchmarks/layer.py --model gpt-oss-120b --tokens 1,64,1024,8192 --json out.json --png out.png
    python benchmarks/layer.py --peers DIR --tokens 1,64,1024,8192 --json out.json --png out.png

With --peers it also times other systems, on an NVIDIA GPU: README.md in this folder explains how to fetch them, and
docs/benchmark_method.md how everything is timed. All other options are those of `jmx bench`.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx import cli
from jmx.perf import roofline

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ("triton_kernels", "marlin", "humming")  # modules of benchmarks/peers
_TIMEOUT = 600  # seconds for one peer, all token counts


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark of `argv`, and returns the exit code of `jmx bench`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--peers", metavar="DIR")
    parser.add_argument("--which", metavar="NAME,...", default=",".join(PEERS))
    arguments, rest = parser.parse_known_args(argv)
    if {"-h", "--help"} & {*rest}:
        print(f"{__doc__}\n  --which NAME,...  the peers to time (default {arguments.which})\n")
    if arguments.peers is None:
        return cli.main(["bench", *rest])
    packages, which = pathlib.Path(arguments.peers).resolve(), arguments.which.split(",")
    if not (packages / "versions.json").is_file():
        return _refuse(f"`--peers` (={arguments.peers}) must be a directory that benchmarks/peers/fetch.py filled")
    for name in which:
        if name not in PEERS:
            return _refuse(f"`--which` (={name!r}) must be one of {', '.join(PEERS)}")
    return _beside(packages, which, rest)


def _refuse(why: str) -> int:
    print(f"layer.py: error: {why}", file=sys.stderr)
    return cli.EXIT_USAGE


def _beside(packages: pathlib.Path, which: Sequence[str], rest: Sequence[str]) -> int:
    """Times jmx first, in another process, so that the card's memory is freed; then each peer; writes one report."""
    output = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    output.add_argument("--json", nargs="?", const="-")
    output.add_argument("--png")
    wanted, rest = output.parse_known_args(rest)
    try:
        roofline.check_outputs(None if wanted.json == "-" else wanted.json, wanted.png)
    except (ValueError, OSError) as e:
        return _refuse(str(e))
    with tempfile.TemporaryDirectory() as directory:
        file = str(pathlib.Path(directory, "report.json"))
        ours = [sys.executable, __file__, *rest, "--json", file]
        code = subprocess.run(ours, stdout=subprocess.DEVNULL, check=False).returncode
        if code not in (cli.EXIT_OK, cli.EXIT_NO) or not pathlib.Path(file).exists():
            return code
        with_peers(file, packages, which)
        shown = ["--json"] if wanted.json == "-" else [] if wanted.json is None else ["--json", wanted.json]
        drawn = [] if wanted.png is None else ["--png", wanted.png]
        return cli.main(["bench", "--from", file, *shown, *drawn])


def with_peers(file: str, packages: pathlib.Path, which: Sequence[str]) -> None:
    """Adds the peers' rows to a saved report: its model, tokens, routing and limits, timed now on this machine.

    A peer that cannot run, or that ends early, has rows with the error.
    """
    from jmx.perf import bench, shapes
    from jmx.perf.roofline import Report, Row

    report = Report.load(file)
    settings, machine = report.settings, dict(report.machine)
    shape = shapes.routed_shape(settings["model"], settings["routing"])
    rows = list(report.rows)
    # As many layers as jmx had: fewer than requested if memory was short.
    layers = [max(row.layers or 1 for row in rows if row.tokens == tokens) for tokens in settings["tokens"]]
    for system in which:
        versions, measured, failure = measure(system, packages, peer_shape(shape), {**settings, "layers": layers})
        machine["versions"] = machine["versions"] | versions
        for tokens in settings["tokens"]:
            found = measured.get(tokens, {"error": failure})
            row = Row(system, tokens, weights="mxfp4", **found)
            rows.append(bench.judge(row, shape.problem(tokens, "packed"), report.limits))
            print(rows[-1], file=sys.stderr)
    dataclasses.replace(report, machine=machine, rows=tuple(rows)).save(file)


def peer_shape(shape: Any) -> dict[str, Any]:
    """A `jmx.perf.shapes.Shape` as the fields of `benchmarks.peers.problem.Shape`.

    The peers route by softmax over the largest logits, whatever the method: that costs the same or less.
    """
    from jmx.activations import SwiGLU

    plain = SwiGLU()  # what SiLUAndMul computes
    activation = shape.activation if isinstance(shape.activation, SwiGLU) else plain
    sizes = {name: getattr(shape, name) for name in ("num_experts", "hidden_size", "intermediate_size", "bias")}
    return sizes | {"top_k": shape.method.top_k} | dataclasses.asdict(activation)


def measure(
    system: str, packages: pathlib.Path, shape: dict[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, str], dict[int, dict[str, Any]], str]:
    """Versions, the fields of each row by number of tokens, and the reason for missing rows.

    Args:
        settings: a report's, of which `layers` is a list: those in one call, at each of `tokens`.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory, "rows.jsonl")
        options = {
            "packages": packages,
            "shape": json.dumps(shape),
            "output": file,
        }
        options |= {name: ",".join(str(count) for count in settings[name]) for name in ("tokens", "layers")}
        options |= {name: settings[name] for name in ("routing", "repeats")}
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "benchmarks.peers.run", system, *flags]
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=_TIMEOUT, check=False)
            failure = f"{system}'s process ended with exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"{system}'s process took more than {_TIMEOUT} s"
        lines = file.read_text().splitlines() if file.exists() else []
    versions, *rows = [json.loads(line) for line in lines] or [{}]
    return versions, {row.pop("tokens"): row for row in rows}, failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
