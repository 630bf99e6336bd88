"""Writing a checkpoint with its float experts quantized, and everything else unchanged."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jmx.checkpoint import shards
from jmx.checkpoint.compressed_tensors.config import FILE
from jmx.checkpoint.compressed_tensors.quantization_config import find_quantization
from jmx.checkpoint.progress import progress_bar
from jmx.checkpoint.quantizing import file_list, float_experts
from jmx.checkpoint.quantizing.file_list import CHECKPOINT
from jmx.checkpoint.quantizing.float_experts import Layer, Matrix
from jmx.checkpoint.quantizing.output_forms import Form, check_writable, form_of
from jmx.checkpoint.quantizing.report import REPORT, Report, measure
from jmx.checkpoint.shards import INDEX, WEIGHT_FILES, CheckpointError, Output, Tensor
from jmx.numerics import formats
from jmx.numerics.formats import BlockScaled, Format
from jmx.numerics.formats import get as get_format
from jmx.numerics.quantization import quantize
from jmx.util import atomic_files
from jmx.util.checks import check_bool, check_path

# Names of a model's first and last matrix in transformers.
_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    format: Format | str,
    *,
    report: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    progress: bool = False,
) -> Report:
    """Writes the checkpoint `src` as a new directory `dst` whose experts are quantized by `jmx.quantize`.

    Experts are read, quantized and written one matrix at a time; a whole layer is never in memory. All other tensors
    keep their bits, and other files (not folders) are copied. The result is a compressed-tensors checkpoint, or the
    Hugging Face form of gpt-oss if that is the model and `format` is MXFP4; config.json states which.

    Args:
        src: a directory of safetensors files: experts in separate tensors (Mixtral, Qwen-MoE, DeepSeek ...), or gpt-oss
            in floats.
        dst: must not exist, unless `overwrite`. It appears when it is complete; a failure leaves nothing behind.
        format: a format in `WRITABLE`, or its name.
        report: a file for the errors, as JSON. Like `dst`, it must not exist, unless `overwrite`.
        overwrite: whether the results of an earlier call at `dst` and `report` may be replaced, once the new ones are
            complete. Anything else there is an error: a directory in which a file was added or changed, another file.
        max_shard_bytes: the most bytes of tensors in one file, unless a single tensor has more.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Returns:
        The errors of each layer.

    Raises:
        CheckpointError: `src` is wrong or broken, quantized already, or has no experts that fit the format; weights are
            NaN or infinite.
        FileExistsError, FileNotFoundError: `dst` or `report` exists and may not be replaced, or its parent directory
            does not exist.
        ValueError: `format` cannot be written; `dst` or `report` is, contains or is inside `src` or the other;
            `max_shard_bytes` is below 1.
    """
    check_path("src", src)
    check_path("dst", dst)
    if report is not None:
        check_path("report", report)
    check_bool("overwrite", overwrite)
    check_bool("progress", progress)
    format = get_format(format)
    check_writable(format)
    shards.check_shard_size(max_shard_bytes)
    atomic_files.check_apart(dst=dst, src=src, report=report)
    wanted = {dst: CHECKPOINT} if report is None else {report: REPORT, dst: CHECKPOINT}
    for path, kind in wanted.items():
        atomic_files.check_new(path, kind, overwrite=overwrite)
    directory = Path(src)
    config = _read_config(directory)
    form = form_of(format, config.get("model_type"))
    found = shards.read_headers(directory)
    layers = float_experts.find(directory, found, config)
    for layer in layers:
        _check_sizes(layer, format)
    errors = Report(format.name, form.name)
    outputs = [*_outputs(found, layers, form, partial(_quantize, format, errors))]
    config["quantization_config"] = form.config(_linear(found, layers))
    with contextlib.ExitStack() as stack:  # exits in reverse order: `dst` appears first
        places = {
            path: stack.enter_context(atomic_files.new_path(path, kind, overwrite=overwrite))
            for path, kind in wanted.items()
        }
        made = places[dst]
        made.mkdir()
        for file in sorted(directory.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_FILES and file.name not in (INDEX, FILE, file_list.FILE):
                shutil.copyfile(file, made / file.name)
        atomic_files.write_json(made / FILE, config)
        total = sum(output.nbytes for output in outputs)
        with progress_bar("quantizing", total, progress) as advance:
            shards.write(made, outputs, max_shard_bytes, advance)
        file_list.write_list(made)
        if report is not None:
            atomic_files.write_json(places[report], errors.as_dict())
    return errors


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / FILE
    config = shards.read_object(file)
    found = find_quantization(file, config)
    if found is not None:
        raise CheckpointError(
            file, f"`{found[0]}` must not be there: weights are quantized already, and floats are not"
        )
    return config


def _check_sizes(layer: Layer, format: Format) -> None:
    for matrix in layer.experts[0].values():
        try:
            format.check_size("columns", matrix.shape[1])
        except ValueError as error:
            raise CheckpointError(matrix.weight.file, f"tensor {matrix.weight.name!r}: {error}") from error


def _outputs(
    found: dict[str, Tensor], layers: list[Layer], form: Form, quantize: Callable[[Matrix], BlockScaled]
) -> Iterator[Output]:
    """Every tensor in order; a layer's experts follow where the first of them was."""
    owners = {name: layer for layer in layers for name in layer.tensors()}
    written: set[str] = set()
    for name, tensor in found.items():
        layer = owners.get(name)
        if layer is None:
            yield Output(name, tensor.dtype, tensor.shape, lambda tensor=tensor: [tensor.view()])
        elif layer.name not in written:
            written.add(layer.name)
            yield from form.outputs(layer, quantize)


def _linear(found: dict[str, Tensor], layers: list[Layer]) -> list[str]:
    """Modules outside experts that have a matrix, such as projections of attention and routers.

    The head is always among them: files have no tensor of it if it is tied to the embedding, and unless it is named,
    readers would take it for quantized.
    """
    held = {name for layer in layers for name in layer.tensors()}
    names = (name for name, t in found.items() if name.endswith(".weight") and len(t.shape) == 2)
    linear = [name.removesuffix(".weight") for name in names if name not in held]
    if not any(name.split(".")[-1] == _HEAD for name in linear):
        beside = (f"{name.removesuffix(_EMBEDDING)}{_HEAD}" for name in linear if f".{name}".endswith(f".{_EMBEDDING}"))
        linear += dict.fromkeys([_HEAD, *beside])
    return linear


def _quantize(format: Format, report: Report, matrix: Matrix) -> BlockScaled:
    """The packed weight; its errors are added to `report`."""
    weight = matrix.read()
    try:
        quantized = quantize(jnp.asarray(weight), format)
    except ValueError as error:
        raise CheckpointError(matrix.weight.file, f"tensor {matrix.weight.name!r}: {error}") from error
    report.add(matrix.layer, matrix.part, measure(weight, quantized, format))
    return formats.pack(quantized)
