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
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of sampling and of random weights")


def sampler(arguments: argparse.Namespace) -> "Sampler":
    """The `Sampler` of parsed arguments. ValueError for one outside its range."""
    from jmx.models import Sampler

    return Sampler(temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)
