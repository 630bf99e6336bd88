"""Which tool quantised a checkpoint, and what its config says."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors import config, fp8, modelopt, quark
from jmx.checkpoint.compressed_tensors.config import FILE, PLACES, Quantization
from jmx.checkpoint.shards import CheckpointError, read_json, read_object


def read_quantization(path: str | os.PathLike[str]) -> Quantization:
    """What the configs in the directory `path` say of each module, whichever of the tools that are known wrote them.

    Raises:
        CheckpointError: there is no config, it names another tool, or what that tool's parser raises.
    """
    file = Path(path) / FILE
    return quantization_of(file, read_object(file))


def quantization_of(file: Path, contents: Mapping[str, Any]) -> Quantization:
    """`read_quantization` of what a config.json holds, which is `file`."""
    beside = file.parent / modelopt.FILE
    given = [key for key in PLACES if contents.get(key) is not None]
    if not given and beside.exists():
        whole = read_json(beside)
        inner = whole.get("quantization") if isinstance(whole, dict) else None
        return modelopt.parse_modelopt(beside, "quantization", inner)
    value = contents[given[0]] if given else None
    method = value.get("quant_method") if isinstance(value, dict) else None
    if method in modelopt.METHODS:
        return modelopt.parse_modelopt(file, given[0], value)
    if method == quark.METHOD:
        return quark.parse_quark(file, given[0], value)
    if method == fp8.METHOD:
        return fp8.parse_fp8(file, given[0], value)
    known = [config.METHOD, *modelopt.METHODS, quark.METHOD, fp8.METHOD]
    if method is not None and method != config.METHOD:
        raise CheckpointError(file, f"`{given[0]}.quant_method` (={method!r}) must be one of {known}")
    return config.parse_quantization(file, contents)
