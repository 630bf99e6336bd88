"""Random weights of a published model's shape in place of a checkpoint: the option --random of commands."""

import argparse
from typing import TYPE_CHECKING

from jmx.cli.checks import check_known
from jmx.cli.parser import Parser

if TYPE_CHECKING:
    from jmx.models.config import Config
    from jmx.models.sources.protocol import Source

# Names in `jmx.models.FAMILIES`, which imports jax.
PUBLISHED = (
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "qwen1.5-moe-a2.7b",
    "qwen2-57b-a14b",
    "olmoe-1b-7b",
    "glm-4.5",
    "glm-4.5-air",
    "deepseek-v3",
    "deepseek-v2-lite",
    "kimi-k2",
)


def add(parser: Parser, more: str) -> None:
    """Adds the option. `more`: the end of its help."""
    help = f"instead of MODEL, random weights of a published model's shape{more}"
    parser.add_argument("--random", metavar="NAME", help=help)


def check(arguments: argparse.Namespace) -> None:
    """ValueError unless one of MODEL and --random is given, with a name that is known. Nothing is read."""
    if (arguments.model is None) == (arguments.random is None):
        raise ValueError("give either MODEL or --random")
    if arguments.random is not None:
        check_known("--random", arguments.random, PUBLISHED)


def config(arguments: argparse.Namespace) -> "Config":
    """The configuration of --random."""
    from jmx.models.families import published

    return published()[arguments.random]


def source(arguments: argparse.Namespace, routing: str = "uniform") -> "Source":
    """The weights of --random, --seed and --format (MXFP4 without it); `routing`: see `jmx.models.random_source`."""
    import jmx
    from jmx.models import random_source

    format = jmx.MXFP4 if arguments.format is None else jmx.FORMATS[arguments.format]
    return random_source(config(arguments), arguments.seed, format, routing=routing)
