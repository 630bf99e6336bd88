"""Writing a compressed-tensors checkpoint back: experts out of their arrays, everything else as it is."""

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
from jmx.experts import ROLES
from jmx.util import atomic_files
from jmx.util.checks import check_bool, check_instance, check_path


def convert(
    reader: Reader, dst: str | os.PathLike[str], *, max_shard_bytes: int = 5_000_000_000, progress: bool = False
) -> None:
    """Writes the checkpoint that `reader` reads as a new directory `dst`: every bit of every tensor stays.

    One expert's module at a time goes through its arrays; each tensor is compared with the one that was read.
    config.json and the files beside it are copied.

    Args:
        reader: of the checkpoint.
        dst: does not exist yet. It appears when it is complete, and nothing is left behind if that fails.
        max_shard_bytes: tensors' bytes in one file, unless a single tensor has more.
        progress: whether to show a progress bar on stderr, where that is a terminal.

    Raises:
        CheckpointError: the checkpoint is wrong or broken.
        FileExistsError, FileNotFoundError: `dst` exists, or the directory that should hold it does not.
        ValueError: a `dst` that is, holds or lies in the directory of `reader`; a `max_shard_bytes` below 1.
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
    """Every tensor: those outside experts, then those of each layer, module by module."""
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
    """Where the parts of each of a layer's tensors come from: one module, or those of all experts."""
    found: dict[Tensor, list[tuple[Module, str]]] = {}
    for role in ROLES:
        for its in layer.modules[role]:
            for module in its:
                for last, piece in module.pieces.items():
                    parts = found.setdefault(piece.tensor, [])
                    if piece.expert is not None or not parts:
                        parts.append((module, last))
    return found


class _Latest:
    """The tensors of the module that was asked for last: files keep a module's side by side."""

    def __init__(self) -> None:
        self._module: Module | None = None
        self._tensors: Mapping[str, np.ndarray] = {}

    def tensors(self, module: Module) -> Mapping[str, np.ndarray]:
        if module is not self._module:
            self._tensors = module_tensors(module.scheme, module.weight(), module.kept())
            self._module = module
        return self._tensors


def _parts(tensor: Tensor, parts: Iterable[tuple[Module, str]], latest: _Latest) -> Iterator[np.ndarray]:
    for module, last in parts:
        made, piece = latest.tensors(module)[last], module.pieces[last]
        read = piece.view()
        if made.dtype != DTYPES[tensor.dtype] or made.shape != read.shape or made.tobytes() != read.tobytes():
            raise CheckpointError(tensor.file, f"tensor {tensor.name!r} does not come back as it was read")
        yield np.ascontiguousarray(made.T) if piece.transposed else made
