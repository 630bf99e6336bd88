"""Writing a compressed-tensors checkpoint: experts from their arrays, everything else unchanged."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import numpy as np

from jmx.checkpoint import shards
from jmx.checkpoint.compressed_tensors.layers import Layer
from jmx.checkpoint.compressed_tensors.module import Module
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.checkpoint.compressed_tensors.reader import Reader
from jmx.checkpoint.progress import progress_bar
from jmx.checkpoint.shards import DTYPES, INDEX, WEIGHT_FILES, CheckpointError, Output, Tensor
from jmx.util import atomic_files
from jmx.util.checks import check_bool, check_instance, check_path
from jmx.util.typing import Shaped


def convert(
    reader: Reader, dst: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000, progress: bool = False
) -> None:
    """Writes the checkpoint that `reader` reads as a new directory `dst`, with the same bits in every tensor.

    Each module of an expert is converted to arrays and back, and compared with the tensors that were read. config.json
    and the files beside it are copied.

    Args:
        reader: of the checkpoint.
        dst: must not exist. It appears when it is complete; a failure leaves nothing behind.
        max_shard_bytes: the most bytes of tensors in one file, unless a single tensor has more.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: the checkpoint is wrong or broken.
        FileExistsError, FileNotFoundError: `dst` exists, or the directory that should hold it does not.
        ValueError: `dst` is, contains or is inside the directory of `reader`; `max_shard_bytes` is below 1.
    """
    check_instance("reader", reader, Reader)
    check_path("dst", dst)
    check_bool("progress", progress)
    shards.check_shard_size(max_shard_bytes)
    atomic_files.check_apart(dst=dst, reader=reader.path)
    outputs = [*_outputs(reader)]
    with atomic_files.new_path(dst) as directory:
        directory.mkdir()
        for file in sorted(reader.path.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_FILES and file.name != INDEX:
                shutil.copyfile(file, directory / file.name)
        total = sum(output.nbytes for output in outputs)
        with progress_bar("writing", total, progress) as advance:
            shards.write(directory, outputs, max_shard_bytes, advance)


def _outputs(reader: Reader) -> Iterator[Output]:
    """Every tensor: first those outside experts or in floats, then those of each layer, module by module."""
    modules = {
        tensor.name: parts for layer in reader.layers.values() for tensor, parts in _expert_tensors(layer).items()
    }
    for name, tensor in reader.tensors.items():
        if name not in modules:
            yield Output(name, tensor.dtype, tensor.shape, lambda tensor=tensor: [tensor.view()])
    latest = _Latest()
    for name, parts in modules.items():
        tensor = reader.tensors[name]
        yield Output(name, tensor.dtype, tensor.shape, partial(_parts, tensor, parts, latest))


def _expert_tensors(layer: Layer) -> dict[Tensor, list[tuple[Module, str]]]:
    """The quantized modules that the parts of each of a layer's tensors come from: one, or those of all experts."""
    found: dict[Tensor, list[tuple[Module, str]]] = {}
    for module in layer.quantized:
        for last, piece in module.pieces.items():
            parts = found.setdefault(piece.tensor, [])
            if piece.expert is not None or not parts:
                parts.append((module, last))
    return found


class _Latest:
    """Caches the tensors of the last module: files store a module's tensors side by side."""

    def __init__(self) -> None:
        self._module: Module | None = None
        self._tensors: Mapping[str, Shaped[np.ndarray, ...]] = {}

    def tensors(self, module: Module) -> Mapping[str, Shaped[np.ndarray, "..."]]:
        if module is not self._module:
            self._tensors = module_tensors(module.scheme, module.weight(), module.kept())
            self._module = module
        return self._tensors


def _parts(tensor: Tensor, parts: Iterable[tuple[Module, str]], latest: _Latest) -> Iterator[Shaped[np.ndarray, "..."]]:
    for module, last in parts:
        made, piece = latest.tensors(module)[last], module.pieces[last]
        read = piece.view()
        if made.dtype != DTYPES[tensor.dtype] or made.shape != read.shape or made.tobytes() != read.tobytes():
            raise CheckpointError(tensor.file, f"tensor {tensor.name!r} is not the same after a round trip")
        yield np.ascontiguousarray(made.T) if piece.transposed else made
