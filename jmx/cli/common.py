"""What commands share: their parser, the checks of their arguments, and how results are printed."""

import argparse
import difflib
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_SIGNAL = 128  # and the number of the signal that ended the command


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"jmx: error: {message} (see `{self.prog} --help`)\n")


def add_json(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON on stdout instead of a table")


def counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between them") from None


def check_known(flag: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError, naming what is known and what is nearest, unless `value` is known."""
    names = sorted(known)
    if value not in names:
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.4)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`{flag}` (={value!r}) must be one of {', '.join(names)}{meant}")


def check_directories(*paths: str | None) -> None:
    """Raises ValueError for a file that could not be written, before the work that it is to hold."""
    for path in filter(None, paths):
        if not pathlib.Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: its directory does not exist")


def check_pair(pair: str) -> tuple[str, str | None]:
    """The names in --format, WEIGHTS or WEIGHTS:INPUTS; inputs None: of 16 bits. ValueError for one not known.

    A family of inputs is its first variant, as it is where a layer is called.
    """
    from jmx.formats import FORMATS
    from jmx.inputs import FAMILIES, INPUT_FORMATS, resolve
    from jmx.shapes import split_formats

    weights, inputs = split_formats(pair)
    check_known("--format", weights, FORMATS)
    if inputs is not None:
        check_known("--format", inputs, [*INPUT_FORMATS, *FAMILIES])
        inputs = resolve(None, inputs, [*INPUT_FORMATS])
    return weights, inputs


def resolved_pair(pair: str) -> str:
    """The same with the format that a family of inputs stands for. ValueError as `check_pair`."""
    return ":".join(filter(None, check_pair(pair)))


def show(*results: Any) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for result in results:
        console.print(result)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))
