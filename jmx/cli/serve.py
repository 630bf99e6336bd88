"""`jmx serve`: a server of a whole model, with OpenAI's API."""

import argparse
from pathlib import Path

from jmx.cli import model_arguments, random_model
from jmx.cli.parser import Parser, number


def add(parser: Parser) -> None:
    """Adds the arguments of `jmx serve`."""
    parser.set_defaults(keeps_programs=True, max_new_tokens=1)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=model_arguments.MODEL_HELP)
    random_model.add(parser, ", whose texts are token ids")
    parser.add_argument(
        "--routing",
        metavar="NAME",
        help="of random weights: uniform (default), or zipf, by whose law each layer's experts differ in popularity",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of random weights")
    parser.add_argument("--name", help="of the model in requests; default: MODEL's own")
    group = parser.add_argument_group("access")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at; default: %(default)s")
    group.add_argument("--port", type=number, default=8000, help="default: %(default)s; 0 takes a free one")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="keys of the API, one a line; needed for any address but this machine's own",
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-users", type=number, default=64, metavar="N", help="requests that run at a time; default: %(default)s"
    )
    group.add_argument(
        "--max-waiting", type=number, default=256, metavar="N", help="requests that wait; default: %(default)s"
    )
    group.add_argument(
        "--max-length",
        type=number,
        metavar="N",
        help="tokens of a request, prompt and answer; default: the model's context, at most 8192",
    )
    group.add_argument(
        "--cache-tokens", type=number, metavar="N", help="tokens that the cache holds; default: what memory there is"
    )
    group.add_argument(
        "--prompt-tokens",
        type=number,
        metavar="N",
        help="tokens of prompts that a step computes beside answers; default: 1024, in each group of devices into "
        "which --mesh divides requests",
    )
    group.add_argument(
        "--decode-steps",
        type=number,
        default=4,
        metavar="N",
        help="tokens that up to 8 requests draw in one call, where none waits; default: %(default)s",
    )
    group.add_argument(
        "--page", type=number, default=128, metavar="N", help="tokens of a page of the cache; default: %(default)s"
    )
    group.add_argument(
        "--no-prefix-reuse", action="store_true", help="requests that begin alike do not share pages of the cache"
    )
    group.add_argument(
        "--drain-seconds",
        type=number,
        default=60,
        metavar="S",
        help="how long answers may take after SIGTERM; default: %(default)s",
    )
    model_arguments.add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs `jmx serve`."""
    from jmx.cli import serving

    return serving.run(arguments)
