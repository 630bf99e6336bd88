"""`jmx generate`: text, or token ids, from a whole model."""

import argparse
from pathlib import Path

from jmx.cli import sampling_arguments
from jmx.cli.common import Parser, number


def add(parser: Parser) -> None:
    """Adds the arguments of `jmx generate`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a directory of safetensors files")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="raw text for the checkpoint's tokenizer.json")
    parser.add_argument(
        "--random", metavar="NAME", help="instead of MODEL, random weights of a published model's shape: gpt-oss-20b"
    )
    parser.add_argument(
        "--prompt-ids",
        type=_ids,
        metavar="1,2,3",
        help="token ids; new ids are then shown as ids. Default with --random: 1024 random ones",
    )
    parser.add_argument("--max-new-tokens", type=number, default=64, metavar="N", help="default: %(default)s")
    sampling_arguments.add(parser)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all but the experts")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="weight format of random experts (default: mxfp4), or what float experts of a checkpoint are quantized to",
    )
    parser.add_argument(
        "--inputs",
        choices=("declared", "float"),
        default="declared",
        help="whether experts quantize their inputs as the checkpoint declares (the default), or not at all",
    )
    parser.add_argument("--backend", metavar="NAME", help="the backend that must run the experts")
    parser.add_argument("--ignore-eos", action="store_true", help="continue after an end-of-sequence id")
    parser.add_argument(
        "--logits",
        type=Path,
        metavar="FILE.npy",
        help="write the prompt's logits to a new file, float32 (length, vocab)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on stdout, and all else on stderr")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between") from None


def run(arguments: argparse.Namespace) -> int:
    """Runs `jmx generate`."""
    from jmx.cli import generation

    return generation.run(arguments)
