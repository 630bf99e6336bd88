"""Writing a checkpoint with its float experts quantised, and everything else as it is."""

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jmx import atomic_files, formats
from jmx.checkpoint import shards
from jmx.checkpoint.compressed_tensors.config import FILE, PLACES
from jmx.checkpoint.quantizing import experts
from jmx.checkpoint.quantizing.experts import Layer, Matrix
from jmx.checkpoint.quantizing.forms import Form, check_writable, form_of
from jmx.checkpoint.quantizing.report import Report, measure
from jmx.checkpoint.shards import INDEX, WEIGHT_FILES, CheckpointError, Output, Tensor
from jmx.formats import BlockScaled, Format
from jmx.quantization import quantize


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    format: Format,
    *,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    progress: bool = False,
) -> Report:
    """Writes the checkpoint `src` as a new directory `dst` whose experts are quantised by `jmx.quantize`.

    Experts are read, rounded and written one matrix at a time; a layer of them is never held. All other tensors keep
    their bits, and files beside them are copied (not folders). config.json says how to read the result: as
    compressed-tensors, or as the Hugging Face form of gpt-oss where that is the model and `format` MXFP4.

    Args:
        src: a directory of safetensors files: experts apart (Mixtral, Qwen-MoE, DeepSeek ...), or gpt-oss in floats.
        dst: does not exist yet, unless `overwrite`. It appears when it is complete, and a failure leaves nothing.
        format: a format in `WRITABLE`.
        overwrite: whether a directory at `dst` may be replaced, which happens when the new one is complete.
        max_shard_bytes: tensors' bytes in one file, unless a single tensor has more.
        progress: whether to show a progress bar on stderr, where that is a terminal.

    Returns:
        The errors of each layer.

    Raises:
        CheckpointError: `src` is wrong or broken, quantised already, or holds no experts that fit the format; NaN or
            infinity among their weights.
        FileExistsError, FileNotFoundError: `dst` exists, or the directory that should hold it does not.
        ValueError: a `format` that no file holds, a `dst` that is or holds `src`, a `max_shard_bytes` below 1.
    """
    check_writable(format)
    shards.check_shard_size(max_shard_bytes)
    directory = Path(src)
    if Path(dst).resolve() in (directory.resolve(), *directory.resolve().parents):
        raise ValueError(f"`dst` (={os.fspath(dst)!r}) must not be `src`, nor hold it")
    config = _read_config(directory)
    model_type = config.get("model_type")
    form = form_of(format, model_type)
    found = shards.read_headers(directory)
    layers = experts.find(directory, found, config)
    for layer in layers:
        _check_sizes(layer, format)
    report = Report(format.name, form.name)
    outputs = [*_outputs(found, layers, form, partial(_quantize, format, report))]
    config["quantization_config"] = form.config(_linear(found, layers))
    with atomic_files.new_path(dst, replace=overwrite) as made:
        made.mkdir()
        for file in sorted(directory.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_FILES and file.name not in (INDEX, FILE):
                shutil.copyfile(file, made / file.name)
        atomic_files.write_json(made / FILE, config)
        total = sum(output.nbytes for output in outputs)
        with shards.progress_bar("quantising", total, progress) as advance:
            shards.write(made, outputs, max_shard_bytes, advance)
    return report


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / FILE
    config = shards.read_object(file)
    for key in PLACES:
        if config.get(key) is not None:
            raise CheckpointError(file, f"`{key}` must not be there: weights are quantised already, and floats are not")
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
    """Every tensor: those of a layer's experts where the first of them was."""
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
    """Modules outside experts that have a matrix, such as projections of attention and routers."""
    held = {name for layer in layers for name in layer.tensors()}
    names = (name for name, t in found.items() if name.endswith(".weight") and len(t.shape) == 2)
    return [name.removesuffix(".weight") for name in names if name not in held]


def _quantize(format: Format, report: Report, matrix: Matrix) -> BlockScaled:
    """The packed weight, its errors told to `report`."""
    weight = matrix.read()
    try:
        quantised = quantize(jnp.asarray(weight), format)
    except ValueError as error:
        raise CheckpointError(matrix.weight.file, f"tensor {matrix.weight.name!r}: {error}") from error
    report.add(matrix.layer, matrix.part, measure(weight, quantised, format))
    return formats.pack(quantised)
