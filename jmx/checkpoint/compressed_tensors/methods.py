"""Which tool quantised a checkpoint, and what its config says."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jmx.checkpoint.compressed_tensors import config, fp8, modelopt, quark
from jmx.checkpoint.compressed_tensors.config import FILE, Quantization
from jmx.checkpoint.compressed_tensors.places import PLACES, find_quantization
from jmx.checkpoint.shards import CheckpointError, read_json, read_object
from jmx.util.checks import check_path


def read_quantization(path: str | os.PathLike[str]) -> Quantization:
    """What the configs in the directory `path` say of each module, whichever of the tools that are known wrote them.

    Raises:
        CheckpointError: there is no config, it says nothing of quantization, differs in two places, names another tool,
            or what that tool's parser raises.
    """
    file = check_path("path", path) / FILE
    return quantization_of(file, read_object(file))


def quantization_of(file: Path, contents: Mapping[str, Any]) -> Quantization:
    """`read_quantization` of what a config.json holds, which is `file`."""
    beside, found = file.parent / modelopt.FILE, find_quantization(file, contents)
    if found is None and os.path.lexists(beside):
        whole = read_json(beside)
        inner = whole.get("quantization") if isinstance(whole, dict) else None
        return modelopt.parse_modelopt(beside, "quantization", inner)
    if found is None:
        raise CheckpointError(
            file,
            f"has no `{PLACES[0]}`, so weights are not quantized; `jmx convert IN OUT --quantize FORMAT` "
            "quantizes experts",
        )
    place, value = found
    method = value.get("quant_method") if isinstance(value, dict) else None
    if method in modelopt.METHODS:
        return modelopt.parse_modelopt(file, place, value)
    if method == quark.METHOD:
        return quark.parse_quark(file, place, value)
    if method == fp8.METHOD:
        return fp8.parse_fp8(file, place, value)
    known = [config.METHOD, *modelopt.METHODS, quark.METHOD, fp8.METHOD]
    if method is not None and method != config.METHOD:
        raise CheckpointError(file, f"`{place}.quant_method` (={method!r}) must be one of {known}")
    return config.parse_quantization(file, place, value)
