"""Arguments of commands that sample tokens: what `jmx generate` and `jmx chat` share."""

import argparse
from typing import TYPE_CHECKING

from jmx.cli.common import Parser

if TYPE_CHECKING:
    from jmx.models import Sampler


def add(parser: Parser) -> None:
    """Adds the arguments of which `sampler` makes a `Sampler`."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="divides the logits; default: 0, the likeliest token",
    )
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens that sum to P (default: all)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default: all)")
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens at least P times as probable as the likeliest (default: all)",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="divides positive logits of tokens that are there already, and multiplies negative ones (default: 1)",
    )
    group.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="P", help="subtracted for tokens generated already"
    )
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="F", help="subtracted as often as a token was generated"
    )
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling and of random weights")


def sampler(arguments: argparse.Namespace) -> "Sampler":
    """The `Sampler` of parsed arguments.

    Raises:
        ValueError: one is outside its range, or would have no effect without --temperature.
    """
    from jmx.models import Sampler

    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    made = Sampler(**{name: getattr(arguments, name) for name in (*names, *penalties)})
    for name, absent in (("top_p", 1.0), ("top_k", None), ("min_p", 0.0)):
        if made.temperature == 0 and (value := getattr(made, name)) != absent:
            raise ValueError(
                f"`--{name.replace('_', '-')}` (={value}) needs a --temperature above 0: without one each token is the "
                "likeliest"
            )
    return made
