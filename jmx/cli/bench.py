"""`jmx bench`: times one layer against the machine's own limits."""

import argparse
import os
import pathlib
from typing import Any

from jmx.cli.common import (
    EXIT_NO,
    EXIT_OK,
    Parser,
    check_directories,
    check_known,
    counts,
    number,
    print_json,
    resolved_pair,
    show,
    to_stderr,
)


def add(command: Parser) -> None:
    command.add_argument("--model", metavar="NAME", help="a named shape (default gpt-oss-120b; on a CPU small)")
    command.add_argument(
        "--tokens", type=counts, metavar="N,...", help="token counts (default 1,64,1024,8192; on a CPU 1,16,64)"
    )
    command.add_argument("--routing", default="uniform", metavar="NAME", help="uniform (default), zipf, half or top1")
    command.add_argument(
        "--format",
        metavar="NAME,...",
        help="weight formats, one after the other, optionally with an input format after a colon (default mxfp4)",
    )
    command.add_argument("--backends", metavar="NAME,...", help="backends, and ragged_dot (default: all that run here)")
    command.add_argument(
        "--layers", type=number, metavar="N", help="different layers in one call (default 16 up to 16 tokens, 4 beyond)"
    )
    command.add_argument("--repeats", type=number, default=5, metavar="N", help="samples of each median (default 5)")
    command.add_argument("--seed", type=int, metavar="N", help="of weights and tokens (default: a new one)")
    command.add_argument("--from", dest="saved", metavar="FILE", help="show a saved JSON file instead of measuring")
    command.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="save JSON to FILE, or print it on stdout without FILE; rows measured so far are in FILE.part. "
        "Replaces an earlier report, and no other file",
    )
    command.add_argument(
        "--png",
        metavar="FILE",
        help="draw time over floor against tokens. Replaces an earlier picture of this command, and no other file",
    )


def run(arguments: argparse.Namespace) -> int:
    from jmx.perf import roofline

    kept = None if arguments.json == "-" else arguments.json
    part = None if kept is None or arguments.saved is not None else pathlib.Path(f"{kept}.part")
    check_directories(kept, arguments.png)
    roofline.check_outputs(kept, arguments.png)
    if part is not None:
        roofline.check_outputs(str(part), arguments.png)
    if arguments.png is not None:
        roofline.require_matplotlib()
    report = _measure(arguments, part) if arguments.saved is None else roofline.Report.load(arguments.saved)
    if arguments.json == "-":
        print_json(report.as_dict())
    else:
        show(report)
        if kept is not None:
            report.save(kept)
        if part is not None and os.path.lexists(part):
            roofline.SAVED.check(part)
            part.unlink()
    if arguments.png is not None:
        roofline.draw(report, arguments.png)
    measured = [row for row in report.rows if row.us is not None]
    return EXIT_OK if measured and all(row.error is None for row in measured) else EXIT_NO


def _measure(arguments: argparse.Namespace, part: pathlib.Path | None) -> Any:
    """Measures the layers that the flags describe. `part`: the file for the rows measured so far."""
    import jax

    from jmx.perf import bench, shapes

    on_cpu = jax.default_backend() == "cpu"
    model = arguments.model if arguments.model is not None else "small" if on_cpu else "gpt-oss-120b"
    backends = None if arguments.backends is None else arguments.backends.split(",")
    check_known("--model", model, shapes.MODELS)
    check_known("--routing", arguments.routing, shapes.ROUTINGS)
    for name in backends or ():
        check_known("--backends", name, bench.systems())
    pairs = None if arguments.format is None else [resolved_pair(pair) for pair in arguments.format.split(",")]
    return bench.run(
        model,
        arguments.tokens or ([1, 16, 64] if on_cpu else [1, 64, 1024, 8192]),
        routing=arguments.routing,
        formats=pairs,
        backends=backends,
        layers=arguments.layers,
        repeats=arguments.repeats,
        seed=arguments.seed,
        progress=to_stderr,
        so_far=lambda report: None if part is None else report.save(str(part)),
    )
