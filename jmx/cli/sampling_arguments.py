"""Arguments of commands that sample tokens: what `jmx generate` and `jmx chat` share."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jmx.cli.parser import Parser

if TYPE_CHECKING:
    from jmx.models import Sampler


# By field of `Sampler`: the type, the default, the letter of the value in the help, and the help.
_ARGUMENTS: dict[str, tuple[type, float | None, str, str]] = {
    "temperature": (float, 0.0, "T", "divides the logits; default: 0, the likeliest token"),
    "top_p": (float, 1.0, "P", "keep the likeliest tokens that sum to P (default: all)"),
    "top_k": (int, None, "K", "keep the K likeliest tokens (default: all)"),
    "min_p": (float, 0.0, "P", "keep tokens at least P times as probable as the likeliest (default: all)"),
    "repetition_penalty": (
        *(float, 1.0, "R"),
        "divides positive logits of tokens that are there already, and multiplies negative ones (default: 1)",
    ),
    "presence_penalty": (float, 0.0, "P", "subtracted for tokens generated already"),
    "frequency_penalty": (float, 0.0, "F", "subtracted as often as a token was generated"),
    "seed": (int, 0, "S", "of sampling and of random weights"),
}


def add(parser: Parser) -> None:
    """Adds the arguments of which `sampler` makes a `Sampler`."""
    group = parser.add_argument_group("sampling")
    for name, (kind, default, letter, text) in _ARGUMENTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, metavar=letter, help=text)


def check_stops(stops: Sequence[str]) -> None:
    """ValueError for an empty `--stop`, at which every text would end."""
    if "" in stops:
        raise ValueError("`--stop` (='') must have at least one character")


def sampler(arguments: argparse.Namespace) -> "Sampler":
    """The `Sampler` of parsed arguments.

    Raises:
        ValueError: one is outside its range, or would have no effect without --temperature.
    """
    from jmx.models import Sampler

    made = Sampler(**{name: getattr(arguments, name) for name in _ARGUMENTS})
    for name, absent in (("top_p", 1.0), ("top_k", None), ("min_p", 0.0)):
        if made.temperature == 0 and (value := getattr(made, name)) != absent:
            raise ValueError(
                f"`--{name.replace('_', '-')}` (={value}) needs a --temperature above 0: without one each token is the "
                "likeliest"
            )
    return made
