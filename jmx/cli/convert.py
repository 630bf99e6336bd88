"""`jmx convert`: a checkpoint in another form, or with its experts quantized."""

import argparse

from jmx.cli.checks import check_known
from jmx.cli.output import EXIT_OK, check_directories, print_json, show
from jmx.cli.parser import Parser


def add(command: Parser) -> None:
    command.add_argument(
        "source",
        metavar="IN",
        help="directory of a gpt-oss checkpoint, in any form; with --quantize, of one whose experts are floats, or "
        "quantized as compressed-tensors and others do: gpt-oss, or any model with experts in separate tensors, such "
        "as Mixtral, Qwen-MoE and DeepSeek",
    )
    command.add_argument(
        "target",
        metavar="OUT",
        help="directory to create, which appears when it is complete; it must not exist, or be inside IN",
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
        help="quantize experts to a weight format, such as nvfp4, int4_g128 or fp8_block, and write compressed-tensors "
        "(of gpt-oss in mxfp4: its Hugging Face form); all else keeps its bits. Prints each layer's relative error, "
        "||quantized - w|| / ||w||, and the share of weights outside the range of their block's elements",
    )
    command.add_argument(
        "--report",
        metavar="FILE",
        help="with --quantize: write the errors as JSON to a file, which must not exist, or be inside IN or OUT",
    )
    command.add_argument(
        "--picture",
        metavar="FILE",
        help="with --quantize: draw the errors by layer to a .svg or .png file, which must not exist, or be inside IN "
        "or OUT; needs matplotlib",
    )
    command.add_argument(
        "--overwrite",
        action="store_true",
        help="with --quantize: replace the results of an earlier run at OUT and FILE, once the new ones are complete. "
        "A directory in which a file was added or changed, and any other file, is still an error",
    )
    command.add_argument("--json", action="store_true", help="print JSON on stdout, and no progress")


def run(arguments: argparse.Namespace) -> int:
    if arguments.quantize is not None:
        return _convert_quantized(arguments)
    for flag in ("report", "picture", "overwrite"):
        if getattr(arguments, flag) not in (None, False):
            raise ValueError(f"`--{flag}` requires `--quantize`")
    from jmx.checkpoint import gpt_oss

    gpt_oss.convert(arguments.source, arguments.target, form=arguments.to, progress=not arguments.json)
    if arguments.json:
        print_json({"source": arguments.source, "target": arguments.target, "form": arguments.to})
    else:
        print(f"wrote {arguments.target} in the form {arguments.to!r}")
    return EXIT_OK


def _convert_quantized(arguments: argparse.Namespace) -> int:
    from jmx import plot
    from jmx.checkpoint import quantizing
    from jmx.numerics import formats
    from jmx.plot import style
    from jmx.util import atomic_files

    check_known("--quantize", arguments.quantize, formats.FORMATS)
    check_directories(arguments.report, arguments.picture)
    if arguments.picture is not None:
        style.check_new("--picture", arguments.picture)
        atomic_files.check_apart(
            picture=arguments.picture, report=arguments.report, source=arguments.source, target=arguments.target
        )
    report = quantizing.convert(
        arguments.source,
        arguments.target,
        formats.FORMATS[arguments.quantize],
        report=arguments.report,
        overwrite=arguments.overwrite,
        progress=not arguments.json,
    )
    if arguments.picture is not None:
        style.save_new(plot.quantization_error(report), arguments.picture)
    if arguments.json:
        print_json({"source": arguments.source, "target": arguments.target, **report.as_dict()})
    else:
        show(report.table())
        print(f"wrote {arguments.target} as {report.form}, experts in {report.format}")
    return EXIT_OK
