"""The command line: `jmx explain | doctor | convert | bench | tune | build`.

A command is a module here: `add` gives its parser what it takes; `run` does it, and returns the exit code. Imports of
jax stand inside the functions, so that `--help` and usage errors are quick. Results go to stdout, all else to stderr.
"""

import argparse
import contextlib
import os
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType

from jmx._version import __version__
from jmx.cli import bench, build, convert, doctor, explain, signals, tune
from jmx.cli.common import EXIT_INTERRUPTED, EXIT_NO, EXIT_OK, EXIT_SIGNAL, EXIT_USAGE, Parser

__all__ = ["EXIT_INTERRUPTED", "EXIT_NO", "EXIT_OK", "EXIT_SIGNAL", "EXIT_USAGE", "main"]

_EPILOG = """exit codes:
  0    done
  1    the answer is no: no backend runs, a check failed, or this machine cannot do it
  2    usage, or bad input
  130  interrupted; nothing is left half written
  143  ended by SIGTERM (129: by SIGHUP), likewise
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the program's arguments) asks for, and returns its exit code."""
    arguments = parser().parse_args(argv)
    try:
        with signals.as_exceptions():
            if hasattr(arguments, "compilation_cache"):
                _use_compilation_cache(arguments.compilation_cache)
            return arguments.command(arguments)
    except signals.Terminated as e:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"jmx: ended by {e}", file=sys.stderr)
        return EXIT_SIGNAL + e.number
    except KeyboardInterrupt:
        print("jmx: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO
    except (ValueError, TypeError, OSError) as e:
        return _fail(e, EXIT_USAGE)
    except (RuntimeError, ImportError, MemoryError) as e:
        return _fail(e, EXIT_NO)


def _fail(error: Exception, code: int) -> int:
    print(f"jmx: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return code


def parser() -> Parser:
    """Of the whole command line."""
    shared = Parser(add_help=False)
    shared.add_argument(
        "--compilation-cache",
        metavar="DIR",
        default=argparse.SUPPRESS,  # so that the one before the command is not overwritten by a default
        help="keep compiled programs in DIR, for later runs",
    )
    whole = Parser(
        prog="jmx",
        description="A mixture-of-experts layer for Flax whose expert weights stay in 4 bits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[shared],
    )
    whole.add_argument("--version", action="version", version=f"jmx {__version__}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, module: ModuleType, summary: str) -> None:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            parents=[shared],
        )
        command.set_defaults(command=module.run)
        module.add(command)

    add("explain", explain, "say which backend runs a layer, and why each of the others does not")
    add("doctor", doctor, "show versions and devices, what each backend lacks here, and how to get it")
    add("convert", convert, "write a checkpoint in another form, or with its experts quantised")
    add("bench", bench, "time one layer on this machine, against the machine's own limits")
    add("tune", tune, "measure how a backend's kernels run fastest here, and keep that for later calls")
    add("build", build, "compile a backend's kernels for this machine, and keep them for later calls")
    return whole


def _use_compilation_cache(directory: str) -> None:
    import jax

    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
