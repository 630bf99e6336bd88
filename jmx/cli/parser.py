"""The parser of all commands, types of their arguments, and arguments that several of them have."""

import argparse
import difflib
import itertools
import reprlib
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from jmx.cli.output import EXIT_USAGE

MOST = (1 << 31) - 1  # of sizes and counts: the range of 32-bit indices


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
        if self._splits:
            return super().parse_known_args(args, namespace)
        if self.interleaved:
            self._splits = True  # what follows calls this method
            try:
                known, rest = self.parse_known_intermixed_args(args, namespace)
            finally:
                self._splits = False
        else:
            known, rest = super().parse_known_args(args, namespace)
        if rest:  # here and not in the parser of all commands, whose help has no options of this one
            self.error(f"unrecognized arguments: {' '.join(rest)}{self._similar(rest)}")
        return known, rest

    def _similar(self, arguments: Iterable[str]) -> str:
        """The end of an error of unknown arguments: an option with a name like one of theirs."""
        names = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
        near = [
            *itertools.chain(*(difflib.get_close_matches(name, self._option_string_actions, n=1) for name in names))
        ]
        return f"; did you mean {near[0]}?" if near else ""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"jmx: error: {' '.join(message.split())} (see `{self.prog} --help`)\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """As in argparse, except that failing to write a help or version text is an error."""
        if file is None or file is sys.stderr:
            super()._print_message(message, file)
        else:
            file.write(message)


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


def add_json(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON on stdout instead of a table")


def add_tokens(command: Any, help: str, *, default: list[int] | None = None) -> None:
    """`command`: a parser, or a group of one. `help`: what follows "token counts"."""
    command.add_argument("--tokens", type=counts, default=default, metavar="N,...", help=f"token counts{help}")


def add_format(command: Any, *, default: str | None = None) -> None:
    """`command`: a parser, or a group of one."""
    help = "of the weights, optionally with an input format after a colon (default mxfp4)"
    command.add_argument("--format", default=default, metavar="NAME", help=help)
