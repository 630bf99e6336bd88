"""`jmx doctor` and `jmx build`: what each backend lacks on this machine, and compiling a backend's kernels for it."""

import argparse
import pathlib

from jmx.cli.checks import check_known
from jmx.cli.output import EXIT_NO, EXIT_OK, check_directories, print_json, show
from jmx.cli.parser import Parser, add_json, number


def add_doctor(command: Parser) -> None:
    add_json(command)


def run_doctor(arguments: argparse.Namespace) -> int:
    from jmx.perf import doctor

    findings = doctor.examine()
    if arguments.json:
        print_json(findings)
    else:
        show(*doctor.tables(findings))
        for line in findings["advice"]:
            print(line)
    return EXIT_OK if findings["healthy"] else EXIT_NO


def add_build(command: Parser) -> None:
    command.add_argument("engine", metavar="BACKEND", help="cutlass: FlashInfer's kernels for Hopper, 5 to 20 minutes")
    command.add_argument("--arch", default="sm_90a", metavar="NAME", help="of the GPU (default and only one: sm_90a)")
    command.add_argument("--jobs", type=number, metavar="N", help="parallel compilers (default: as many as fit here)")
    command.add_argument("--output", metavar="FILE", help="the library to write (default: in the user's cache)")
    command.add_argument("--again", action="store_true", help="compile even if the library exists")


def run_build(arguments: argparse.Namespace) -> int:
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
