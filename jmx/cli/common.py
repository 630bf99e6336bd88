"""What all commands share: the parser, checks of arguments, and printing of results."""

import argparse
import contextlib
import difflib
import json
import os
import pathlib
import reprlib
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

MOST = (1 << 31) - 1  # of sizes and counts: the range of 32-bit indices
_WIDTH_OF_FILES, _LEAST_WIDTH = 140, 40  # characters of a line, if neither a terminal nor COLUMNS gives it
EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_SIGNAL = 128  # and the number of the signal that ended the command


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line.

    Attributes:
        interleaved: whether options may come between positional arguments, as in `MODEL --seed 1 PROMPT`.
    """

    interleaved = False
    _splits = False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] (overloads)
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        if not self.interleaved or self._splits:
            return super().parse_known_args(args, namespace)
        self._splits = True  # what follows calls this method
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._splits = False

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"jmx: error: {' '.join(message.split())} (see `{self.prog} --help`)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """As in argparse, except that failing to write a help or version text is an error."""
        if file is None or file is sys.stderr:
            super()._print_message(message, file)
        else:
            file.write(message)


def fail(error: Exception, code: int) -> int:
    """Prints the error as one line on stderr, and returns `code`."""
    to_stderr(f"jmx: error: {' '.join(str(error).split()) or type(error).__name__}")
    return code


def to_stderr(line: str) -> None:
    """Prints a line on stderr, if it is open."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def add_json(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON on stdout instead of a table")


def number(text: str) -> int:
    """A whole number, for a parser. Callers check its sign."""
    (value,) = _numbers([text], text, "must be a whole number")
    return value


def counts(text: str) -> list[int]:
    """Whole numbers with commas between them, for a parser."""
    return _numbers(text.split(","), text, "must be whole numbers with commas between them")


def _numbers(parts: Iterable[str], text: str, rule: str) -> list[int]:
    shown = reprlib.Repr(maxstring=50).repr(text)
    try:
        values = [int(part) for part in parts]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown} {rule}") from None
    if any(abs(value) > MOST for value in values):
        raise argparse.ArgumentTypeError(f"{shown} must be at most {MOST}")
    return values


def check_known(
    flag: str,
    value: str,
    known: Collection[str],
    *,
    any_case: bool = False,
    meant: Callable[[str, Collection[str]], str] | None = None,
) -> str:
    """The name in `known` that equals `value`; with `any_case`, ignoring case. ValueError, listing all, if none.

    `meant`: the end of its message, from the value and the known names; None: a similar name.
    """
    if value in known:
        return value
    names = sorted(known)
    lower = {name.lower(): name for name in names}
    if any_case and value.lower() in lower:
        return lower[value.lower()]
    near = difflib.get_close_matches(value.lower(), lower, n=1)
    similar = f"; did you mean {lower[near[0]]!r}?" if near else ""
    also = f", or {more}" if (more := getattr(known, "also", "")) else ""
    end = similar if meant is None else meant(value, names)
    raise ValueError(f"`{flag}` (={value!r}) must be one of {', '.join(names)}{also}{end}")


def check_backend(flag: str, value: str, more: Sequence[str] = ()) -> str:
    """The name of a registered backend, or one of `more`. ValueError, listing all, with what a name of vLLM's means."""
    from jmx.backends import registered_backends
    from jmx.selection.vllm_names import meant

    return check_known(flag, value, [*(backend.name for backend in registered_backends()), *more], meant=meant)


def check_directories(*paths: str | None) -> None:
    """Raises ValueError for a file that cannot be written, before the work starts.

    An existing file may be replaced if it is a regular file, unlike a device such as /dev/null.
    """
    for path in (path for path in paths if path is not None):
        if (fault := _writing_fault(path)) is not None:
            raise ValueError(f"{path or repr(path)} cannot be written: {fault}")


def _writing_fault(path: str) -> str | None:
    directory = pathlib.Path(path).absolute().parent
    if not path:
        return "it is not the name of a file"
    if not os.path.isdir(directory):
        return "its directory does not exist"
    if not os.access(directory, os.W_OK | os.X_OK):
        return "its directory may not be written to"
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # a name that is too long, or has a null character
        return getattr(error, "strerror", None) or str(error)
    if stat.S_ISREG(mode):
        return None
    return "it is a directory" if stat.S_ISDIR(mode) else "it is not a regular file"


def check_pair(pair: str) -> tuple[str, str | None]:
    """The names in --format, WEIGHTS or WEIGHTS:INPUTS; inputs are None for 16 bits. ValueError for unknown names.

    A family of input formats becomes its first variant, as in a call of a layer.
    """
    from jmx.numerics.formats import FORMATS
    from jmx.numerics.input_formats import FAMILIES, INPUT_FORMATS, resolve
    from jmx.perf.shapes import split_formats

    weights, inputs = split_formats(pair)
    check_known("--format", weights, FORMATS)
    if inputs is not None:
        check_known("--format", inputs, [*INPUT_FORMATS, *FAMILIES])
        inputs = resolve(None, inputs, [*INPUT_FORMATS])
    return weights, inputs


def resolved_pair(pair: str) -> str:
    """--format with a family of input formats resolved to one format. ValueError as in `check_pair`."""
    return ":".join(filter(None, check_pair(pair)))


def show(*results: Any) -> None:
    from rich.console import Console

    width = shutil.get_terminal_size((_WIDTH_OF_FILES, 0)).columns
    console = Console(width=max(width, _LEAST_WIDTH), highlight=False)
    for result in results:
        console.print(result)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))
