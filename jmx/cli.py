"""The command line: `jmx explain | doctor | convert | bench | tune | build`.

Imports of jax stand inside the commands, so that `--help` and usage errors are quick. Results go to stdout, all else to
stderr.
"""

import argparse
import dataclasses
import difflib
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jmx._version import __version__

if TYPE_CHECKING:
    from jmx.activations import Activation
    from jmx.selection import Environment, Problem

EXIT_OK, EXIT_NO, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_EPILOG = """exit codes:
  0    done
  1    the answer is no: no backend runs, a check failed, or this machine cannot do it
  2    usage, or bad input
  130  interrupted; nothing is left half written
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"jmx: error: {message} (see `{self.prog} --help`)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that `argv` (default: the program's arguments) asks for, and returns its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        if hasattr(arguments, "compilation_cache"):
            _use_compilation_cache(arguments.compilation_cache)
        return arguments.command(arguments)
    except KeyboardInterrupt:
        print("jmx: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO
    except (ValueError, TypeError, OSError) as e:
        return _fail(e, EXIT_USAGE)
    except (RuntimeError, ImportError, MemoryError) as e:
        return _fail(e, EXIT_NO)


def _fail(error: Exception, code: int) -> int:
    print(f"jmx: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
    return code


def _parser() -> _Parser:
    shared = _Parser(add_help=False)
    shared.add_argument(
        "--compilation-cache",
        metavar="DIR",
        default=argparse.SUPPRESS,  # so that the one before the command is not overwritten by a default
        help="keep compiled programs in DIR, for later runs",
    )
    parser = _Parser(
        prog="jmx",
        description="A mixture-of-experts layer for Flax whose expert weights stay in 4 bits.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"jmx {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Any, summary: str) -> _Parser:
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            parents=[shared],
        )
        command.set_defaults(command=run)
        return command

    _add_explain(add("explain", _explain, "say which backend runs a layer, and why each of the others does not"))
    _add_json(add("doctor", _doctor, "show versions and devices, what each backend lacks here, and how to get it"))
    _add_convert(add("convert", _convert, "write a checkpoint in another form, or with its experts quantised"))
    _add_bench(add("bench", _bench, "time one layer on this machine, against the machine's own limits"))
    _add_tune(add("tune", _tune, "measure how a backend's kernels run fastest here, and keep that for later calls"))
    _add_build(add("build", _build, "compile a backend's kernels for this machine, and keep them for later calls"))
    return parser


def _add_json(command: _Parser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON on stdout instead of a table")


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between them") from None


def _check_known(flag: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError, naming what is known and what is nearest, unless `value` is known."""
    names = sorted(known)
    if value not in names:
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.4)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"`{flag}` (={value!r}) must be one of {', '.join(names)}{meant}")


def _check_directories(*paths: str | None) -> None:
    """Raises ValueError for a file that could not be written, before the work that it is to hold."""
    for path in filter(None, paths):
        if not pathlib.Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path} cannot be written: its directory does not exist")


def _use_compilation_cache(directory: str) -> None:
    import jax

    pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _print(*results: Any) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for result in results:
        console.print(result)


def _print_json(values: Any) -> None:
    print(json.dumps(values, indent=1))


# jmx explain


def _add_explain(command: _Parser) -> None:
    sizes = command.add_argument_group(
        "sizes", "from a checkpoint or a named model; what is given one by one goes before those"
    )
    source = sizes.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", metavar="DIR", help="a gpt-oss checkpoint, of which the config is read")
    source.add_argument("--model", metavar="NAME", help="a shape that `jmx bench` knows, such as gpt-oss-120b")
    for name in ("hidden", "intermediate", "experts", "top-k"):
        sizes.add_argument(f"--{name}", type=int, metavar="N")
    call = command.add_argument_group("the call")
    call.add_argument("--tokens", type=_counts, default=[1], metavar="N,...", help="token counts (default 1)")
    call.add_argument("--dtype", metavar="NAME", help="of the activations (default bfloat16)")
    call.add_argument(
        "--activation",
        metavar="NAME",
        help="default swiglu; parameters follow a colon: swiglu:alpha=1.702,beta=1,limit=7",
    )
    call.add_argument("--gate-up-order", choices=("interleaved", "concatenated", "none"))
    call.add_argument("--bias", action=argparse.BooleanOptionalAction, help="whether the experts have biases")
    call.add_argument("--format", metavar="NAME", help="of the weights (default mxfp4)")
    call.add_argument("--layout", default="auto", metavar="NAME", help="of the weights (default: the device's own)")
    call.add_argument("--weights-on", choices=("output", "input"), default="output")
    call.add_argument("--backend", metavar="NAME", help="ask for this one")
    call.add_argument("--device", metavar="NAME", help="a device that need not be here, such as h200")
    _add_json(command)


def _explain(arguments: argparse.Namespace) -> int:
    from jmx.backends import BACKENDS
    from jmx.explain import explain_problem
    from jmx.selection import Environment, known_devices

    if arguments.device is not None:
        _check_known("--device", arguments.device, known_devices())
    if arguments.backend is not None:
        _check_known("--backend", arguments.backend, [backend.name for backend in BACKENDS])
    environment = Environment.named(arguments.device) if arguments.device is not None else Environment.probe()
    problems = _problems(arguments, environment)
    explanations = [explain_problem(problem, environment, arguments.backend) for problem in problems]
    if arguments.json:
        _print_json([explanation.as_dict() for explanation in explanations])
    else:
        _print(*explanations)
    return EXIT_OK if all(explanation.chosen is not None for explanation in explanations) else EXIT_NO


def _problems(arguments: argparse.Namespace, environment: "Environment") -> list["Problem"]:
    """The problem that the flags of `jmx explain` name, at each token count. ValueError for one that cannot be."""
    from jmx import experts, formats, layouts
    from jmx.activations import SwiGLU
    from jmx.backends import resolve_layout
    from jmx.selection import Problem

    fields: dict[str, Any] = {"dtype": "bfloat16", "format": "mxfp4", "activation": SwiGLU(), "bias": False}
    if arguments.checkpoint is not None:
        fields |= _checkpoint_fields(arguments.checkpoint)
    elif arguments.model is not None:
        fields |= _model_fields(arguments.model)
    flags = {
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "num_experts": arguments.experts,
        "top_k": arguments.top_k,
        "dtype": arguments.dtype,
        "format": arguments.format,
        "activation": None if arguments.activation is None else _activation(arguments.activation),
        "bias": arguments.bias,
    }
    fields |= {name: value for name, value in flags.items() if value is not None}
    missing = [f"--{flag}" for flag in ("hidden", "intermediate", "experts", "top-k") if _FIELD[flag] not in fields]
    if missing:
        raise ValueError(f"give {', '.join(missing)}, or a --checkpoint or --model that has them")

    _check_known("--format", fields["format"], formats.FORMATS)
    _check_known("--layout", arguments.layout, ["auto", *layouts.LAYOUTS])
    _check_known("--dtype", fields["dtype"], ("bfloat16", "float16", "float32", "float64"))
    gated = fields["activation"].gated
    if arguments.gate_up_order is not None:
        fields["gate_up_order"] = None if arguments.gate_up_order == "none" else arguments.gate_up_order
    order = fields.setdefault("gate_up_order", "concatenated" if gated else None)
    if gated != (order is not None):
        raise ValueError(
            f"`--gate-up-order` (={order or 'none'}) does not fit `--activation` (={fields['activation']}), "
            f"which has {'a' if gated else 'no'} gate"
        )
    sizes = (fields["num_experts"], fields["hidden_size"], fields["intermediate_size"])
    experts.check_sizes(*sizes, formats.FORMATS[fields["format"]])
    if not 1 <= fields["top_k"] <= fields["num_experts"]:
        raise ValueError(f"`--top-k` (={fields['top_k']}) must be in 1..{fields['num_experts']}, the number of experts")
    for count in arguments.tokens:
        if count < 1:
            raise ValueError(f"`--tokens` (={count}) must be at least 1")
    fields |= {"layout": resolve_layout(arguments.layout, environment), "weights_on": arguments.weights_on}
    return [Problem(num_tokens=count, **fields) for count in arguments.tokens]


_FIELD = {"hidden": "hidden_size", "intermediate": "intermediate_size", "experts": "num_experts", "top-k": "top_k"}


def _checkpoint_fields(directory: str) -> dict[str, Any]:
    from jmx.activations import SwiGLU
    from jmx.checkpoint import gpt_oss

    config = gpt_oss.read_config(directory)
    sizes = {name: getattr(config, name) for name in _FIELD.values()}
    activation = SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit)
    return sizes | {"activation": activation, "gate_up_order": "interleaved", "bias": True}


def _model_fields(name: str) -> dict[str, Any]:
    from jmx.bench import MODELS

    _check_known("--model", name, MODELS)
    problem = MODELS[name].problem(1, "packed")
    return {field: getattr(problem, field) for field in (*_FIELD.values(), "activation", "gate_up_order", "bias")}


def _activation(text: str) -> "Activation":
    """The activation of "name" or "name:parameter=value,...": swiglu:alpha=1.702,beta=1,limit=7."""
    from jmx import activations

    kinds = {kind.__name__.lower(): kind for kind in vars(activations).values() if _is_activation(kind)}
    name, _, rest = text.lower().partition(":")
    _check_known("--activation", name, kinds)
    parameters: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        try:
            parameters[key] = {"true": True, "false": False, "none": None}[value] if value.isalpha() else float(value)
        except (KeyError, ValueError):
            raise ValueError(
                f"`--activation` (={text!r}): {key} (={value!r}) must be a number, true or false"
            ) from None
    for field in dataclasses.fields(kinds[name]):
        value = parameters.get(field.name)
        if field.name in parameters and (field.type is bool) != isinstance(value, bool):
            wanted = "true or false" if field.type is bool else "a number"
            raise ValueError(f"`--activation` (={text!r}): {field.name} (={value!r}) must be {wanted}")
    try:
        return kinds[name](**parameters)
    except TypeError:
        takes = ", ".join(field.name for field in dataclasses.fields(kinds[name])) or "no parameters"
        raise ValueError(
            f"`--activation` (={text!r}) lacks a parameter or has one too many: it takes {takes}"
        ) from None


def _is_activation(kind: Any) -> bool:
    from jmx.activations import Activation

    return isinstance(kind, type) and issubclass(kind, Activation) and kind is not Activation


# jmx doctor


def _doctor(arguments: argparse.Namespace) -> int:
    from jmx import doctor

    findings = doctor.examine()
    if arguments.json:
        _print_json(findings)
    else:
        _print(*doctor.tables(findings))
        for line in findings["advice"]:
            print(line)
    return EXIT_OK if findings["healthy"] else EXIT_NO


# jmx convert


def _add_convert(command: _Parser) -> None:
    command.add_argument(
        "source",
        metavar="IN",
        help="directory of a gpt-oss checkpoint, of either form; with --quantize, of any whose experts are floats, "
        "apart as Mixtral, Qwen-MoE and DeepSeek have them, or as gpt-oss",
    )
    command.add_argument("target", metavar="OUT", help="directory to make; one that exists is refused")
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
    command.add_argument("--report", metavar="FILE", help="with --quantize: write the errors as JSON")
    command.add_argument("--overwrite", action="store_true", help="with --quantize: replace OUT, when all is written")
    command.add_argument("--json", action="store_true", help="print JSON on stdout, and no progress")


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.quantize is not None:
        return _convert_quantized(arguments)
    for flag in ("report", "overwrite"):
        if getattr(arguments, flag):
            raise ValueError(f"`--{flag}` goes with `--quantize` alone")
    from jmx.checkpoint import gpt_oss

    gpt_oss.convert(arguments.source, arguments.target, form=arguments.to, progress=not arguments.json)
    if arguments.json:
        _print_json({"source": arguments.source, "target": arguments.target, "form": arguments.to})
    else:
        print(f"wrote {arguments.target} in the form {arguments.to!r}")
    return EXIT_OK


def _convert_quantized(arguments: argparse.Namespace) -> int:
    from jmx import formats
    from jmx.checkpoint import quantizing, shards

    _check_known("--quantize", arguments.quantize, formats.FORMATS)
    _check_directories(arguments.report)
    format = formats.FORMATS[arguments.quantize]
    report = quantizing.convert(
        arguments.source, arguments.target, format, overwrite=arguments.overwrite, progress=not arguments.json
    )
    if arguments.report is not None:
        with shards.new_path(arguments.report, replace=True) as file:
            shards.write_json(file, report.as_dict())
    if arguments.json:
        _print_json({"source": arguments.source, "target": arguments.target, **report.as_dict()})
    else:
        _print(report.table())
        print(f"wrote {arguments.target} as {report.form}, experts in {report.format}")
    return EXIT_OK


# jmx bench


def _add_bench(command: _Parser) -> None:
    command.add_argument("--model", metavar="NAME", help="a named shape (default gpt-oss-120b; on a CPU small)")
    command.add_argument(
        "--tokens", type=_counts, metavar="N,...", help="token counts (default 1,64,1024,8192; on a CPU 1,16,64)"
    )
    command.add_argument("--routing", default="uniform", metavar="NAME", help="uniform (default), zipf, half or top1")
    command.add_argument(
        "--format",
        metavar="NAME,...",
        help="weight formats, one after the other, with an input format behind a colon or without (default mxfp4)",
    )
    command.add_argument("--backends", metavar="NAME,...", help="backends, and ragged_dot (default: all that run here)")
    command.add_argument(
        "--layers", type=int, metavar="N", help="different layers in one call (default 16 up to 16 tokens, 4 beyond)"
    )
    command.add_argument("--repeats", type=int, default=5, metavar="N", help="samples of each median (default 5)")
    command.add_argument("--seed", type=int, metavar="N", help="of weights and tokens (default: a new one)")
    command.add_argument("--from", dest="saved", metavar="FILE", help="measure nothing: show a saved JSON file")
    command.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="save JSON to FILE, or print it on stdout without FILE"
    )
    command.add_argument("--png", metavar="FILE", help="draw time over floor against tokens")


def _bench(arguments: argparse.Namespace) -> int:
    from jmx import roofline

    _check_directories(arguments.json, arguments.png)
    if arguments.png is not None:
        roofline.require_matplotlib()
    report = _measure(arguments) if arguments.saved is None else roofline.Report.load(arguments.saved)
    if arguments.json == "-":
        _print_json(report.as_dict())
    else:
        _print(report)
        if arguments.json is not None:
            report.save(arguments.json)
    if arguments.png is not None:
        roofline.draw(report, arguments.png)
    measured = [row for row in report.rows if row.us is not None]
    return EXIT_OK if measured and all(row.error is None for row in measured) else EXIT_NO


def _measure(arguments: argparse.Namespace) -> Any:
    import jax

    from jmx import bench

    on_cpu = jax.default_backend() == "cpu"
    model = arguments.model or ("small" if on_cpu else "gpt-oss-120b")
    backends = None if arguments.backends is None else arguments.backends.split(",")
    _check_known("--model", model, bench.MODELS)
    _check_known("--routing", arguments.routing, bench.ROUTINGS)
    pairs = None if arguments.format is None else arguments.format.split(",")
    for name in backends or ():
        _check_known("--backends", name, bench.contestants())
    for pair in pairs or ():
        _check_pair(pair)
    return bench.run(
        model,
        arguments.tokens or ([1, 16, 64] if on_cpu else [1, 64, 1024, 8192]),
        routing=arguments.routing,
        formats=pairs,
        backends=backends,
        layers=arguments.layers,
        repeats=arguments.repeats,
        seed=arguments.seed,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )


def _check_pair(pair: str) -> None:
    """Of --format: WEIGHTS or WEIGHTS:INPUTS."""
    from jmx.formats import FORMATS
    from jmx.inputs import INPUT_FORMATS

    weights, colon, inputs = pair.partition(":")
    _check_known("--format", weights, FORMATS)
    if colon:
        _check_known("--format", inputs, INPUT_FORMATS)


# jmx tune


def _add_tune(command: _Parser) -> None:
    command.add_argument("--backend", metavar="NAME", help="default: the first one that can be tuned and runs here")
    command.add_argument(
        "--shape",
        default="gpt-oss-120b",
        metavar="NAME|E,k,H,I",
        help="a shape that `jmx bench` knows (default gpt-oss-120b), or experts, top-k, hidden and intermediate size",
    )
    command.add_argument(
        "--format",
        default="mxfp4",
        metavar="NAME",
        help="of the weights, with an input format behind a colon or without (default mxfp4)",
    )
    command.add_argument(
        "--tokens", type=_counts, metavar="N,...", help="token counts (default: powers of 4, and some more)"
    )
    command.add_argument("--output", metavar="FILE", help="the table to add to (default: this user's own cache)")
    command.add_argument(
        "--seconds", type=float, metavar="N", help="begin no candidate of a token count after N (default: try them all)"
    )
    command.add_argument("--again", action="store_true", help="measure what the table has already, too")


def _tune(arguments: argparse.Namespace) -> int:
    from jmx import tuner, tuning
    from jmx.backends import BACKENDS
    from jmx.selection import Environment

    _check_pair(arguments.format)
    shape = _shape(arguments.shape, arguments.format)
    tokens = arguments.tokens or tuner.TOKENS
    for flag, value, fits in [
        *(("tokens", count, count >= 1) for count in tokens),
        ("seconds", arguments.seconds, arguments.seconds is None or arguments.seconds > 0),
    ]:
        if not fits:
            raise ValueError(f"`--{flag}` (={value}) must be positive")
    if arguments.backend is not None:
        _check_known("--backend", arguments.backend, [backend.name for backend in BACKENDS])
    _check_directories(arguments.output)
    environment = Environment.probe()
    engine = tuner.choose_engine(arguments.backend, shape, tokens[0], environment)
    strict = arguments.output is not None
    file = pathlib.Path(arguments.output) if strict else tuning.cache_file(engine.name, environment.device_kind)
    outcomes = tuner.run(
        engine,
        shape,
        tokens,
        file,
        strict=strict,
        again=arguments.again,
        seconds=arguments.seconds,
    )
    _print(tuner.table(outcomes))
    print(f"in {file}")
    return EXIT_OK if all(outcome.entry is not None for outcome in outcomes) else EXIT_NO


def _shape(text: str, pair: str) -> Any:
    """The `jmx.bench.Shape` that --shape names: by its own name, or by sizes with all else as in gpt-oss.

    `pair`: what --format names.
    """
    from jmx import bench
    from jmx.routing import TopKSoftmax

    if not text[:1].isdigit():
        _check_known("--shape", text, bench.MODELS)
        return _in_formats(bench.MODELS[text], pair)
    try:
        num_experts, top_k, hidden, intermediate = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"`--shape` (={text!r}) must be a name, or four whole numbers E,k,H,I") from None
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"`--shape` (={text!r}) has k (={top_k}) outside 1..{num_experts}, the number of experts")
    sizes = {"num_experts": num_experts, "hidden_size": hidden, "intermediate_size": intermediate}
    shape = dataclasses.replace(bench.MODELS["gpt-oss-120b"], **sizes, method=TopKSoftmax(top_k))
    return _in_formats(shape, pair)


def _in_formats(shape: Any, pair: str) -> Any:
    from jmx import experts, formats

    shape = shape.in_formats(pair)
    sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
    experts.check_sizes(*sizes, formats.FORMATS[shape.format])
    return shape


# jmx build


def _add_build(command: _Parser) -> None:
    command.add_argument("engine", metavar="BACKEND", help="cutlass: FlashInfer's kernels for Hopper, 5 to 20 minutes")
    command.add_argument("--arch", default="sm_90a", metavar="NAME", help="of the GPU (default and only one: sm_90a)")
    command.add_argument("--jobs", type=int, metavar="N", help="compilers at a time (default: as many as fit here)")
    command.add_argument("--output", metavar="FILE", help="the library to write (default: in this user's own cache)")
    command.add_argument("--again", action="store_true", help="compile although it is there")


def _build(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from jmx.ffi import cutlass_build, cutlass_source

    _check_known("BACKEND", arguments.engine, ["cutlass"])
    _check_known("--arch", arguments.arch, [cutlass_source.ARCHITECTURE])
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"`--jobs` (={arguments.jobs}) must be at least 1")
    _check_directories(arguments.output)
    output = None if arguments.output is None else pathlib.Path(arguments.output)
    console = Console(stderr=True, highlight=False)
    path, made = cutlass_build.run(console, output=output, jobs=arguments.jobs, again=arguments.again)
    print(f"{'compiled' if made else 'was compiled before'}: {path}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
