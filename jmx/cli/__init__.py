"""The command line: `jmx explain | generate | chat | serve | doctor | convert | bench | tune | build`.

Each command has two functions in a module of this package: `add` adds its arguments to a parser, and `run` runs it and
returns the exit code. They import jax when called, so that `--help` and usage errors are fast. Results go to stdout,
everything else to stderr.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence

from jmx._version import __version__
from jmx.cli import bench, chat, compilation_cache, convert, explain, generate, machine, serve, signals, tune
from jmx.cli.completion import PrintCompletion
from jmx.cli.output import EXIT_INTERRUPTED, EXIT_NO, EXIT_OK, EXIT_SIGNAL, EXIT_USAGE, fail, to_stderr
from jmx.cli.parser import Parser

__all__ = ["EXIT_INTERRUPTED", "EXIT_NO", "EXIT_OK", "EXIT_SIGNAL", "EXIT_USAGE", "main"]

_EPILOG = """exit codes:
  0    done
  1    the answer is no: no backend runs, a check failed, or this machine cannot do it
  2    usage, or bad input
  130  interrupted; no partial output is left behind
  143  ended by SIGTERM (129: by SIGHUP), likewise
"""

# By name: what adds a command's arguments, what runs it, and a summary.
_COMMANDS: dict[str, tuple[Callable[[Parser], None], Callable[[argparse.Namespace], int], str]] = {
    "generate": (generate.add, generate.run, "generate text, or token ids, with a whole model"),
    "chat": (chat.add, chat.run, "talk with a whole model in a terminal"),
    "serve": (serve.add, serve.run, "serve a whole model over HTTP, with OpenAI's API"),
    "explain": (explain.add, explain.run, "show which backend runs a layer, and why each of the others does not"),
    "doctor": (
        *(machine.add_doctor, machine.run_doctor),
        "show versions and devices, what each backend lacks here, and how to get it",
    ),
    "convert": (convert.add, convert.run, "write a checkpoint in another form, or with quantized experts"),
    "bench": (bench.add, bench.run, "time one layer on this machine, against the machine's own limits"),
    "tune": (
        *(tune.add, tune.run),
        "find the fastest configurations of a backend's kernels here, and keep them for later calls",
    ),
    "build": (
        *(machine.add_build, machine.run_build),
        "compile a backend's kernels for this machine, and keep them for later calls",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the program's arguments) asks for, and returns its exit code."""
    _open_streams()
    try:
        with signals.as_exceptions():
            try:
                return _run(sys.argv[1:] if argv is None else argv)
            finally:
                _flush()
    except signals.Terminated as e:
        to_stderr(f"jmx: ended by {e}")
        return EXIT_SIGNAL + e.number
    except KeyboardInterrupt:
        to_stderr("jmx: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the pipe has exited
        return EXIT_NO
    except (ValueError, TypeError, OSError) as e:
        return fail(e, EXIT_NO if getattr(e, "errno", None) in _MACHINE else EXIT_USAGE)
    except (RuntimeError, ImportError, MemoryError) as e:
        return fail(e, EXIT_NO)


# Errors of the machine, not of an argument: a full or broken disk, no memory left, too many open files.
_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def _run(argv: Sequence[str]) -> int:
    whole = parser()
    if not argv:
        whole.print_help()
        return EXIT_OK
    arguments = whole.parse_args(argv)
    if not hasattr(arguments, "command"):
        whole.error("a COMMAND is required")
    compilation_cache.use(arguments)
    return arguments.command(arguments)


def _open_streams() -> None:
    """Makes stdout and stderr accept every character, and reopens them if they were closed.

    Otherwise files that are opened later would get their numbers, and warnings of libraries would go into those files.
    """
    if sys.stdout is None or sys.stderr is None:
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file's name need not be text


def _flush() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it exits
        raise


def parser() -> Parser:
    """The parser of the whole command line."""
    shared = Parser(add_help=False)
    compilation_cache.add(shared)
    whole = Parser(
        prog="jmx",
        description="A mixture-of-experts layer for Flax whose expert weights stay quantized, and whole models of it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[shared],
    )
    whole.add_argument("--version", action="version", version=f"jmx {__version__}")
    whole.add_argument(
        "--print-completion", action=PrintCompletion, help="print a script for this shell that completes `jmx` in it"
    )
    commands = whole.add_subparsers(metavar="COMMAND")

    for name, (add, run, summary) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            parents=[shared],
        )
        command.set_defaults(command=run)
        add(command)
    return whole
