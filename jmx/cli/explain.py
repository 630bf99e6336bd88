"""`jmx explain`: which backend runs a layer, and why each of the others does not."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from jmx.cli import checkpoint, layer_split, mesh_argument
from jmx.cli.checks import check_backend, check_known, check_pair
from jmx.cli.output import EXIT_NO, EXIT_OK, print_json, show
from jmx.cli.parser import MOST, Parser, add_format, add_json, add_tokens, number

if TYPE_CHECKING:
    from jmx.activations import Activation
    from jmx.parallel.division import Division
    from jmx.routing import Method
    from jmx.selection.environment import Environment
    from jmx.selection.problem import Problem

_CHECKPOINT = (
    "of gpt-oss, or of any model whose experts are quantized, or are floats that `jmx convert --quantize` can "
    "quantize: these are explained as quantized to --format"
)


def add(command: Parser) -> None:
    sizes = command.add_argument_group(
        "sizes", "from a checkpoint or a named model; sizes that are given override those"
    )
    source = sizes.add_mutually_exclusive_group()
    source.add_argument("--checkpoint", metavar="DIR", help=_CHECKPOINT)
    source.add_argument("--model", metavar="NAME", help="a shape that `jmx bench` knows, such as gpt-oss-120b")
    for name in ("hidden", "intermediate", "experts", "top-k"):
        sizes.add_argument(f"--{name}", type=number, metavar="N")
    call = command.add_argument_group("the call")
    add_tokens(call, ", of all devices (default 1)", default=[1])
    call.add_argument("--dtype", metavar="NAME", help="of the activations (default bfloat16)")
    call.add_argument(
        "--activation",
        metavar="NAME",
        help="default swiglu; parameters follow a colon: swiglu:alpha=1.702,beta=1,limit=7",
    )
    orders = ("interleaved", "concatenated", "interleaved_up_first", "concatenated_up_first", "none")
    call.add_argument("--gate-up-order", choices=orders)
    call.add_argument("--bias", action=argparse.BooleanOptionalAction, help="whether the experts have biases")
    add_format(call)
    call.add_argument(
        "--layout", default="auto", metavar="NAME", help="of the weights (default: the device's own for the formats)"
    )
    call.add_argument("--weights-on", choices=("output", "input"), default="output")
    call.add_argument("--backend", metavar="NAME", help="request this backend")
    call.add_argument("--device", metavar="NAME", help="a device that need not be present, such as h200")
    layer_split.add(command.add_argument_group("several devices"), "divide the call")
    command.add_argument("--all", action="store_true", help="list the backends of other platforms, too")
    add_json(command)


def run(arguments: argparse.Namespace) -> int:
    from jmx.explain import explain_problem
    from jmx.selection.environment import Environment, known_devices

    if arguments.backend is not None:
        check_backend("--backend", arguments.backend)
    if arguments.device is None:
        environment = Environment.probe()
    else:
        environment = Environment.named(check_known("--device", arguments.device, known_devices(), any_case=True))
    layer_split.check(arguments)
    problems, floats = _problems(arguments, environment)
    divisions = _divisions(arguments, problems, None if arguments.device is None else environment.platform)
    method = None if arguments.model is None else _method(arguments.model, problems[0].top_k)
    declared = arguments.format is None  # then inputs are quantized only if a checkpoint declares it
    explanations = [
        explain_problem(
            problem,
            environment,
            arguments.backend,
            inputs_declared=declared and problem.input_format is not None,
            all=arguments.all,
            division=division,
            routed=method,
        )
        for problem, division in zip(problems, divisions, strict=True)
    ]
    if arguments.json:
        added = {"rounded_from": floats}
        if floats is not None:
            added |= {"unquantized": _unquantized(problems[0], environment)}
        print_json([explanation.as_dict() | added for explanation in explanations])
    else:
        if floats is not None:
            print(_rounded(floats, problems[0].format))
            print(f"as floats they run on {_unquantized(problems[0], environment)}")
        show(*explanations)
    runs = (explanation.chosen is not None for explanation in explanations)
    exchanges = (its is None or its.call is None or its.chosen is not None for its in divisions)
    return EXIT_OK if all(runs) and all(exchanges) else EXIT_NO


def _divisions(
    arguments: argparse.Namespace, problems: "list[Problem]", platform: str | None
) -> "list[Division | None]":
    """How --mesh divides each problem. Needs no devices. `platform`: of those that --device names."""
    from jax.sharding import AbstractMesh

    from jmx.parallel.division import Division

    if arguments.mesh is None:
        return [None] * len(problems)
    sizes = mesh_argument.sizes(arguments.mesh)
    split = layer_split.split_of(AbstractMesh(tuple(sizes.values()), tuple(sizes)), arguments.exchange)
    return [Division.of(problem, split, sizes, platform=platform) for problem in problems]


def _rounded(floats: str, format: str) -> str:
    from jmx.checkpoint.quantizing.output_forms import storage_of
    from jmx.numerics.formats import FORMATS

    how = f", as `jmx convert --quantize {format}` does" if storage_of(FORMATS[format]) else ""
    return f"the checkpoint's experts are {floats}: explained as quantized to {format}{how} (another: --format)"


def _unquantized(problem: "Problem", environment: "Environment") -> str:
    """The backend that runs the layer if its weights stay floats of the dtype of x, and why none before it does."""
    from jmx.explain import explain_problem
    from jmx.pallas.float_sm90.backend import MosaicFloat

    floats = {"format": problem.dtype, "layout": "packed", "input_format": None, "padded_from": None}
    problem = dataclasses.replace(problem.without_padding(), **floats)
    rejection = MosaicFloat().supports(problem, environment)
    why = "" if rejection is None else f" ({MosaicFloat.name}: {rejection.reason.value}, {rejection.detail})"
    return f"{explain_problem(problem, environment).chosen}{why}"


def _problems(arguments: argparse.Namespace, environment: "Environment") -> tuple[list["Problem"], str | None]:
    """The problem that the flags describe, at each token count, and the dtype of a checkpoint's floats.

    ValueError for flags that do not fit together.
    """
    from jmx.activations import SwiGLU
    from jmx.backends import registered_backends, resolve_layout
    from jmx.experts import experts
    from jmx.numerics import formats, layouts
    from jmx.selection.problem import Problem

    fields: dict[str, Any] = {"dtype": "bfloat16", "format": "mxfp4", "activation": SwiGLU(), "bias": False}
    floats = None
    if arguments.checkpoint is not None:
        found, floats = checkpoint.read_fields(arguments)
        fields |= found
    elif arguments.model is not None:
        fields |= _model_fields(arguments.model)
    flags = {
        "hidden_size": arguments.hidden,
        "intermediate_size": arguments.intermediate,
        "num_experts": arguments.experts,
        "top_k": arguments.top_k,
        "dtype": arguments.dtype,
        "activation": None if arguments.activation is None else _activation(arguments.activation),
        "bias": arguments.bias,
    }
    fields |= {name: value for name, value in flags.items() if value is not None}
    if arguments.format is not None:
        fields["format"], fields["input_format"] = check_pair(arguments.format)
    missing = [f"--{flag}" for flag in ("hidden", "intermediate", "experts", "top-k") if _FIELD[flag] not in fields]
    if missing:
        raise ValueError(f"give {', '.join(missing)}, or a --checkpoint or --model that has them")

    registered_backends()  # registers their layouts too
    check_known("--layout", arguments.layout, ["auto", *layouts.LAYOUTS])
    check_known("--dtype", fields["dtype"], ("bfloat16", "float16", "float32", "float64"))
    gated = fields["activation"].gated
    if arguments.gate_up_order is not None:
        fields["gate_up_order"] = None if arguments.gate_up_order == "none" else arguments.gate_up_order
    order = fields.setdefault("gate_up_order", "concatenated" if gated else None)
    if gated != (order is not None):
        raise ValueError(
            f"`--gate-up-order` (={order or 'none'}) does not fit `--activation` (={fields['activation']}), "
            f"which has {'a' if gated else 'no'} gate"
        )
    for name in _FIELD.values():
        if fields[name] > MOST:
            raise ValueError(f"`{name}` (={fields[name]}) must be at most {MOST}")
    sizes = (fields["num_experts"], fields["hidden_size"], fields["intermediate_size"])
    format, inputs = formats.FORMATS[fields["format"]], fields.get("input_format")
    experts.check_sizes(*sizes, format, inputs)
    if not 1 <= fields["top_k"] <= fields["num_experts"]:
        raise ValueError(f"`--top-k` (={fields['top_k']}) must be in 1..{fields['num_experts']}, the number of experts")
    for count in arguments.tokens:
        if count < 1:
            raise ValueError(f"`--tokens` (={count}) must be at least 1")
    layout = resolve_layout(arguments.layout, environment, format, inputs)
    fields |= {"layout": layout, "weights_on": arguments.weights_on}
    return [Problem(num_tokens=count, **fields) for count in arguments.tokens], floats


_FIELD = {"hidden": "hidden_size", "intermediate": "intermediate_size", "experts": "num_experts", "top-k": "top_k"}


def _model_fields(name: str) -> dict[str, Any]:
    from jmx.perf.shapes import MODELS

    check_known("--model", name, MODELS)
    problem = MODELS[name].problem(1, "packed")
    return {field: getattr(problem, field) for field in (*_FIELD.values(), "activation", "gate_up_order", "bias")}


def _method(model: str, top_k: int) -> "Method":
    """The routing method of a named model, with as many slots as the flags ask for."""
    from jmx.perf.shapes import MODELS

    return dataclasses.replace(MODELS[model].method, top_k=top_k)


def _activation(text: str) -> "Activation":
    """The activation of "name" or "name:parameter=value,...": swiglu:alpha=1.702,beta=1,limit=7."""
    from jmx import activations

    kinds = {kind.__name__.lower(): kind for kind in vars(activations).values() if _is_activation(kind)}
    name, _, rest = text.lower().partition(":")
    check_known("--activation", name, kinds)
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
            f"`--activation` (={text!r}) has a missing or an unknown parameter: it takes {takes}"
        ) from None


def _is_activation(kind: Any) -> bool:
    from jmx.activations import Activation, SwiGLUPerExpert

    several = (Activation, SwiGLUPerExpert)  # which no words name, or whose parameters are no numbers
    return isinstance(kind, type) and issubclass(kind, Activation) and kind not in several
