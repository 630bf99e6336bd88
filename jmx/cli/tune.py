"""`jmx tune`: finds the fastest configurations of a backend's kernels here."""

import argparse
import dataclasses
import pathlib
from typing import Any

from jmx.cli.checks import check_backend, check_known, resolved_pair
from jmx.cli.output import EXIT_NO, EXIT_OK, check_directories, fail, show
from jmx.cli.parser import Parser, add_format, add_tokens


def add(command: Parser) -> None:
    command.add_argument("--backend", metavar="NAME", help="default: the first one that can be tuned and runs here")
    command.add_argument(
        "--shape",
        default="gpt-oss-120b",
        metavar="NAME|E,k,H,I",
        help="a shape that `jmx bench` knows (default gpt-oss-120b), or experts, top-k, hidden and intermediate size",
    )
    add_format(command, default="mxfp4")
    add_tokens(command, " (default: powers of 4, and some more)")
    command.add_argument("--output", metavar="FILE", help="the table to add to (default: this user's own cache)")
    command.add_argument(
        "--seconds", type=float, metavar="N", help="start no candidate of a token count after N (default: try them all)"
    )
    command.add_argument("--again", action="store_true", help="also measure token counts that the table has")


def run(arguments: argparse.Namespace) -> int:
    from jmx.perf import tuner
    from jmx.selection import tuning
    from jmx.selection.environment import Environment
    from jmx.selection.select import NoBackendError

    shape = _shape(arguments.shape, resolved_pair(arguments.format))
    tokens = arguments.tokens or tuner.TOKENS
    for flag, value, fits in [
        *(("tokens", count, count >= 1) for count in tokens),
        ("seconds", arguments.seconds, arguments.seconds is None or arguments.seconds > 0),
    ]:
        if not fits:
            raise ValueError(f"`--{flag}` (={value}) must be positive")
    if arguments.backend is not None:
        check_backend("--backend", arguments.backend)
    check_directories(arguments.output)
    environment = Environment.probe()
    try:
        engine = tuner.choose_engine(arguments.backend, shape, tokens[0], environment)
    except NoBackendError as e:
        return fail(e, EXIT_NO)
    strict = arguments.output is not None
    file = pathlib.Path(arguments.output) if strict else tuning.cache_file(engine.name, environment.device_kind)
    outcomes = tuner.run(
        engine,
        shape,
        tokens,
        file,
        strict=strict,
        again=arguments.again,
        seconds=arguments.seconds,
    )
    show(tuner.table(outcomes))
    print(f"in {file}")
    return EXIT_OK if all(outcome.entry is not None for outcome in outcomes) else EXIT_NO


def _shape(text: str, pair: str) -> Any:
    """The `jmx.perf.shapes.Shape` of --shape: a name, or sizes with all else as in gpt-oss.

    `pair`: the value of --format.
    """
    from jmx.perf import shapes
    from jmx.routing import TopKSoftmax

    if not text[:1].isdigit():
        check_known("--shape", text, shapes.MODELS)
        return _in_formats(shapes.MODELS[text], pair)
    try:
        num_experts, top_k, hidden, intermediate = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"`--shape` (={text!r}) must be a name, or four whole numbers E,k,H,I") from None
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"`--shape` (={text!r}) has k (={top_k}) outside 1..{num_experts}, the number of experts")
    sizes = {"num_experts": num_experts, "hidden_size": hidden, "intermediate_size": intermediate}
    shape = dataclasses.replace(shapes.MODELS["gpt-oss-120b"], **sizes, method=TopKSoftmax(top_k))
    return _in_formats(shape, pair)


def _in_formats(shape: Any, pair: str) -> Any:
    from jmx.experts import experts
    from jmx.numerics import formats

    shape = shape.in_formats(pair)
    sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
    experts.check_sizes(*sizes, formats.FORMATS[shape.format], shape.input_format)
    return shape
