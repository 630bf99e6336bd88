"""`jmx generate`: text, or token ids, from a whole model."""

import argparse
from pathlib import Path

from jmx.cli import model_arguments, prompts, random_model, sampling_arguments
from jmx.cli.parser import Parser, number


def add(parser: Parser) -> None:
    """Adds the arguments of `jmx generate`."""
    parser.interleaved = True
    parser.set_defaults(keeps_programs=True)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=model_arguments.MODEL_HELP)
    random_model.add(parser, f": {', '.join(random_model.PUBLISHED)}")
    prompts.add(parser)
    group = parser.add_argument_group("where an answer ends")
    group.add_argument(
        "--max-new-tokens", type=number, default=64, metavar="N", help="of each prompt; default: %(default)s"
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="before this text, which is not shown; may be given several times",
    )
    group.add_argument(
        "--stop-id",
        type=number,
        action="append",
        default=[],
        metavar="ID",
        help="at this token id, as at an end-of-sequence id of the model; may be given several times",
    )
    group.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence id")
    sampling_arguments.add(parser)
    model_arguments.add(parser)
    parser.add_argument(
        "--logprobs",
        type=number,
        nargs="?",
        const=0,
        metavar="N",
        help="compute log probabilities of new tokens, and of the N likeliest of each step (default: 0)",
    )
    parser.add_argument(
        "--logits",
        type=Path,
        metavar="FILE.npy",
        help="write the logits of the only prompt to a new file, float32 (length, vocab)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print an object of JSON for each prompt, one a line, on stdout"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs `jmx generate`."""
    from jmx.cli import generation

    return generation.run(arguments)
