"""The model of `jmx generate`, `jmx chat` and `jmx serve`: its arguments, its weights, and whether they fit."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmx.cli import mesh_argument
from jmx.cli.checks import check_backend, check_known
from jmx.cli.parser import Parser

if TYPE_CHECKING:
    from jmx.checkpoint.peft import Reader
    from jmx.meshes import Names
    from jmx.models import Model
    from jmx.models.memory import Needs
    from jmx.models.model_split import ModelSplit
    from jmx.models.sources.protocol import Source

MODEL_HELP = "a directory of safetensors files, or owner/name[@revision] on the Hugging Face Hub"


def add(parser: Parser) -> None:
    """Adds the options; MODEL itself is each command's own."""
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of all but the experts")
    parser.add_argument(
        "--format",
        metavar="NAME",
        help="what float experts of a checkpoint are quantized to; of random experts, their format (default: mxfp4)",
    )
    parser.add_argument(
        "--inputs",
        choices=("declared", "float"),
        default="declared",
        help="whether experts quantize their inputs as the checkpoint declares (the default), or not at all",
    )
    parser.add_argument(
        "--pad-experts",
        action="store_true",
        help="pad experts where whole blocks of their weights and inputs do not divide their sizes",
    )
    parser.add_argument(
        "--adapter", metavar="DIR", help="a directory of PEFT's files, with LoRA adapters that are added to the experts"
    )
    parser.add_argument("--backend", metavar="NAME", help="the backend that must run the experts")
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="divide the model over devices: experts and heads by ep, experts' intermediate axis and heads by tp, "
        "prompts by dp",
    )
    parser.add_argument(
        "--mesh-axes",
        metavar="WHAT=AXIS,...",
        help="what axes of --mesh divide expert, intermediate, heads and token, if not those; heads=none: nothing",
    )


def check(arguments: argparse.Namespace) -> None:
    """ValueError for options that are wrong by themselves. Nothing is read."""
    import jmx

    if arguments.format is not None:
        check_known("--format", arguments.format, jmx.FORMATS)
    if arguments.backend is not None:
        check_backend("--backend", arguments.backend)
    if arguments.max_new_tokens < 1:
        raise ValueError(f"`--max-new-tokens` (={arguments.max_new_tokens}) must be at least 1")
    over = split(arguments)
    if arguments.adapter is not None:
        from jmx.models.adapters import check_adaptable

        check_adaptable(over, arguments.backend)


def split(arguments: argparse.Namespace) -> "ModelSplit | None":
    """How --mesh divides the model; None without it.

    Raises:
        ValueError: --mesh or --mesh-axes are wrong, or need other or more devices than there are.
    """
    divided = axes(arguments)
    if divided is None:
        return None
    from jmx.models.model_split import ModelSplit

    return ModelSplit.of(mesh_argument.make(arguments.mesh), divided)


def axes(arguments: argparse.Namespace) -> "dict[str, Names] | None":
    """The axes of --mesh by what they divide of a model; None without --mesh. Needs no devices.

    Raises:
        ValueError: --mesh or --mesh-axes is wrong, or --mesh-axes is without --mesh.
    """
    if arguments.mesh is None:
        if arguments.mesh_axes is not None:
            raise ValueError(f"`--mesh-axes` (={arguments.mesh_axes!r}) needs --mesh")
        return None
    from jmx.models.model_split import axes_of

    given = None if arguments.mesh_axes is None else mesh_argument.axes(arguments.mesh_axes)
    return axes_of([*mesh_argument.sizes(arguments.mesh)], given)


def find(name: str) -> Path:
    """The directory of MODEL, as `jmx.models.find` finds it. FileNotFoundError if it is not there."""
    from jmx.models import find

    directory = find(name)
    if not directory.is_dir():
        raise FileNotFoundError(f"`model` (={name!r}) is not a directory")
    return directory


def source(arguments: argparse.Namespace, directory: Path) -> "Source":
    """The checkpoint's weights, of which only headers have been read."""
    import jmx
    from jmx.models.loading import file_source

    format = None if arguments.format is None else jmx.FORMATS[arguments.format]
    declared = arguments.inputs == "declared"
    return file_source(directory, format=format, declared_inputs=declared, pad_experts=arguments.pad_experts)


def adapters(arguments: argparse.Namespace, source: "Source") -> "Reader | None":
    """The adapters of --adapter, of which only headers have been read; None without it.

    Raises:
        CheckpointError: files that are missing or broken, or not of adapters of these experts.
    """
    if arguments.adapter is None:
        return None
    from jmx.models.adapters import open_adapter

    return open_adapter(arguments.adapter, source)


def make(
    arguments: argparse.Namespace,
    source: "Source",
    adapters: "Reader | None",
    lengths: Sequence[int],
    all_logits: bool = False,
) -> "Model":
    """The model, for prompts of these lengths. Whether it fits is checked before weights are read.

    Raises:
        MemoryError: the device's memory is too small.
    """
    import jax
    import jax.numpy as jnp

    from jmx.models import from_source, memory

    over, dtype = split(arguments), jnp.dtype(arguments.dtype)
    if over is not None:
        over.check_rows("prompts", len(lengths))
    options = {"dtype": dtype, "all_logits": all_logits, "split": over, "adapters": adapters}
    needs = memory.needed(source, lengths, arguments.max_new_tokens, **options)
    devices = [jax.devices()[0]] if over is None else over.mesh.local_devices
    for device in devices:
        has = memory.available(device)
        if has is not None and device.platform == "cpu":
            has //= len(devices)  # they are parts of one machine's memory
        if has is not None and needs.total > has:
            raise MemoryError(_too_large(needs, has, device, lengths, over))
    with source.progress(True):
        return from_source(source, dtype=dtype, backend=arguments.backend, split=over, adapters=adapters)


def _too_large(needs: "Needs", has: int, device: Any, lengths: Sequence[int], split: "ModelSplit | None" = None) -> str:
    """The message with both numbers of bytes, and what there is to do."""
    from jmx.models import memory

    of_cache = f"the cache of {len(lengths)} rows" if len(lengths) > 1 else "the cache"
    parts = f"weights {size(needs.weights)}, {of_cache} {size(needs.cache)}, activations {size(needs.activations)}"
    smaller = "a smaller model, or a --format of fewer bits if its experts are floats"
    if needs.weights < has:
        fewer = "fewer or shorter prompts" if len(lengths) > 1 else "a shorter prompt"
        smaller = f"a smaller --max-new-tokens or {fewer}"
    helps = "; or ".join([smaller, *memory.remedies(device, split)])
    each = "" if split is None else " on each device"
    return (
        f"the model needs at least {size(needs.total)}{each} ({parts}), and {device.platform} {device.id} has "
        f"{size(has)} free; what helps: {helps}"
    )


def size(size: float | None) -> str:
    """A number of bytes for people."""
    if size is None:
        return "not known here"
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def context_length(directory: Path) -> int | None:
    """The tokens that the model was made for, prompt and answer, by its config.json; None if that has no number."""
    from jmx.checkpoint.shards import read_object

    entries = read_object(directory / "config.json")
    entries = entries.get("text_config", entries)
    length = entries.get("max_position_embeddings") if isinstance(entries, dict) else None
    return length if isinstance(length, int) and not isinstance(length, bool) and length > 0 else None
