"""`jmx build`: compiles a backend's kernels for this machine."""

import argparse
import pathlib

from jmx.cli.common import EXIT_OK, Parser, check_directories, check_known, number


def add(command: Parser) -> None:
    command.add_argument("engine", metavar="BACKEND", help="cutlass: FlashInfer's kernels for Hopper, 5 to 20 minutes")
    command.add_argument("--arch", default="sm_90a", metavar="NAME", help="of the GPU (default and only one: sm_90a)")
    command.add_argument("--jobs", type=number, metavar="N", help="compilers at a time (default: as many as fit here)")
    command.add_argument("--output", metavar="FILE", help="the library to write (default: in this user's own cache)")
    command.add_argument("--again", action="store_true", help="compile even if the library exists")


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from jmx.ffi.cutlass import build, source

    check_known("BACKEND", arguments.engine, ["cutlass"])
    check_known("--arch", arguments.arch, [source.ARCHITECTURE])
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"`--jobs` (={arguments.jobs}) must be at least 1")
    check_directories(arguments.output)
    output = None if arguments.output is None else pathlib.Path(arguments.output)
    console = Console(stderr=True, highlight=False)
    path, made = build.run(console, output=output, jobs=arguments.jobs, again=arguments.again)
    print(f"{'compiled' if made else 'was compiled before'}: {path}")
    return EXIT_OK
