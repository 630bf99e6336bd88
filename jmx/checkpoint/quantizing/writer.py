"""Writing a checkpoint with its experts quantized, floats or those of another format, and everything else unchanged."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jmx.checkpoint import shards
from jmx.checkpoint.compressed_tensors import Module, modelopt_config
from jmx.checkpoint.compressed_tensors.config import FILE
from jmx.checkpoint.compressed_tensors.quantization_config import (
    FILES,
    KEYS,
    TEXT_CONFIG,
    find_quantization,
    is_quantized,
)
from jmx.checkpoint.model_configs.gpt_oss import QUANTIZATION
from jmx.checkpoint.progress import progress_bar
from jmx.checkpoint.quantizing import file_list, float_experts, quantized_source
from jmx.checkpoint.quantizing.file_list import CHECKPOINT
from jmx.checkpoint.quantizing.float_experts import Layer, Matrix
from jmx.checkpoint.quantizing.output_forms import CompressedTensors, Form, check_columns, check_writable, form_of
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
# Not copied: the result has its own, or needs none.
_WRITTEN = (INDEX, FILE, file_list.FILE, modelopt_config.FILE, *FILES)


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

    Experts of `src` that are quantized already, in FP8 or another format that `compressed_tensors.Reader` reads, are
    dequantized to float32 first; other quantized modules keep their bits, and the names of compressed-tensors.

    Experts are read, quantized and written one matrix at a time; a whole layer is never in memory. All other tensors
    keep their bits, and other files (not folders) are copied. The result is a compressed-tensors checkpoint, or the
    Hugging Face form of gpt-oss if that is the model and `format` is MXFP4; config.json states which.

    Args:
        src: a directory of safetensors files: experts in separate tensors (Mixtral, Qwen-MoE, DeepSeek ...), or in
            tensors of all experts, of a model whose order of rows is known; in floats, or quantized.
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
        CheckpointError: `src` is wrong or broken, has no experts that fit the format, or modules outside experts that
            no file of the result can hold; weights are NaN or infinite.
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
    kept: dict[str, Module] = {}
    if is_quantized(directory):
        form = CompressedTensors(format)
        layers, kept = _read_quantized(directory, config)
    else:
        layers = float_experts.find_layers(directory, found, config)
    for layer in layers:
        _check_sizes(layer, format)
    errors = Report(format.name, form.name)
    outputs = [*_outputs(found, layers, kept, form, partial(_quantize, format, errors))]
    schemes = {name: quantized_source.kept_scheme(module) for name, module in kept.items()}
    config["quantization_config"] = form.config(_linear(found, layers, kept), schemes)
    with contextlib.ExitStack() as stack:  # exits in reverse order: `dst` appears first
        places = {
            path: stack.enter_context(atomic_files.new_path(path, kind, overwrite=overwrite))
            for path, kind in wanted.items()
        }
        made = places[dst]
        made.mkdir()
        for file in sorted(directory.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_FILES and file.name not in _WRITTEN:
                shutil.copyfile(file, made / file.name)
        atomic_files.write_json(made / FILE, config)
        total = sum(output.nbytes for output in outputs)
        with progress_bar("quantizing", total, progress) as advance:
            shards.write(made, outputs, max_shard_bytes, advance)
        file_list.write_list(made)
        if report is not None:
            atomic_files.write_json(places[report], errors.as_dict())
    return errors


def _read_quantized(directory: Path, config: dict[str, Any]) -> tuple[list[Layer], dict[str, Module]]:
    """The layers of experts of a quantized source, and its other quantized modules; `config` loses its formats."""
    source = quantized_source.Source(directory, "concatenated")
    for entries in (config, config.get(TEXT_CONFIG)):
        if isinstance(entries, dict):
            for key in KEYS:
                entries.pop(key, None)
    return quantized_source.find_layers(source, config.get("model_type")), quantized_source.kept_modules(source)


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / FILE
    config = shards.read_object(file)
    found = find_quantization(file, config)
    if found is not None and found[1] == QUANTIZATION:
        raise CheckpointError(
            file, f"`{found[0]}` must not be there: tensors of blocks, as gpt-oss has them, are not requantized"
        )
    return config


def _check_sizes(layer: Layer, format: Format) -> None:
    for matrix in layer.experts[0].values():
        try:
            check_columns(format, matrix.shape[1])
        except ValueError as error:
            raise CheckpointError(matrix.weight.file, f"tensor {matrix.weight.name!r}: {error}") from error


def _outputs(
    found: dict[str, Tensor],
    layers: list[Layer],
    kept: dict[str, Module],
    form: Form,
    quantize: Callable[[Matrix], BlockScaled],
) -> Iterator[Output]:
    """Every tensor in order; a layer's experts follow where the first of them was, and so do those of a module."""
    owners = {name: layer for layer in layers for name in layer.tensors()}
    of_kept = {piece.tensor.name: module for module in kept.values() for piece in module.pieces.values()}
    written: set[str] = set()
    for name, tensor in found.items():
        layer, module = owners.get(name), of_kept.get(name)
        if module is not None:
            if module.name not in written:
                written.add(module.name)
                yield from quantized_source.kept_outputs(module)
        elif layer is None:
            yield Output(name, tensor.dtype, tensor.shape, lambda tensor=tensor: [tensor.view()])
        elif layer.name not in written:
            written.add(layer.name)
            yield from form.outputs(layer, quantize)


def _linear(found: dict[str, Tensor], layers: list[Layer], kept: dict[str, Module]) -> list[str]:
    """Modules outside experts that have a matrix, such as projections of attention and routers.

    The head is always among them: files have no tensor of it if it is tied to the embedding, and unless it is named,
    readers would take it for quantized.
    """
    held = {name for layer in layers for name in layer.tensors()}
    names = (name for name, t in found.items() if name.endswith(".weight") and len(t.shape) == 2)
    linear = [module for name in names if name not in held and (module := name.removesuffix(".weight")) not in kept]
    if not any(name.split(".")[-1] == _HEAD for name in (*linear, *kept)):
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
