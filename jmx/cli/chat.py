"""`jmx chat`: a conversation with a whole model, in a terminal."""

import argparse

from jmx.cli import model_arguments, sampling_arguments
from jmx.cli.parser import Parser, number


def add(parser: Parser) -> None:
    """Adds the arguments of `jmx chat`."""
    parser.set_defaults(keeps_programs=True)
    parser.add_argument("model", metavar="MODEL", help=f"{model_arguments.MODEL_HELP}; it must have a chat template")
    parser.add_argument("--system", metavar="TEXT", help="instructions that come before the first message")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer before this text, which is not shown; may be given several times",
    )
    parser.add_argument(
        "--max-new-tokens", type=number, default=1024, metavar="N", help="of an answer; default: %(default)s"
    )
    sampling_arguments.add(parser)
    model_arguments.add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs `jmx chat`."""
    from jmx.cli import conversation

    return conversation.run(arguments)
