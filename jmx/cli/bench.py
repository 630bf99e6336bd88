"""`jmx bench`: times one layer against the machine's own limits. `jmx bench serve` measures a running server."""

import argparse
import os
import pathlib
from typing import Any

from jmx.cli import bench_serve, layer_split, mesh_argument
from jmx.cli.checks import check_backend, check_known, resolved_pair
from jmx.cli.output import EXIT_NO, EXIT_OK, check_directories, print_json, show, to_stderr
from jmx.cli.parser import Parser, add_tokens, number


def add(command: Parser) -> None:
    command.add_argument("--model", metavar="NAME", help="a named shape (default gpt-oss-120b; on a CPU small)")
    add_tokens(command, ", with --mesh of one device (default 1,64,1024,8192; on a CPU 1,16,64)")
    command.add_argument("--routing", default="uniform", metavar="NAME", help="uniform (default), zipf, half or top1")
    command.add_argument(
        "--format",
        metavar="NAME,...",
        help="weight formats, one after the other, optionally with an input format after a colon (default mxfp4)",
    )
    command.add_argument("--backends", metavar="NAME,...", help="backends, and ragged_dot (default: all that run here)")
    command.add_argument(
        "--layers",
        type=number,
        metavar="N",
        help="different layers in one call (default 16 up to 16 tokens, 4 beyond; with --mesh 8)",
    )
    command.add_argument("--repeats", type=number, default=5, metavar="N", help="samples of each median (default 5)")
    layer_split.add(command, "time a layer divided", several=True)
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
    summary = "measure a running server: tokens a second, and times of first and further tokens"
    others = command.add_subparsers(metavar="serve", parser_class=Parser)
    serve = others.add_parser("serve", help=summary, description=summary, allow_abbrev=False)
    serve.set_defaults(command=bench_serve.run)
    bench_serve.add(serve)


def run(arguments: argparse.Namespace) -> int:
    from jmx.perf import roofline

    layer_split.check(arguments, several=True)
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
        check_backend("--backends", name, [bench.RAGGED_DOT])
    pairs = None if arguments.format is None else [resolved_pair(pair) for pair in arguments.format.split(",")]
    tokens = arguments.tokens or ([1, 16, 64] if on_cpu else [1, 64, 1024, 8192])
    settings: dict[str, Any] = {
        "routing": arguments.routing,
        "layers": arguments.layers,
        "repeats": arguments.repeats,
        "seed": arguments.seed,
        "progress": to_stderr,
        "so_far": lambda report: None if part is None else report.save(str(part)),
    }
    if arguments.mesh is None:
        return bench.run(model, tokens, formats=pairs, backends=backends, **settings)
    return _measure_mesh(arguments, model, tokens, pairs, settings)


def _measure_mesh(
    arguments: argparse.Namespace, model: str, tokens: list[int], pairs: list[str] | None, settings: dict[str, Any]
) -> Any:
    """Measures the layer divided over --mesh, by the default backend, in one format."""
    from jmx.perf import bench_mesh

    if arguments.backends is not None:
        raise ValueError(
            f"`--backends` (={arguments.backends!r}) must be left out with --mesh, which times the default"
        )
    if pairs is not None and len(pairs) > 1:
        raise ValueError(f"`--format` (={arguments.format!r}) must be one format with --mesh")
    mesh = mesh_argument.make(arguments.mesh)
    splits = layer_split.splits_of(mesh, arguments)
    return bench_mesh.run(model, tokens, mesh, splits, format=None if pairs is None else pairs[0], **settings)
