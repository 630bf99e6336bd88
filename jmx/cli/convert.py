"""`jmx convert`: a checkpoint in another form, or with its experts quantized."""

import argparse

from jmx.cli.common import EXIT_OK, Parser, check_directories, check_known, print_json, show


def add(command: Parser) -> None:
    command.add_argument(
        "source",
        metavar="IN",
        help="directory of a gpt-oss checkpoint, of either form; with --quantize, of any whose experts are floats, "
        "apart as Mixtral, Qwen-MoE and DeepSeek have them, or as gpt-oss",
    )
    command.add_argument(
        "target",
        metavar="OUT",
        help="directory to make, which appears when it is complete; one that exists is refused, and so is one in IN",
    )
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--to",
        choices=("hf", "original", "orbax"),
        help="the Hugging Face form, the original form, or a whole-model Orbax checkpoint",
    )
    what.add_argument(
        "--quantize",
        metavar="FORMAT",
        help="round experts to a weight format, such as nvfp4, int4_g128 or fp8_block, and write compressed-tensors "
        "(of gpt-oss in mxfp4: its Hugging Face form); all else keeps its bits. Prints each layer's errors: relative, "
        "||rounded - w|| / ||w||, and the share of weights beyond what a block's elements can represent",
    )
    command.add_argument(
        "--report",
        metavar="FILE",
        help="with --quantize: write the errors as JSON; a file that exists is refused, and so is one in IN or OUT",
    )
    command.add_argument(
        "--overwrite",
        action="store_true",
        help="with --quantize: replace what an earlier run wrote at OUT and FILE, when all is written. A directory in "
        "which a file was added or changed, and any other file, is refused all the same",
    )
    command.add_argument("--json", action="store_true", help="print JSON on stdout, and no progress")


def run(arguments: argparse.Namespace) -> int:
    if arguments.quantize is not None:
        return _convert_quantized(arguments)
    for flag in ("report", "overwrite"):
        if getattr(arguments, flag):
            raise ValueError(f"`--{flag}` goes with `--quantize` alone")
    from jmx.checkpoint import gpt_oss

    gpt_oss.convert(arguments.source, arguments.target, form=arguments.to, progress=not arguments.json)
    if arguments.json:
        print_json({"source": arguments.source, "target": arguments.target, "form": arguments.to})
    else:
        print(f"wrote {arguments.target} in the form {arguments.to!r}")
    return EXIT_OK


def _convert_quantized(arguments: argparse.Namespace) -> int:
    from jmx.checkpoint import quantizing
    from jmx.numerics import formats

    check_known("--quantize", arguments.quantize, formats.FORMATS)
    check_directories(arguments.report)
    report = quantizing.convert(
        arguments.source,
        arguments.target,
        formats.FORMATS[arguments.quantize],
        report=arguments.report,
        overwrite=arguments.overwrite,
        progress=not arguments.json,
    )
    if arguments.json:
        print_json({"source": arguments.source, "target": arguments.target, **report.as_dict()})
    else:
        show(report.table())
        print(f"wrote {arguments.target} as {report.form}, experts in {report.format}")
    return EXIT_OK
