"""`jmx chat`: a conversation with a whole model, in a terminal."""

import argparse

from jmx.cli import sampling_arguments
from jmx.cli.common import Parser, number


def add(parser: Parser) -> None:
    """Adds the arguments of `jmx chat`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a directory of safetensors files, or owner/name[@revision] on the Hugging Face Hub; it must have a chat "
        "template",
    )
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
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all but the experts")
    parser.add_argument("--format", metavar="NAME", help="what float experts of a checkpoint are quantized to")
    parser.add_argument("--backend", metavar="NAME", help="the backend that must run the experts")


def run(arguments: argparse.Namespace) -> int:
    """Runs `jmx chat`."""
    from jmx.cli import conversation

    return conversation.run(arguments)
